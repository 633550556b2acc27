"""The command line: running scripts as Python does, tables, information."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lazytpu
from lazytpu.cli import info, run
from lazytpu.cli.app import app
from lazytpu.observe import metrics_tables
from tests.support.dumped_program import the_dump
from tests.support.processes import run_lazytpu, run_python


def invoke(*arguments: object, code: int = 0) -> str:
    """What a command prints."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def lazytpu_run(folder: Path, text: str, *arguments: object, options: tuple[object, ...] = (), **variables: str):
    """Runs a script in a process of its own, as ``python -m lazytpu run OPTIONS script.py ARGUMENTS``."""
    (folder / "script.py").write_text(text)
    return run_lazytpu("run", *options, "script.py", *arguments, cwd=folder, **variables)


def test_help_names_every_command_and_option():
    text = invoke("--help")
    for command in ("run", "demo", "inspect", "report", "info"):
        assert command in text
    text = invoke("run", "--help")
    for option in ("--dump", "--explain", "--profile", "--metrics", "--passes", "--compat", "--default-device"):
        assert option in text
    assert "typer" not in text.lower()


def test_a_script_runs_as_with_python(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside.py").write_text("HERE = 7\n")
    script = tmp_path / "scripts" / "main.py"
    script.write_text(
        "import sys, json, pickle, beside, __main__\n"
        "class Thing: pass\n"
        "pickle.loads(pickle.dumps(Thing()))\n"
        "names = [__name__, __file__, sys.path[0], beside.HERE, __main__.Thing is Thing, __spec__]\n"
        "print(json.dumps([sys.argv, *names]))\n"
    )
    arguments = ["scripts/main.py", "--dump", "x", "--", "-h"]
    ours = run_python("-m", "lazytpu", "run", *arguments, cwd=tmp_path)
    theirs = run_python(*arguments, cwd=tmp_path)
    assert ours.returncode == theirs.returncode == 0, ours.stderr
    assert json.loads(ours.stdout) == json.loads(theirs.stdout)
    assert ours.stderr == theirs.stderr == ""


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("def f():\n    return 1 / 0\nf()\n", id="raises"),
        pytest.param("x = = 1\n", id="syntax"),
        pytest.param("raise SystemExit('bye')", id="exits"),
        pytest.param("raise KeyboardInterrupt", id="interrupted"),
    ],
)
def test_tracebacks_and_exit_codes_are_pythons(tmp_path, text):
    (tmp_path / "script.py").write_text(text)
    ours = run_python("-m", "lazytpu", "run", "script.py", cwd=tmp_path)
    theirs = run_python("script.py", cwd=tmp_path)
    assert ours.returncode == theirs.returncode != 0
    assert ours.stderr == theirs.stderr
    if "Keyboard" in text:
        assert ours.returncode == -signal.SIGINT


def test_a_script_that_is_not_there(capsys):
    assert run.Script("none.py", []).execute() == 2
    assert "can't open file 'none.py'" in capsys.readouterr().err


PENDING = """
import sys, torch, lazytpu
x = torch.ones(3, device=lazytpu.device())
y = x * 2 + 1
if len(sys.argv) > 1:
    sys.exit()
"""


def test_the_pending_graph_runs_at_the_end(tmp_path):
    options = ("--explain", "--dump", "graphs", "--metrics", "steps.jsonl")
    done = lazytpu_run(tmp_path, PENDING, "exit", options=options)
    assert done.returncode == 0, done.stderr
    assert "compiled 1 graph" in done.stderr and "script.py:" in done.stderr
    manifest = json.loads((tmp_path / "graphs" / "manifest.json").read_text())
    assert len(manifest["graphs"]) == 1
    steps = (tmp_path / "steps.jsonl").read_text()
    assert [json.loads(line)["compiles"] for line in steps.splitlines()] == [1]
    assert (tmp_path / "graphs" / "times" / "steps.jsonl").read_text() == steps
    table = invoke("inspect", tmp_path / "steps.jsonl")
    assert "step 1" in table and "Python and torch" in table and "graphs run" in table


