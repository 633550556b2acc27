"""Dumps: every file, the same in every run, every instruction traced back, costs, differences."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch
from torch._higher_order_ops.scan import scan

import lazytpu
from lazytpu.debug import cost, draw, dump, hlo, links, passes
from lazytpu.debug.compare import nearest, text_of, unified
from lazytpu.debug.cost import flops_of
from lazytpu.debug.folder import Dump, NotADump, open_dump
from lazytpu.ir.tree import trace
from lazytpu.observe import step_statistics
from lazytpu.tracing import reading, step
from tests.support.dumped_program import FORWARD_LINE, dump_into, the_dump


@pytest.fixture(scope="module")
def dumped() -> Dump:
    return open_dump(the_dump())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a dump but those under ``times``."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(file): (folder / file).read_bytes() for file in files if file.parts[0] != "times"}


def test_two_runs_differ_in_nothing_but_times(dumped):
    again = dump_into(dumped.folder.parent, "again")
    first, second = contents(dumped.folder), contents(again)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    assert {path.name for path in (again / "times").iterdir()} == {"compiles.jsonl", "steps.jsonl", "summary.json"}
    shutil.rmtree(again)


def test_every_file_is_there_or_said_to_be_missing(dumped):
    assert [g.number for g in dumped.graphs] == [1, 2, 3]
    for graph in dumped.graphs:
        expected = set(dump.FILES) - set(graph.manifest["missing"])
        assert set(graph.manifest["files"]) == expected
        assert {p.name for p in graph.folder.iterdir()} == expected | {"manifest.json"}
        for name in expected:
            assert graph.text(name).strip(), name
    missing = set().union(*(g.manifest["missing"] for g in dumped.graphs))
    assert missing <= {"ir.svg", "diff.txt"}
    if shutil.which("dot"):
        assert "</svg>" in dumped.graphs[1].text("ir.svg")


def test_every_instruction_leads_back_to_an_op(dumped):
    for graph in dumped.graphs:
        ops = graph.table("graph.json")["ops"]
        inputs = {v["name"] for key in ("inputs", "numbers") for v in graph.table("graph.json")[key]}
        for file in ("hlo.txt", "hlo-optimized.txt"):
            module = hlo.parse(graph.text(file))
            by_line = {i.line: i for _, i in module.instructions()}
            rows = graph.table("links.json")[file]["instructions"]
            assert {row["line"] for row in rows} == set(by_line)
            for row in rows:
                where = f"{graph.name}/{file}:{row['line']}"
                assert row["how"] != "unknown", where
                assert row["how"] in ("input", "result") or row["ops"] or row.get("inputs"), where
                assert set(row.get("inputs", ())) <= inputs, where
                if row["how"] == "metadata":
                    name = by_line[row["line"]].op_name
                    assert all(f"{ops[op]['op']}%{op}" in name for op in row["ops"]), where
            assert sum(row["how"] in ("metadata", "call") for row in rows) > len(rows) / 3


def test_lines_of_the_texts_lead_to_ops_with_their_place_in_the_program(dumped):
    graph = dumped.graphs[1]
    ops = graph.table("graph.json")["ops"]
    convolution = next(i for i, op in enumerate(ops) if op["op"] == "aten.convolution")
    op = ops[convolution]
    assert (Path(op["file"]).name, op["line"], op["module"]) == ("net.py", FORWARD_LINE, "Net.conv")
    assert not op["backward"]
    assert any(op["backward"] and op["module"] == "Net.conv" for op in ops)
    links = graph.table("links.json")
    lines = graph.text("ir.txt").splitlines()
    for i, found in enumerate(links["ir.txt"]):
        assert all(f" = {ops[op]['op']}(" in lines[i] for op in found)
    stablehlo = graph.text("stablehlo.mlir").splitlines()
    assert len(links["stablehlo.mlir"]) == len(stablehlo)
    bare = [
        line
        for line, found in zip(stablehlo, links["stablehlo.mlir"], strict=True)
        if not found and " = stablehlo." in line
    ]
    # the arrays of scalar inputs belong to no single op, and regions begin with lines without a name
    assert len(bare) < len(stablehlo) / 20, bare
    assert dumped.sources()[op["file"]].splitlines()[op["line"] - 1].strip().startswith("return self.head")


def test_a_copy_costs_no_flops(device: torch.device) -> None:
    x = torch.ones(2, 3, device=device)
    x.clone()
    assert trace.cursor.op.name == "aten.clone" and flops_of(trace.cursor) == 0


def test_costs_are_counted_by_op_and_by_module(dumped):
    graph = dumped.graphs[1]
    ops = graph.table("graph.json")["ops"]
    flops = {op["op"]: op["flops"] for op in ops if not op["backward"]}
    assert flops["aten.linear"] == 2 * 6 * 144 * 5
    assert flops["aten.convolution"] == 2 * (6 * 4 * 6 * 6) * 9
    assert flops["aten.relu"] == 6 * 4 * 36
    backward = {op["op"]: op["flops"] for op in ops if op["backward"]}
    assert backward["aten.linear_backward"] == 2 * flops["aten.linear"]
    assert backward["aten.convolution_backward"] == flops["aten.convolution"]  # of the weight; x needs no gradient
    table = graph.table("cost.json")
    assert table["flops"] == sum(op["flops"] for op in ops) == sum(row["flops"] for row in table["by_op"])
    assert table["flops"] == sum(row["flops"] for row in table["by_module"])
    assert 0.8 < table["flops"] / table["xla"]["flops"] < 8  # XLA counts one of the nine iterations of a convolution
    relu = next(op for op in ops if op["op"] == "aten.relu")
    assert relu["bytes"] == 2 * 4 * (6 * 4 * 36)


def test_memory(dumped):
    table = dumped.graphs[1].table("memory.json")
    weights = 4 * (4 * 9 + 4 + 5 * 144 + 5)
    assert table["donated_bytes"] == 2 * weights  # parameters and their momenta
    assert len(table["donated"]) == 8
    assert table["arguments_bytes"] >= table["donated_bytes"] + 4 * 6 * 64
    assert table["temporaries_bytes"] > 0


def test_differences_from_the_nearest_graph(dumped):
    first, second, third = dumped.graphs
    assert [g.manifest["nearest"] for g in dumped.graphs] == [None, first.name, second.name]
    assert "-" in second.text("diff.txt") and "_foreach_mul" in second.text("diff.txt")
    lines = third.text("diff.txt").splitlines()
    assert lines[:2] == [f"--- {second.name}", f"+++ {third.name}"]
    at = next(i for i, line in enumerate(lines) if "aten.convolution(" in line)
    assert lines[at].startswith("-  %0: f32[6,4,6,6]") and lines[at + 1].startswith("+  %0: f32[3,4,6,6]")
    assert third.manifest["cause"]["kind"] == "input"
    assert "f32[6,1,8,8]" in third.text("cause.txt")


def test_writing_a_dump_is_no_part_of_a_step(tmp_path, monkeypatch, device):
    def slowly(*_):
        time.sleep(0.5)
        raise OSError

    step.forget()
    monkeypatch.setattr(lazytpu.config, "dump", str(tmp_path / "graphs"))
    monkeypatch.setattr(draw, "svg_of", slowly)
    lazytpu.metrics.reset()  # begins a step: tests before this one may have left theirs open
    x = torch.arange(6.0, device=device) * 3
    before, start = lazytpu.metrics.timers().get("dump", (0, 0.0))[1], time.perf_counter()
    lazytpu.mark_step()
    whole, dumping = time.perf_counter() - start, lazytpu.metrics.timers()["dump"][1] - before
    last = lazytpu.metrics.steps()[-1]
    assert x.tolist()[1] == 3 and dumping > 0.5
    parts = ("python", "recording", "cutting", "lowering", "compiling", "dispatching", "waiting", "transferring")
    assert last["cutting_s"] <= whole - dumping
    assert last["total_s"] == pytest.approx(sum(last[f"{part}_s"] for part in parts))


def test_steps_and_cuts_are_kept_under_times(dumped):
    assert [s["compiles"] for s in dumped.steps] == [1, 1, 0, 1]
    assert set(dumped.compiles) == {g.name for g in dumped.graphs}
    assert all(row["compile_s"] > 0 for row in dumped.compiles.values())
    assert [row["runs"] for row in dumped.summary["graphs"]] == [1, 2, 1]


def test_a_file_that_cannot_be_made_ends_no_run(tmp_path, monkeypatch, device, caplog):
    def fail(*_):
        raise OSError("no space")

    step.forget()
    monkeypatch.setattr(lazytpu.config, "dump", str(tmp_path / "graphs"))
    monkeypatch.setattr(draw, "svg_of", fail)
    x = torch.arange(7.0, device=device)
    assert (x * 3).sum().item() == 63
    (graph,) = open_dump(tmp_path / "graphs").graphs
    assert graph.manifest["missing"]["ir.svg"] == "OSError: no space"
    assert "ir.svg" not in graph.manifest["files"]
    assert "ir.svg of graph-" in caplog.text


def test_a_disk_that_is_full_ends_no_run_and_leaves_a_dump(tmp_path, monkeypatch, device, caplog):
    step.forget()
    monkeypatch.setattr(lazytpu.config, "dump", str(tmp_path / "graphs"))
    assert (torch.arange(7.0, device=device) * 3).sum().item() == 63
    real = Path.write_bytes

    def fail(path, data):
        if "graph-" in str(path):
            real(path, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", fail)
    assert (torch.arange(8.0, device=device) * 3).sum().item() == 84
    assert "was not dumped: [Errno 28] No space left on device" in caplog.text
    (graph,) = open_dump(tmp_path / "graphs").graphs
    assert graph.text("ir.txt") and not list(tmp_path.rglob(".*"))


def test_steps_that_cannot_be_written_are_told_of_once(tmp_path, monkeypatch, device, caplog):
    monkeypatch.setattr(lazytpu.config, "metrics_file", str(tmp_path / "steps.jsonl"))
    lazytpu.mark_step()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step_statistics.os, "write", fail)
    monkeypatch.setattr(step_statistics, "_WRITE_EVERY_S", 0.0)
    for _ in range(3):
        assert (torch.ones(2, device=device) + 1).tolist() == [2, 2]
        lazytpu.mark_step()
    assert caplog.text.count("No space left on device") == 1


@pytest.mark.parametrize("file", ["manifest.json", "times/summary.json", "graph-001-*/manifest.json", "graph-001-*/*"])
def test_a_dump_that_was_changed_is_refused(dumped, tmp_path, file):
    shutil.copytree(dumped.folder, tmp_path / "dump")
    for path in sorted((tmp_path / "dump").glob(file)):
        whole = path.read_bytes()
        for changed in (whole[: len(whole) // 2], whole[:-3] + b"7" + whole[-2:], whole.replace(b"1", b"2", 1)):
            path.write_bytes(changed)
            with pytest.raises(NotADump, match="changed since it was written, or was cut off|is not JSON|no seal"):
                opened = open_dump(tmp_path / "dump")
                _ = opened.summary, [graph.text(name) for graph in opened.graphs for name in graph.manifest["files"]]
        path.write_bytes(whole)


def test_damaged_lines_are_left_out(tmp_path):
    step_line = '{"number": 1}\n{"graph": 3, "at_s": "x", "lower_s": 1, "compile_s": 2}\n[1]\n\xff\n'
    (tmp_path / "times").mkdir()
    for name in ("steps", "compiles"):
        (tmp_path / "times" / f"{name}.jsonl").write_text(step_line)
    assert Dump(tmp_path).steps == [] and Dump(tmp_path).compiles == {}


def test_bodies_of_conditions_and_loops(tmp_path, monkeypatch, device):
    """Lines of a body belong to the op that applies it, and so do its instructions."""
    step.forget()
    monkeypatch.setattr(lazytpu.config, "dump", str(tmp_path / "graphs"))
    x = torch.arange(5.0, device=device)
    torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)).sum().item()
    (graph,) = open_dump(tmp_path / "graphs").graphs
    assert set(graph.manifest["missing"]) <= {"diff.txt", "ir.svg"}
    table, linked = graph.table("graph.json"), graph.table("links.json")
    (at,) = [i for i, op in enumerate(table["ops"]) if op["op"] == "cond"]
    lines = list(zip(graph.text("ir.txt").splitlines(), linked["ir.txt"], strict=False))
    assert [ops for line, ops in lines if "aten.sin" in line or "aten.cos" in line] == [[at], [at]]
    rows = linked["hlo-optimized.txt"]["instructions"]
    assert all(at in row["ops"] for row in rows if row["opcode"] in ("sine", "cosine"))


def test_a_drawing_needs_graphviz_and_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(draw.NoDrawing, match="`dot` was not found"):
        draw.svg_of("digraph {}", 1)
    with pytest.raises(draw.NoDrawing):
        monkeypatch.undo()
        draw.svg_of("digraph {}", draw.MAX_NODES + 1)


LOOP = """HloModule jit_f, is_scheduled=true

