"""Lists of tensors in one op, as optimizers write them: equal to eager, and found again without a new node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazytpu
from lazytpu.ir.tree import trace
from tests.support.lockstep import numbers

Lists = dict[str, list[torch.Tensor]]


def lists(on: Any) -> Lists:
    def some(seed: int) -> list[torch.Tensor]:
        shapes = [(3, 4), (4,), (), (2, 3, 2)]
        return [
            (numbers(*shape, device=on) + seed) if shape else torch.tensor(seed + 0.5, device=on) for shape in shapes
        ]

    made = {"p": some(1), "g": some(2), "m": some(3), "v": some(4)}
    made["g"][0] = made["g"][0].t().contiguous().t()  # a gradient that lies otherwise in memory
    made["g"][3] = numbers(2, 6, device=on)[:, ::2][:, :2].reshape(2, 1, 2).expand(2, 3, 2)
    return made


PROGRAMS: dict[str, Callable[[Lists], Any]] = {
    "number": lambda s: torch._foreach_mul_(s["p"], 0.5),
    "integer": lambda s: torch._foreach_add_(s["p"], 2),
    "numbers": lambda s: torch._foreach_div_(s["p"], [0.5, 1.5, 2.5, 3.5]),
    "numbers_of_two_kinds": lambda s: torch._foreach_mul_(s["p"], [2, 1.5, True, 3]),
    "list": lambda s: torch._foreach_add_(s["p"], s["g"]),
    "list_alpha": lambda s: torch._foreach_add_(s["p"], s["g"], alpha=0.25),
    "lerp": lambda s: torch._foreach_lerp_(s["p"], s["g"], 0.1),
    "addcmul": lambda s: torch._foreach_addcmul_(s["p"], s["g"], s["g"], 0.1),
    "addcmul_default": lambda s: torch._foreach_addcmul_(s["p"], s["g"], s["m"]),
    "addcdiv_numbers": lambda s: torch._foreach_addcdiv_(s["p"], s["m"], s["v"], [0.1, 0.2, 0.3, 0.4]),
    "tensor": lambda s: torch._foreach_mul_(s["p"], s["g"][2]),
    "copy": lambda s: torch._foreach_copy_(s["p"], s["g"]),
    "itself": lambda s: torch._foreach_mul_(s["p"], s["p"]),
    "one_of_its_own": lambda s: torch._foreach_mul_(s["p"], [*s["g"][:3], s["p"][3]]),
    "the_next_one": lambda s: torch._foreach_mul_([s["p"][0], s["m"][0]], [s["m"][0], s["p"][0]]),
    "a_view_of_the_next": lambda s: torch._foreach_mul_([s["p"][1], s["m"][1]], [s["m"][1], s["p"][0][0]]),
    "views_are_written": lambda s: torch._foreach_mul_([s["p"][0][1], s["p"][1]], 3.0),
    "views_of_one": lambda s: torch._foreach_mul_([s["p"][0][1], s["p"][0][2]], 3.0),
    "twice_the_same": lambda s: torch._foreach_add_([s["p"][0], s["p"][0]], 1.0),
    "new": lambda s: s.update(p=list(torch._foreach_sqrt(s["v"]))),
    "new_numbers": lambda s: s.update(p=list(torch._foreach_mul(s["p"], [0.5, 1.5, 2.5, 3.5]))),
    "new_of_views": lambda s: s.update(p=list(torch._foreach_add(s["g"], s["m"], alpha=2))),
    "maximum": lambda s: torch._foreach_maximum_(s["p"], s["g"]),
    "zero": lambda s: torch._foreach_zero_(s["p"]),
    "adamw": lambda s: (
        torch._foreach_mul_(s["p"], 1 - 1e-3),
        torch._foreach_lerp_(s["m"], s["g"], 0.1),
        torch._foreach_mul_(s["v"], 0.99),
        torch._foreach_addcmul_(s["v"], s["g"], s["g"], 0.01),
        torch._foreach_addcdiv_(s["p"], s["m"], list(torch._foreach_sqrt(s["v"])), [-0.1, -0.2, -0.3, -0.4]),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name: str, device: torch.device) -> None:
    program, ours, theirs = PROGRAMS[name], lists(device), lists("cpu")
    nodes = []
    for _ in range(4):
        for state in (ours, theirs):
            before = [p._version for p in state["p"]]
            program(state)
            state["grown"] = [torch.tensor([p._version - b for p, b in zip(state["p"], before, strict=True)])]
        lazytpu.mark_step()
        nodes.append(trace.nodes)
        for key, want in theirs.items():
            for a, b in zip(ours[key], want, strict=True):
                torch.testing.assert_close(a.cpu(), b)
                assert a.stride() == b.stride()
    assert nodes[-1] == nodes[1]


def test_wrong_lists_change_nothing(device: torch.device) -> None:
    state = lists(device)
    for wrong in ([], state["g"][:2], [*state["g"][:3], torch.ones(7, device=device)]):
        with pytest.raises(RuntimeError) as ours:
            torch._foreach_add_(state["p"], wrong)
        with pytest.raises(RuntimeError) as theirs:
            torch._foreach_add_(lists("cpu")["p"], [w.cpu() for w in wrong])
        assert type(ours.value) is type(theirs.value)
    for a, b in zip(state["p"], lists("cpu")["p"], strict=True):
        assert torch.equal(a.cpu(), b)


NEW_LISTS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: torch._foreach_add(a, b, alpha=2),
    "mul by a number": lambda a, b: torch._foreach_mul(a, 2.0),
    "addcmul": lambda a, b: torch._foreach_addcmul(a, b, b, 0.5),
    "norm": lambda a, b: torch._foreach_norm(a),
    "norm of another order": lambda a, b: torch._foreach_norm(a, 1),
    "max": lambda a, b: torch._foreach_max(a),
    "pow": lambda a, b: torch._foreach_pow(b, [1.0, 2.0]),
    "the norm of all": lambda a, b: [torch.nn.utils.get_total_norm(a)],
}


@pytest.mark.parametrize("name", NEW_LISTS)
def test_new_lists_of_tensors_on_several_devices(device: torch.device, name: str) -> None:
    def run(where: Any) -> list[torch.Tensor]:
        a = [torch.arange(-3.0, 0).to(where), torch.ones(2) * 3]
        found: list[torch.Tensor] = list(NEW_LISTS[name](a, [t + 5 for t in a]))
        return found

    got, want = run(device), run("cpu")
    assert [t.device.type for t in got] == [device.type, "cpu"][: len(got)]
    assert [t.tolist() for t in got] == [t.tolist() for t in want]
