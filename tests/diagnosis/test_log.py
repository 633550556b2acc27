"""The log says what `lazytpu.explain` says, in the topics that are on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import lazytpu
from lazytpu.diagnosis import events
from lazytpu.dispatch import cpu_fallback
from lazytpu.runtime import client
from lazytpu.tracing import step
from tests.support.explanations import Explanations
from tests.support.logged import Logged
from tests.support.processes import run_script

explained = Explanations(__file__)


def logged(device: torch.device, caplog: Logged, topics: str) -> list[str]:
    lazytpu.config.log = topics
    try:
        for n in (2, 3):
            x = torch.ones(n).to(device)  # [log_moved]
            x.sinh().pow(n + 0.5).sum().item()  # [logged]
        lazytpu.mark_step()
    finally:
        lazytpu.config.log = "warning"
    return [explained.marked(record.getMessage()) for record in caplog.records if record.name.startswith("lazytpu")]


COMPILED = [
    "compiled graph 1: 3 ops in # s: the first graph ([logged])",
    "compiled graph 2: 3 ops in # s: diverges from graph 1 at op 1 (aten.sinh), argument 'self': input %p0 was f32[2] "
    "and is f32[3]: dimension 0 changed; `x`, moved to the device at [log_moved]; 2 types seen here: "
    "f32[2], f32[3] ([logged])",
]


def test_log_of_compiles(device: torch.device, caplog: Logged) -> None:
    dynamic = "argument 'exponent' of aten.pow.Tensor_Scalar changed and is a scalar input from now on, at [logged]"
    for topics in ("compile", "info", "error, compile"):
        step.forget()
        lazytpu.metrics.reset()
        events._total = 0
        caplog.clear()
        written = logged(device, caplog, topics)
        assert [m for m in written if m != dynamic] == COMPILED, topics


def test_log_of_cuts(device: torch.device, caplog: Logged) -> None:
    assert logged(device, caplog, "cut") == ["cut by item at [logged]", "item at [logged] waited # ms"] * 2


def test_log_of_steps(device: torch.device, caplog: Logged) -> None:
    assert logged(device, caplog, "step") == ["step 1: # ms, 6 ops, 2 run, 2 compiled, waited # ms"]


@pytest.mark.filterwarnings("ignore:.*runs on the CPU")
def test_log_of_placement(device: torch.device, caplog: Logged, monkeypatch) -> None:
    monkeypatch.setattr(lazytpu.config, "log", "placement")
    fallback = cpu_fallback.fallback(torch.ops.aten.cos.default)
    for _ in range(2):
        x = torch.ones(2).to(device)
        y = x.sinh() @ x  # [placed]
        lazytpu.mark_step()
        fallback(y)  # [placed_host]
        y.nonzero()  # [placed_nonzero]
        x[x > 0]  # [placed_mask]
    messages = [explained.marked(record.getMessage()) for record in caplog.records]
    where = f"tpu:0 ({client.device()})"
    assert messages == [
        f"placed aten.sinh f32[2]: {where}  # [placed]",
        f"placed aten.dot f32[]: {where}  # [placed]",
        "placed aten.cos: cpu  # [placed_host]",
        "placed aten.nonzero: cpu  # [placed_nonzero]",
        "placed aten.index.Tensor: cpu  # [placed_mask]",
        f"placed aten.gt.Scalar bool[2]: {where}  # [placed_mask]",
    ]


@pytest.mark.usefixtures("fresh_dynamo")
def test_log_of_placement_of_compiled_functions(device: torch.device, caplog, monkeypatch) -> None:
    """Each op is logged once, when the function is recorded or captured, and not when it is replayed."""
    monkeypatch.setattr(lazytpu.config, "log", "placement")
    where = f"tpu:0 ({client.device()})"

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x.tanh(),))  # [placed_whole]

    x = torch.ones(2).to(device)
    ops = ["aten.sum f32[]", "aten.gt.Scalar bool[]", "aten.tanh f32[2]", "cond f32[2]", "aten.sin f32[2]"]
    ops.append("aten.cos f32[2]")
    for compiled in (lazytpu.compile(f), lazytpu.jit(f)):
        caplog.clear()
        for _ in range(4):
            compiled(x)
        written = [record for record in caplog.records if record.name == "lazytpu.placement"]
        messages = sorted(explained.marked(record.getMessage()) for record in written)
        assert messages == sorted(f"placed {op}: {where}  # [placed_whole]" for op in ops)
    assert lazytpu.metrics.counter("replay") > 0


def test_log_of_a_warning_level_is_silent(device: torch.device, caplog: Logged) -> None:
    assert logged(device, caplog, "warning") == []


def test_log_goes_to_standard_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch, lazytpu\nprint((torch.ones(2, device='tpu') + 1).sum().item())\n")
    done = run_script(script, LAZYTPU_LOG="info,cut")
    assert done.stdout == "4.0\n", done.stderr
    assert re.sub(r"\d+\.\d+", "#", done.stderr).splitlines() == [
        "lazytpu: compiled graph 1: 3 ops in # s: the first graph (script.py:2)",
        "lazytpu: cut by item at script.py:2",
        "lazytpu: item at script.py:2 waited # ms",
    ]


def test_a_wrong_topic_is_refused() -> None:
    with pytest.raises(ValueError, match="lazytpu.config.log must be one of 'debug', .*, not 'info,everything'"):
        lazytpu.config.log = "info,everything"
