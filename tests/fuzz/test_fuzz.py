"""A fixed slice of the fuzzer's programs, and the fuzzer itself: it sees planted faults and makes them small."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import pytest
import torch

import lazytpu
from tests.fuzz import campaign, worker
from tests.fuzz.checking import check
from tests.fuzz.drawing import draw, is_defined
from tests.fuzz.ops import check_op, entries
from tests.fuzz.program import MODES, Program, script
from tests.fuzz.reducing import reduced

aten = torch.ops.aten
RULES = lazytpu.lowering.lowers.__globals__["_RULES"]

# Seeds of the slice whose programs are known to differ, and why.  A seed that does not differ any more has to go.
KNOWN: dict[int, str] = {}
SLICE = {"trace": range(20), "compile": range(500, 504), "jit": range(600, 604), "dynamo": range(700, 702)}


def _forget() -> None:
    """Drops all that was compiled, so that a planted fault is in all programs, and later in none."""
    tree, executables = lazytpu.config.max_tree_nodes, lazytpu.config.max_executables
    lazytpu.config.max_tree_nodes = lazytpu.config.max_executables = 1
    for n in (3, 5):
        (torch.ones(n).to(lazytpu.device()) + n).cpu()
    lazytpu.config.max_tree_nodes, lazytpu.config.max_executables = tree, executables


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Gives an op a wrong rule."""
    _forget()
    yield lambda op, rule: monkeypatch.setitem(RULES, op, rule)
    monkeypatch.undo()
    _forget()


@pytest.mark.parametrize("mode", MODES)
def test_a_slice_of_programs_agrees_with_the_cpu(mode: str) -> None:
    seen: list[str] = []
    seeds = SLICE[mode]
    ended, failed = campaign.programs(worker.LocalWorker(), seeds, mode, False, seen.append)
    assert ended == len(seeds)
    assert set(failed) == set(KNOWN) & set(seeds), "\n".join(seen)


def test_a_slice_of_operators_agrees_with_the_cpu() -> None:
    names = ("add", "sum", "flip", "maximum", "argmax")
    assert not [text for n, name in enumerate(names) for text in check_op(name, n)]
    assert len(entries()) > 400


def test_a_program_is_decided_by_its_seed_and_runs_as_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert draw(3) == draw(3) != draw(4)
    for seed, mode in ((3, "trace"), (5, "compile")):
        exec(compile(script(draw(seed, mode)), "script", "exec"), {})
    assert "tensor(" in capsys.readouterr().out


def _wrong_flip(out: Any, x: Any, dims: Any) -> Any:
    return jnp.flip(x, dims) if x.size < 5 else x


def test_a_planted_fault_is_found_among_drawn_programs_and_made_small(planted: Any) -> None:
    planted(aten.flip.default, _wrong_flip)
    told: list[str] = []
    seeds = [s for s in range(40) if any(".flip(" in line for line in draw(s, "trace").body)][:6]
    _, failed = campaign.programs(worker.LocalWorker(), seeds[:6], "trace", False, told.append)
    assert failed
    program = draw(failed[0], "trace")
    _, found = campaign.smaller(worker.LocalWorker(), program, 1e4, check(program))
    assert found


def test_a_failing_program_is_made_a_few_lines_and_stays_defined(planted: Any) -> None:
    planted(aten.flip.default, _wrong_flip)
    program = Program(
        0,
        "trace",
        (
            "a0 = (torch.arange(77) * 3 % 11 - 4).view(7, 11).to(torch.float64).to(device)",
            "a1 = torch.ones(3).to(device)",
        ),
        (
            "t0 = a0.transpose(0, 1)[2:]",
            "a1.add_(1)",
            "t1 = t0 * 2 - 1",
            "lazytpu.mark_step()",
            "t1[1:] = t1[:-1].clone()",
            "t2 = (t1 + t1).flip(0).contiguous()",
            "see(a1)",
            "t3 = t2.sum()",
        ),
    )
    asked = 0

    def fails(candidate: Program) -> bool:
        nonlocal asked
        asked += 1
        try:
            return is_defined(candidate) and bool(check(candidate))
        except (NameError, AttributeError):
            return False

    small = reduced(program, fails, tries=150)
    assert asked <= 151
    assert len(small) <= 2, script(small)
    assert ".flip(" in script(small)
    assert len(script(small).splitlines()) <= 9


def test_memory_that_is_not_shared_is_seen() -> None:
    body = ("t0 = a0.view(2, 3) if device.type == 'cpu' else a0.view(2, 3).clone()",)
    program = Program(0, "trace", ("a0 = torch.arange(6.).to(device)",), body)
    assert [text.partition("\n")[0] for text in check(program)] == ["storages at the end: storages"]


def test_an_error_on_one_side_only_is_seen() -> None:
    body = ("t0 = a0.view(2, 3) if device.type == 'cpu' else a0.view(4, 2)",)
    program = Program(0, "trace", ("a0 = torch.arange(6.).to(device)",), body)
    assert any("error" in text and "invalid for input of size 6" in text for text in check(program))


@pytest.mark.parametrize(
    "body",
    [
        ("t0 = a0.expand(3, 6)", "t0.add_(1)"),
        ("a0[1:] += a0[:-1]",),
        ("t0 = a0.as_strided((3, 3), (1, 1), 0)", "t0.copy_(torch.ones(3, 3))"),
        ("t0 = a0 * 1e30", "t1 = t0 * t0"),
        ("t0 = torch.zeros(6)", "t1 = t0 / t0"),
    ],
)
def test_what_torch_does_not_define_is_left_out(body: tuple[str, ...]) -> None:
    assert not is_defined(Program(0, "trace", ("a0 = torch.arange(6.)",), body))
