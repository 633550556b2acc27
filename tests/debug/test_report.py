"""The HTML report: what it holds, and how it behaves in a browser."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lazytpu.cli.app import app
from lazytpu.debug.device_times import DeviceTimes, device_times
from lazytpu.debug.folder import digest, open_dump, sealed
from lazytpu.debug.report import collect, write_report
from tests.support.dumped_program import CALL_LINE, FORWARD_LINE, OUTSIDE_LINE, the_dump

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
FLAGS += ["--disable-component-update", "--no-first-run"]
MANY = 5000
LOAD_S = 2.0


def unpacked(page: str) -> list[dict]:
    """The data in a page: the overview, then each graph."""
    found = re.findall(r'<script type="application/octet-stream" id="data-[\w-]+">([^<]+)</script>', page)
    return [json.loads(gzip.decompress(base64.b64decode(text))) for text in found]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    page = tmp_path_factory.mktemp("report") / "small.html"
    result = CliRunner().invoke(app, ["report", str(the_dump()), "--out", str(page), "--title", "a <title>"])
    assert result.exit_code == 0, result.output
    return page


def test_the_page_is_one_file_without_a_network(small):
    text = small.read_text()
    assert "a &lt;title&gt;" in text
    assert "default-src 'none'" in text
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', markup) == []
    assert "sourceMappingURL" not in text
    assert text.count("</script>") == text.count("<script")


def test_the_page_holds_the_run_and_every_graph(small):
    overview, *graphs = unpacked(small.read_text())
    assert len(graphs) == len(overview["graphs"]) == 3
    assert [s["compiles"] for s in overview["steps"]] == [1, 1, 0, 1]
    assert any("class Net" in text for text in overview["sources"].values())
    part = graphs[2]
    assert len(part["ops"]) == overview["graphs"][2]["ops"]
    for pane in part["texts"].values():
        assert len(pane["lines"]) == len(pane["numbers"]) == len(pane["ops"]) > 10
    names = {row[1] for row in part["instructions"]}
    owners = {row[3] for row in part["instructions"] if row[3]}
    lines = dict(zip(part["texts"]["hlo"]["numbers"], part["texts"]["hlo"]["lines"], strict=True))
    assert owners and all(" fusion(" in lines[owner] for owner in owners)
    assert all("metadata=" not in line for line in lines.values()) and len(names) > 50
    assert part["diff"][0].startswith("--- graph-002-")


def test_the_dump_is_not_changed_by_looking(small):
    before = sorted(str(p) for p in the_dump().rglob("*"))
    write_report(open_dump(the_dump()), small.with_name("again.html"), title="a <title>")
    assert small.with_name("again.html").read_bytes() == small.read_bytes()
    assert sorted(str(p) for p in the_dump().rglob("*")) == before


def trace_of(folder: Path, events: list[dict]) -> None:
    path = folder / "plugins" / "profile" / "2026" / "host.trace.json.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


def event(name: str, run: int, duration_us: float) -> dict:
    args = {"hlo_module": "jit_lazytpu_1", "hlo_op": name, "run_id": str(run)}
    return {"ph": "X", "name": name, "dur": duration_us, "args": args}


def test_times_come_from_the_trace_of_the_profiler(tmp_path):
    assert device_times(tmp_path) == device_times(tmp_path / "none") == {}
    trace_of(tmp_path, [event("a", 1, 10), event("a", 2, 30), event("b", 2, 5), {"ph": "M", "name": "x"}])
    (found,) = device_times(tmp_path).values()
    assert found.runs == 2
    assert found.seconds == pytest.approx({"a": 40e-6, "b": 5e-6})


def test_the_time_of_a_fusion_is_divided_among_its_ops_by_flops():
    rows = [
        {"line": 3, "name": "fusion", "opcode": "fusion", "ops": [0]},
        {"line": 1, "name": "x", "opcode": "add", "ops": [0]},
        {"line": 2, "name": "y", "opcode": "add", "ops": [1]},
        {"line": 4, "name": "dot", "opcode": "dot", "ops": [2]},
        {"line": 5, "name": "loop", "opcode": "while", "ops": [2]},
    ]
    times = DeviceTimes(runs=2)
    times.seconds.update({"fusion": 24.0, "dot": 10.0, "loop": 99.0, "x": 99.0})
    found = collect.op_seconds([{"flops": n} for n in (8, 2, 5)], rows, {1: 3, 2: 3}, times)
    assert found == pytest.approx({0: 9.0, 1: 3.0, 2: 5.0})


def test_measured_times_reach_the_ops():
    graph = open_dump(the_dump()).graphs[1]
    rows = graph.table("links.json")["hlo-optimized.txt"]["instructions"]
    times = DeviceTimes(runs=2)
    times.seconds.update({row["name"]: 0.002 for row in rows if row["opcode"] in ("fusion", "dot", "copy")})
    assert sum(op["seconds"] or 0 for op in collect.graph_part(graph, times)["ops"]) > 0
    assert all(op["seconds"] is None for op in collect.graph_part(graph, None)["ops"])


def test_the_account_of_a_step_gets_the_lines_that_a_profile_has_measured():
    dump = open_dump(the_dump())
    assert collect.overview(dump, {})["slow"] == {}, "four steps are too few"
    graph = dump.graphs[1]
    times = DeviceTimes(runs=2)
    rows = graph.table("links.json")["hlo-optimized.txt"]["instructions"]
    times.seconds.update({row["name"]: 0.002 for row in rows if row["opcode"] in ("fusion", "dot", "copy")})
    by_module = {graph.manifest["hlo_module"]: times}
    parts = [collect.graph_part(g, by_module.get(g.manifest["hlo_module"])) for g in dump.graphs]
    estimated = {"how": "estimated", "rows": [["net.py:1", 1.0, ["aten.mm"]]]}
    dump.__dict__["summary"] = {"slow": {"steps": 9, "lines": [estimated]}}
    assert collect.overview(dump, {}, parts)["slow"]["lines"] == [estimated]
    first, measured = collect.overview(dump, by_module, parts)["slow"]["lines"]
    assert first == estimated and measured["how"] == "measured by the profile"
    assert 1 <= len(measured["rows"]) <= 5 and sum(share for _, share, _ in measured["rows"]) <= 1.001
    assert measured["rows"][0][0].startswith("net.py:") and measured["rows"] == sorted(
        measured["rows"], key=lambda row: -row[1]
    )


# --- in a browser --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium")
    with playwright.sync_playwright() as started:
        made = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield made
        made.close()


class Opened:
    """A page in the browser, with whatever its console said."""

    def __init__(self, browser, file: Path, scheme: str = "light") -> None:
        self.said: list[str] = []
        self.page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme=scheme)
        self.page.on("console", lambda m: self.said.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on(
            "request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else self.said.append(r.url)
        )
        start = time.perf_counter()
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-ready=yes]", state="attached")
        self.load_s = time.perf_counter() - start

    def marked(self, pane: str, kind: str = ".sel") -> list[str]:
        """Lines that are marked in a pane, of those in view."""
        return self.page.locator(f".pane[data-pane={pane}] .ln{kind}").all_inner_texts()

    def tab(self, name: str) -> None:
        self.page.click(f"#tabs [data-tab={name}]")
        self.page.wait_for_selector(f".tab[data-tab={name}]:not([hidden])", state="attached")


@pytest.fixture
def opened(browser, small):
    made = Opened(browser, small)
    yield made
    made.page.close()
    assert made.said == []


def test_overview(opened):
    page = opened.page
    tiles = page.inner_text("#run-tiles")
    assert "3\ngraphs compiled" in tiles and "4\nsteps" in tiles
    assert page.locator("#timeline canvas").count() == 1
    assert page.locator("#graph-table .tabulator-row").count() == 3
    page.click("#graph-table .tabulator-row >> nth=2")
    page.wait_for_selector("#graph:not([hidden])")
    assert page.inner_text("#graph-title") == "Graph 3"
    assert "f32[6,1,8,8]" in page.inner_text("#cause")
    page.click("text=difference from graph 2")
    page.wait_for_selector("#diff .ln.add")
    assert "aten.convolution" in page.inner_text("#diff")
    page.go_back()
    page.go_back()
    page.wait_for_selector("#overview:not([hidden])")


def test_a_line_of_the_source_leads_to_what_it_became(opened):
    page = opened.page
    page.click("#side [data-number='2']")
    page.wait_for_selector(".pane[data-pane=source] .ln")
    page.click(f".pane[data-pane=source] .ln >> nth={FORWARD_LINE - 1}")
    assert len(opened.marked("source")) == 1
    marked = opened.marked("ir")
    assert any("aten.convolution(" in line for line in marked) and all("net.py:12" in line for line in marked)
    assert opened.marked("stablehlo")
    assert "net.py:12" in page.inner_text("#selection")
    assert page.locator("#selection .chip.fusion").count() > 0
    page.locator("#selection .chip.fusion").first.click()
    assert any(" fusion(" in line for line in opened.marked("hlo", ".fus"))


def test_a_line_that_only_calls_leads_to_what_is_recorded_below_it(opened):
    page = opened.page
    page.click("#side [data-number='2']")
    page.wait_for_selector(".pane[data-pane=source] .ln")
    page.click(f".pane[data-pane=source] .ln >> nth={CALL_LINE - 1}")
    assert [line.split("\n")[0] for line in opened.marked("source")] == [str(FORWARD_LINE), str(CALL_LINE)]
    assert any("aten.convolution(" in line for line in opened.marked("ir")) and opened.marked("stablehlo")
    said = page.inner_text("#selection").replace("\n", " ")
    assert f"net.py:{CALL_LINE} calls what is recorded at net.py:{FORWARD_LINE}" in said
    assert page.locator("#selection .below").count() == 0
    page.click(f".pane[data-pane=source] .ln >> nth={OUTSIDE_LINE - 1}")
    assert page.locator("#selection .below").count() == 0, "it calls nothing of the program"
    page.click(".pane[data-pane=source] .ln >> nth=3")
    assert "A view is recorded by the line that reads it" in page.inner_text("#selection")


def test_a_line_with_ops_and_calls(opened):
    ops = [
        {"op": f"aten.{op}", "name": f"%{i}", "file": "/net.py", "line": line, "stack": stack,
         "results": [[f"%{i}", "f32[4]"]], "module": "", "operands": [f"%{i - 1}"],
         "backward": False, "bytes": 16, "flops": 4, "seconds": None}
        for i, (op, line, stack) in enumerate([("sin", 2, 0), ("cos", 3, 1)])
    ]  # fmt: skip
    ir = {"lines": ["sin", "cos"], "numbers": [1, 2], "ops": [[0], [1]]}
    empty = {"lines": [], "numbers": [], "ops": []}
    part = {"ops": ops, "stacks": [[["/net.py", 3]], []], "texts": {"ir": ir, "stablehlo": empty, "hlo": empty}}
    part |= {"instructions": [], "folded": {}}
    page = opened.page
    sources = {"/net.py": "def f(x):\n    return x.sin()\ny = f(x).cos()\n"}
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<div id=s></div><div id=b></div>')")
    page.evaluate("([s, p]) => { window.made = new CodePanes($('b'), $('s'), s); made.load(p); }", [sources, part])
    page.evaluate("made.pick(made.panes.source, 2)")
    assert page.evaluate("[...made.selected]") == [1]
    page.evaluate("document.querySelector('#s .below').onclick()")
    assert page.evaluate("[...made.selected]") == [1, 0]
    assert page.evaluate("document.querySelector('#s .below')") is None


def test_an_instruction_leads_back_to_its_line(opened):
    page = opened.page
    page.click("#side [data-number='1']")
    page.wait_for_selector(".pane[data-pane=stablehlo] .ln")
    page.locator(".pane[data-pane=stablehlo] .ln", has_text="stablehlo.").nth(3).click()
    assert opened.marked("ir") and opened.marked("source")


def test_search(opened):
    page = opened.page
    page.keyboard.press("/")
    page.keyboard.type("aten.relu")
    page.wait_for_selector("#results button")
    assert all("aten.relu" in text for text in page.locator("#results .what").all_inner_texts())
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(".pane[data-pane=ir] .ln.sel")
    assert "aten.relu" in opened.marked("ir")[0]
    assert "graph=2" in page.url  # the second result
    page.fill("#search", "no such thing")
    page.wait_for_selector("#results .none")
    page.fill("#search", "fusion")
    page.wait_for_selector("#results .kind:has-text('HLO')")
    page.locator("#results button:has-text('HLO')").first.click()
    page.wait_for_selector("#selection .chip.fusion")


def test_modules_memory_and_drawing(opened):
    page = opened.page
    page.click("#side [data-number='2']")
    opened.tab("modules")
    page.wait_for_selector("#modules .tabulator-row")
    page.locator("#modules .tabulator-row", has_text=re.compile(r"^Net\d")).click()
    text = page.inner_text("#modules")
    assert "Net (backward)" in text and "conv" in text and "net.py:" in text
    page.locator("#modules .tabulator-data-tree-control").nth(0).click()
    page.locator("#modules .tabulator-row", has_text="aten.").first.click()
    page.wait_for_selector(".pane[data-pane=ir] .ln.sel")
    opened.tab("memory")
    page.wait_for_selector("#inputs .tabulator-row")
    assert "donated" in page.inner_text("#inputs")
    opened.tab("drawing")
    page.wait_for_selector("#drawing canvas")
    boxes = page.evaluate("page.drawing.cy.nodes().length")
    page.click("[data-draw=out]")
    folded = page.evaluate("page.drawing.cy.nodes().length")
    page.click("[data-draw=in]")
    assert folded < boxes <= page.evaluate("page.drawing.cy.nodes().length")
    assert page.evaluate("page.drawing.cy.edges().length") > 0


def test_dark(browser, small):
    opened = Opened(browser, small, "dark")
    page = opened.page
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.click("#theme")
    assert page.evaluate(background) != dark
    page.close()
    assert opened.said == []


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """The page of a graph of 5,000 ops in 50 modules, from files as a dump has them."""
    folder = tmp_path_factory.mktemp("large")
    name = "graph-001-00000000"
    (folder / name).mkdir()
    (folder / "sources").mkdir()
    (folder / "sources" / "00-net.py").write_text("v = x.t()\n" + "".join(f"v = layer_{i}(v)\n" for i in range(100)))
    ops = [
        {
            "name": f"%{i}", "op": "aten.mul.Tensor" if i else "aten.t", "text": "",
            "results": [{"name": f"%{i}", "type": "f32[8]", "bytes": 32}],
            "operands": [f"%{i - 1}" if i else "%p0"], "file": "/net.py", "line": i // 50 + 2,
            "module": f"Net.blocks.{i // 100}.part{i // 25 % 4}", "backward": False, "flops": 8 * (i % 7), "bytes": 64,
        }
        for i in range(MANY)
    ]  # fmt: skip
    hlo, rows = ["HloModule jit_lazytpu_00000000", "", "ENTRY %main (a: f32[8]) -> f32[8] {"], []
    for i in range(4, 4 * MANY):
        hlo.append(f'  %multiply.{i} = f32[8]{{0}} multiply(%a, %a), metadata={{op_name="x"}}')
        row = {"line": i, "name": f"multiply.{i}", "opcode": "multiply", "computation": "main", "how": "metadata"}
        rows.append({**row, "ops": [i // 4]})
    ir = [
        "graph(%p0: f32[8]) {",
        *[f"  %{i}: f32[8] = aten.mul.Tensor(%p0, %p0)  # net.py:1" for i in range(MANY)],
        "}",
    ]
    stablehlo = [f"    %{i} = stablehlo.multiply %arg0, %arg0 : tensor<8xf32>" for i in range(2 * MANY)]
    files = {
        "ir.txt": "\n".join(ir),
        "stablehlo.mlir": "\n".join(stablehlo),
        "hlo-optimized.txt": "\n".join([*hlo, "}"]),
        "diff.txt": "--- a\n+++ b\n" + "\n".join(f"+ line {i}" for i in range(MANY)),
        "graph.json": json.dumps({"inputs": [], "numbers": [], "ops": ops, "outputs": []}),
        "links.json": json.dumps(
            {
                "ir.txt": [[], *[[i] for i in range(MANY)]],
                "stablehlo.mlir": [[i // 2] for i in range(2 * MANY)],
                "hlo-optimized.txt": {
                    "instructions": rows,
                    "computations": [{"name": "main", "line": 3, "called_by": []}],
                },
            }
        ),
    }
    for file, text in files.items():
        (folder / name / file).write_text(text)
    cause = {"kind": "first", "text": "the first graph", "with": "", "fix": "", "at": "net.py:1", "was": "?"}
    about = {"name": name, "number": 1, "ops": MANY, "inputs": 1, "outputs": 1, "flops": 0, "bytes": 0, "nearest": None}
    about |= {"cause": cause, "missing": {}, "hlo_module": "jit_lazytpu_00000000"}
    about["sha256"] = {file: digest(text.encode()) for file, text in files.items()}
    (folder / name / "manifest.json").write_text(json.dumps(sealed(about)))
    source = (folder / "sources/00-net.py").read_bytes()
    run = {
        "sha256": {"sources/00-net.py": digest(source)},
        "graphs": [name],
        "sources": {"/net.py": "sources/00-net.py"},
        "versions": {},
    }
    (folder / "manifest.json").write_text(json.dumps(sealed(run)))
    page = folder / "large.html"
    write_report(open_dump(folder), page)
    return page


def test_a_graph_of_5000_ops_opens_in_two_seconds(browser, large):
    opened = Opened(browser, large)
    page = opened.page
    best = opened.load_s
    for _ in range(4):  # other work on the machine may have slowed the first
        if best < LOAD_S:
            break
        again = Opened(browser, large)
        best = min(best, again.load_s)
        again.page.close()
    assert best < LOAD_S
    page.click("#side [data-number='1']")
    page.wait_for_selector(".pane[data-pane=hlo] .ln")
    page.click(".pane[data-pane=ir] .ln >> nth=1")  # a view, of which XLA made no instruction
    assert len(opened.marked("ir")) == 1 and len(opened.marked("hlo", ".weak")) == 4
    said = page.inner_text("#selection").replace("\n", " ")
    assert "no instruction of its own: folded into %1 aten.mul.Tensor" in said
    page.click(".pane[data-pane=source] .ln >> nth=3")
    assert len(page.query_selector_all(".ln")) < 1500  # only what is in view
    assert opened.marked("ir") and opened.marked("hlo")
    for tab in ("modules", "drawing", "diff"):
        opened.tab(tab)
    page.wait_for_selector("#drawing canvas", state="attached")
    assert 0 < page.evaluate("page.drawing.cy.nodes().length") <= 400
    page.close()
    assert opened.said == []