def test_a_script_that_names_no_device_can_run_on_ours(tmp_path):
    text = """
import torch
x = torch.ones(2)
print(x.device, torch.nn.Linear(2, 1)(x).device, torch.nn.Embedding(2, 1)(torch.LongTensor([0, 1])).device)
"""
    assert lazytpu_run(tmp_path, text).stdout == "cpu cpu cpu\n"
    assert lazytpu_run(tmp_path, text, options=("--default-device",)).stdout == "tpu:0 tpu:0 tpu:0\n"


def test_modules_and_passes(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "main.py").write_text(f"{PENDING}\nprint(sys.argv[1:], __name__, __package__)\n")
    options = ("--dump", "graphs", "--passes", "-m", "package.main")
    done = run_lazytpu("run", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[] __main__ package"
    text = invoke("inspect", tmp_path / "graphs", "--passes")
    assert "fusion" in text and "pipeline" in text


def test_inspect_lists_graphs():
    text = invoke("inspect", the_dump())
    assert "3 graphs on cpu" in text
    assert "f32[6,1,8,8] and is f32[3,1,8,8]" in text.replace("\n", " ").replace("  ", " ") or "f32[3,1,8,8]" in text
    assert "net.py:12" in text


def test_inspect_shows_a_graph():
    text = invoke("inspect", the_dump(), "--graph", "3", "--top", "4")
    for expected in ("graph-003-", "aten.convolution", "Net.conv", "donated", "most expensive ops", "more)"):
        assert expected in text
    folder = next(the_dump().glob("graph-003-*"))
    assert invoke("inspect", folder, "--top", "4") == text


def test_inspect_compares_two():
    text = invoke("inspect", the_dump(), "--diff", "2", "3")
    assert "graph 2" in text and "graph 3" in text and "difference" in text
    assert "+  %0: f32[3,4,6,6] = aten.convolution" in text
    assert "the ops are the same" in invoke("inspect", the_dump(), "--diff", "2", "2")


def test_inspect_prints_a_file():
    file = next(the_dump().glob("graph-001-*")) / "ir.txt"
    assert invoke("inspect", file) == file.read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("none",), "does not exist"),
        (("--graph", "9"), "has no graph 9; it has 1, 2, 3"),
        (("--passes",), "run --dump"),
    ],
)
def test_inspect_says_what_is_wrong(arguments, text, tmp_path):
    place = tmp_path / arguments[0] if len(arguments) == 1 and arguments[0] == "none" else the_dump()
    rest = arguments if place == the_dump() else ()
    output = " ".join(word for word in invoke("inspect", place, *rest, code=2).replace("│", " ").split())
    assert text in output


def test_info_tells_versions_devices_and_environment(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_hlo_profile=false")
    monkeypatch.setenv("JAX_SOME_TOKEN", "secret")
    found = json.loads(invoke("info", "--json"))
    assert found["versions"]["lazytpu"] == lazytpu.__version__
    assert found["device"]["platform"] == lazytpu.platform()
    assert found["environment"]["XLA_FLAGS"] == "--xla_hlo_profile=false"
    assert found["environment"]["JAX_SOME_TOKEN"] == "(set)"
    text = invoke("info")
    assert "secret" not in text and found["versions"]["jax"] in text
    assert set(info.collect()) == set(found)


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1000, "1 K"), (1234567, "1.23 M"), (999_600, "1000 K"), (5e9, "5 G")]
)
def test_amounts(number, text):
    assert metrics_tables.amount(number) == text
    assert metrics_tables.size(number) == (f"{text}B" if " " in text else f"{text} B")


def test_an_unknown_shim_is_refused(tmp_path):
    assert "there is no shim for torch_abc" in invoke("run", "--compat", "torch_abc", tmp_path / "x.py", code=2)
