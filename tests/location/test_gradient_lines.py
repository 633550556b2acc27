"""The lines of the ops of backward passes, above all where gradients have gradients: the right one, or none."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import lazytpu
from lazytpu.diagnosis import events
from lazytpu.location import backward_sites
from lazytpu.tracing import step

HERE = Path(__file__)
LINES = HERE.read_text().splitlines()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No graph is known and nothing was noted."""
    monkeypatch.setattr(backward_sites, "_tables", type(backward_sites._tables)(maxlen=8))
    monkeypatch.setattr(backward_sites, "_graphs", type(backward_sites._graphs)(maxlen=32))
    monkeypatch.setattr(backward_sites, "_thread", backward_sites._Thread())
    step.forget()
    yield
    step.forget()


def lines(*tensors: torch.Tensor) -> list[tuple[str, str]]:
    """Op and mark of the line of each op of a graph, with ``+`` behind those of gradients."""
    found = []
    for text in lazytpu.ir_text(*tensors).splitlines():
        match = re.search(rf"= (aten\.[\w.]+)\(.*{HERE.name}:(\d+)(.*)", text)
        if match:
            mark = re.search(r"# (\w+)$", LINES[int(match[2]) - 1])
            found.append((match[1].removeprefix("aten."), (mark[1] if mark else "?") + "+" * ("backward" in match[3])))
    return found


def twice(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    a = w * x  # mul
    b = a.sin()  # sin
    y = b.exp().sum()  # exp
    (g,) = torch.autograd.grad(y, w, create_graph=True)  # grad
    return g.square().sum()  # square


def test_ops_of_a_backward_pass_have_the_line_of_their_forward_op(device: torch.device) -> None:
    def backward(more: bool) -> list[tuple[str, str]]:
        w = torch.randn(3).to(device).requires_grad_()
        a = w.sin()  # forward_sin
        y = a.exp().sum()  # forward_exp
        if more:
            w.register_hook(lambda grad: grad * 2)  # hook
        y.backward()  # backward
        assert w.grad is not None
        found = lines(w.grad)
        lazytpu.mark_step()
        return found

    expected = backward(more=False)
    assert [line for op, line in expected if op == "cos"] == ["forward_sin+"]
    assert "backward+" not in {line for _, line in expected}, "all are known"
    assert ("mul.Tensor", "hook") in backward(more=True)


def test_what_is_not_known_has_the_line_of_the_call(device: torch.device) -> None:
    w, x = torch.randn(5).to(device).requires_grad_(), torch.randn(5).to(device)
    for more in (False, True):
        w.grad = None
        loss = twice(w, x)
        if more:
            loss = loss + (w * 2).cos().sum()  # more
        loss.backward()  # backward
        assert w.grad is not None
        found = lines(w.grad)
        lazytpu.mark_step()
    known = {"mul", "sin", "exp", "grad", "square", "mul+", "sin+", "exp+", "square+", "more", "more+", "backward"}
    assert {line for _, line in found} <= known | {"backward+"}
    wrong = [(op, line) for op, line in found if op == "neg" and line not in ("sin+", "backward+", "more+")]
    assert wrong == [], "only what is a sine's or a cosine's gradient has a negation"
    assert ("sin", "exp+") not in found and ("cos", "exp+") not in found


def test_threads_that_count_alike_are_told_apart(device: torch.device) -> None:
    found: dict[str, list[tuple[str, str]]] = {}
    once = threading.Lock()

    def left() -> None:
        with once:
            w = torch.randn(6).to(device).requires_grad_()
            w.sinh().sum().backward()  # left
            assert w.grad is not None
            found["left"] = lines(w.grad)

    def right() -> None:
        with once:
            w = torch.randn(7).to(device).requires_grad_()
            w.tanh().sum().backward()  # right
            assert w.grad is not None
            found["right"] = lines(w.grad)

    for work in (left, right):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert {line for _, line in found["left"]} == {"left", "left+"}
    assert {line for _, line in found["right"]} == {"right", "right+"}


def test_no_node_of_autograd_is_kept(device: torch.device) -> None:
    w, x = torch.randn(8).to(device).requires_grad_(), torch.randn(8).to(device)
    held = torch.randn(8, requires_grad=True).to(device) * x
    watched = held.untyped_storage()
    before = torch._C._storage_Use_Count(watched._cdata)  # type: ignore[attr-defined]
    (twice(w, x) + (held * w).sum()).backward()
    assert torch._C._storage_Use_Count(watched._cdata) == before  # type: ignore[attr-defined]


def test_ops_of_other_threads_leave_the_main_thread_its_lines(device: torch.device) -> None:
    def other() -> None:
        a = torch.ones(3).to(device).requires_grad_()
        (a.sin() * a).sum().backward()

    for _ in range(3):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    lazytpu.mark_step()
    net, x = nn.Sequential(nn.Tanh(), nn.Linear(4, 3)).to(device), torch.ones(2, 4).to(device).requires_grad_()
    net(x).sum().backward()
    lazytpu.mark_step()
    modules = {n.op.name: n.site.module for n in events.compilations[-1].graph.nodes if n.site.backward}
    assert modules["aten.tanh_backward"] == "Sequential.0" and modules["aten.linear_backward"] == "Sequential.1"