%body (p: (s64[], f32[4,8])) -> (s64[], f32[4,8]) {
  %p = (s64[], f32[4,8]{1,0}) parameter(0)
  %i = s64[] get-tuple-element(%p), index=0
  %x = f32[4,8]{1,0} get-tuple-element((s64[], f32[4,8]{1,0}) %p), index=1
  %w = f32[8,8]{1,0:T(8,128)} constant({...})
  %dot.1 = f32[4,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/Net/aten.mm%3/dot \\"a\\"" stack_frame_id=2}
  ROOT %t = (s64[], f32[4,8]{1,0}) tuple(%i, /*index=1*/%dot.1)
}

%cond (p.1: (s64[], f32[4,8])) -> pred[] {
  %p.1 = (s64[], f32[4,8]{1,0}) parameter(0)
  %i.1 = s64[] get-tuple-element(%p.1), index=0
  %n = s64[] constant(5)
  ROOT %lt = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (a: f32[4,8], s: s64[]) -> (s64[], f32[4,8]) {
  %a = f32[4,8]{1,0} parameter(0)
  %s = s64[] parameter(1)
  %start = (s64[], f32[4,8]{1,0}) tuple(%s, %a)
  ROOT %while.1 = (s64[], f32[4,8]{1,0}) while(%start), condition=%cond, body=%body
}
"""  # noqa: E501


def test_hlo_is_parsed():
    module = hlo.parse(LOOP)
    assert list(module.computations) == ["body", "cond", "main"]
    assert [c.name for c in module.computations.values() if c.entry] == ["main"]
    found = {i.name: i for _, i in module.instructions()}
    assert found["dot.1"].operands == ["x", "w"]
    assert found["x"].operands == ["p"]
    assert found["t"].operands == ["i", "dot.1"]
    assert found["t"].root and not found["dot.1"].root
    assert found["while.1"].called == ["cond", "body"]
    assert found["dot.1"].op_name.startswith("jit(f)/Net/aten.mm%3")
    assert LOOP.splitlines()[found["dot.1"].line - 1].lstrip().startswith("%dot.1")


def test_the_body_of_a_loop_counts_in_each_iteration(device):
    x, weight = torch.ones(3, 4, device=device), torch.ones(4, 4, device=device)
    scanned = scan(lambda c, row: (c @ weight, row.sin()), x[:1], x)
    (node,) = [n for n in reading.pending_graph(scanned).nodes if n.op.name == "scan"]
    assert cost.flops_of(node) == 3 * (2 * 4 * 4 + 4)


def test_attention_counts_its_products(device):
    q = torch.ones(1, 2, 3, 4, device=device)
    out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert max(map(cost.flops_of, reading.pending_graph((out,)).nodes)) == 2 * (2 * 2 * 3 * 3 * 4)


def test_one_op_more_is_one_line_of_difference():
    old = text_of("a", "graph(%p0: f32[2]) {\n  %0: f32[2] = aten.relu(%p0)\n  %1: f32[2] = aten.exp(%0)\n}")
    new = text_of(
        "b",
        "graph(%p0: f32[2]) {\n  %0: f32[2] = aten.neg(%p0)\n  %1: f32[2] = aten.relu(%0)\n"
        "  %2: f32[2] = aten.exp(%1)\n}",
    )
    changed = [line for line in unified(old, new).splitlines() if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert changed == ["+  %0: f32[2] = aten.neg(%p0)"]
    assert unified(old, old) == ""
    assert nearest(new, [old]) is old
    assert nearest(text_of("c", "graph() {\n  %0: f32[2] = aten.sin(%p0)\n}"), [old]) is None


def test_passes_are_read_from_the_dump_of_xla(tmp_path):
    one, two = "HloModule m\n\nENTRY e {\n  a = f32[] constant(1)\n", "  ROOT b = f32[] negate(a)\n}\n"
    name = "module_0003.jit_f.{}.txt"
    (tmp_path / name.format("0000.simplify.after_pipeline-start.before_algsimp")).write_text(one + two)
    (tmp_path / name.format("0001.simplify.after_algsimp.before_dce")).write_text(one + "}\n")
    (tmp_path / "module_0004.jit_g.0000.x.after_y.before_z.txt").write_text(one)
    (tmp_path / "module_0003.jit_f.kernel.ir-no-opt.ll").write_text("")
    found = passes.passes_of(tmp_path, "jit_f")
    assert [(p.name, p.before, p.after) for p in found] == [("pipeline-start", 2, 2), ("algsimp", 2, 1)]


def test_a_folder_that_is_no_dump_says_how_to_make_one(tmp_path):
    with pytest.raises(NotADump, match="run --dump"):
        open_dump(tmp_path)
    with pytest.raises(NotADump, match="does not exist"):
        open_dump(tmp_path / "none")
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(NotADump, match="no JSON object"):
        open_dump(tmp_path)


def test_what_many_ops_share_is_said_to_be_of_the_first_of_them(device):
    y = torch.ones(2, device=device)
    for _ in range(3 * links.MAX_OPS):
        y = y.neg()
    names = links.Names(reading.pending_graph((y,)))
    lines = [
        f'  x.{i} = f32[] add(c, c), metadata={{op_name="jit(f)/aten.neg%{i}/neg"}}' for i in range(2 * links.MAX_OPS)
    ]
    module = hlo.parse("\n".join(["ENTRY main {", "  c = f32[] constant(0)", *lines, "}"]))
    found = links.origins(module, names)
    assert (found[2].how, found[2].ops) == ("user", list(range(links.MAX_OPS)))
    assert found[3 + 20].ops == [20]


def test_dumping_changes_no_other_setting(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazytpu.config, "dump", str(tmp_path / "graphs"))
    torch.arange(11.0, device=device).tan().tolist()
    lazytpu.mark_step()
    steps = tmp_path / "graphs" / "times" / "steps.jsonl"
    assert steps.read_text().count("\n") == 1
    assert step_statistics.measuring()
    assert lazytpu.config.metrics_file == ""
    monkeypatch.setattr(lazytpu.config, "metrics_file", str(tmp_path / "steps.jsonl"))  # another file of the same
    lazytpu.mark_step()
    monkeypatch.setattr(lazytpu.config, "metrics_file", "")
    monkeypatch.setattr(lazytpu.config, "dump", "")
    assert steps.read_text().splitlines()[-1:] == (tmp_path / "steps.jsonl").read_text().splitlines()
    assert not step_statistics.measuring()
