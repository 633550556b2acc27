"""Other code that runs in the middle of an op: finalizers, interrupts, threads, and ops that raise.

Python lets other code run where a call returns.  The tests below run it at each such place, one after the other.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch

import lazytpu
from lazytpu.ir.tree import trace
from lazytpu.tracing import record, step

PACKAGE = lazytpu.__file__.rpartition("/")[0]
EVERY_PLACE = "LAZYTPU_TEST_SAMPLES" in os.environ


def start(on: Any) -> dict[str, torch.Tensor]:
    """Tensors to work on, some of them written in this step."""
    x, y = torch.arange(6.0, device=on).reshape(2, 3).clone(), torch.full((2, 3), 2.0, device=on)
    out = torch.zeros(2, 3, device=on)
    if on != "cpu":
        lazytpu.mark_step()
    y += 1
    return {"x": x, "y": y, "out": out, "view": x.t(), "other": torch.ones(2, 3, device=on)}


Op = Callable[[dict[str, torch.Tensor]], Any]
OPS: dict[str, Op] = {
    "functional": lambda s: s.update(new=s["x"] * s["y"]),
    "functional_of_view": lambda s: s.update(new=s["view"] - 1),
    "in_place": lambda s: s["y"].mul_(3),
    "in_place_first_use": lambda s: s["x"].add_(s["y"]),
    "in_place_through_view": lambda s: s["view"].mul_(2),
    "copy": lambda s: s["x"].copy_(s["y"]),
    "copy_through_view": lambda s: s["view"][1].copy_(s["y"][:, 0]),
    "copy_from_cpu": lambda s: s["view"].copy_(torch.ones(3, 2)),
    "fill": lambda s: s["view"][:1].fill_(5),
    "out": lambda s: torch.add(s["x"], s["y"], out=s["out"]),
    "list": lambda s: torch._foreach_add_([s["x"], s["y"]], [s["other"], s["other"]]),
    "transpose_": lambda s: s["y"].t_(),
    "resize_": lambda s: s["y"].resize_(2, 2),
    "set_": lambda s: s["y"].set_(s["x"]),
    "data": lambda s: setattr(s["y"], "data", s["view"]),
    "index": lambda s: s["x"].index_put_((torch.tensor([1], device=s["x"].device),), s["y"][0]),
    "cut": lambda s: lazytpu.mark_step(),
    "read": lambda s: s.update(new=torch.tensor(s["view"].tolist())),
}


@contextmanager
def at_call(n: int, run: Callable[[], None]) -> Iterator[list[int]]:
    """Runs ``run`` where the n-th call inside the package returns; yields a list with the number of calls so far."""
    seen = [0]

    def hook(frame: Any, event: str, _: Any) -> None:
        if event not in ("c_return", "return", "call"):
            return
        if not frame.f_code.co_filename.startswith((PACKAGE, "<lazytpu")):
            return
        seen[0] += 1
        if seen[0] == n:
            sys.setprofile(None)
            run()

    sys.setprofile(hook)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def everything(state: dict[str, torch.Tensor]) -> list[Any]:
    return [(name, tuple(t.shape), t.tolist()) for name, t in sorted(state.items())]


def places(op: Op, device: torch.device) -> range:
    """Numbers for `at_call`: calls of an op on a known path, all of them where all samples are asked for."""
    for _ in range(2):
        state = start(device)
        op(state)
        everything(state)
    state = start(device)
    with at_call(0, lambda: None) as seen:
        op(state)
    last = seen[0] + 2
    return range(1, last, 1 if EVERY_PLACE else max(1, last // 30))


@pytest.mark.parametrize("name", OPS)
def test_a_finalizer_that_records_and_reads_in_the_middle_of_an_op(name: str, device: torch.device) -> None:
    op, allowed = OPS[name], []
    for first in (True, False):  # as if the finalizer had run before the op, or after it
        state = start("cpu")
        if first:
            state["other"] += 10
        if name != "cut":
            op(state)
        if not first:
            state["other"] += 10
        allowed.append(everything(state))
    for n in places(op, device):
        state = start(device)

        def finalizer(state: dict[str, torch.Tensor] = state) -> None:
            if gc.isenabled():  # else none would run here
                kept = state["other"] + 10
                state["other"] += 10
                assert (kept - state["other"]).sum().item() == 0

        with at_call(n, finalizer) as seen:
            op(state)
        if seen[0] < n:
            finalizer()
        found = everything(state)
        assert found in allowed or gc_was_off(found, state, op, device), f"at call {n}"


def gc_was_off(found: list[Any], state: dict[str, torch.Tensor], op: Op, device: torch.device) -> bool:
    """Whether the finalizer did not run at all: the place is one where none can."""
    untouched = start("cpu")
    if op is not OPS["cut"]:
        op(untouched)
    return found == everything(untouched)


@pytest.fixture
def terminated() -> Iterator[None]:
    """SIGTERM raises, as in programs that save a checkpoint before they end."""
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("name", OPS)
def test_a_signal_in_the_middle_of_an_op(name: str, device: torch.device, terminated: None) -> None:
    op = OPS[name]
    before, after = start("cpu"), start("cpu")
    if name != "cut":
        op(after)
    allowed = {key: {str(s[key].tolist()) for s in (before, after) if key in s} for key in after}
    interrupted = 0
    for n in places(op, device):
        state = start(device)
        try:
            with at_call(n, partial(signal.raise_signal, (signal.SIGINT, signal.SIGTERM)[n % 2])):
                op(state)
        except KeyboardInterrupt:
            interrupted += 1
        assert gc.isenabled() and not trace.closed, f"at call {n}"
        values = {key: t.tolist() for key, t in state.items()}
        wrong = {key: v for key, v in values.items() if str(v) not in allowed[key]}
        assert not wrong, f"at call {n}: {wrong}"
        for t in state.values():  # and all of them can be used
            if t.device == device:
                expected = t.cpu() + 1
                t.add_(1)
                assert torch.equal(t.cpu(), expected), f"at call {n}"
    assert interrupted > 0


def test_finalizers_of_the_garbage_collector(device: torch.device) -> None:
    """The real thing: objects in cycles, with a collector that runs at almost every allocation."""
    total = torch.zeros(3, device=device)
    reads: list[float] = []

    class Finalized:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            total.add_(1)
            reads.append(total[0].item())

    thresholds = gc.get_threshold()
    x, expected = torch.zeros(4, 4, device=device), torch.zeros(4, 4)
    try:
        for i in range(40):
            Finalized()
            gc.set_threshold(1 + i % 7)
            for t in (x, expected):
                t.t()[i % 4].add_(i)
                t.mul_(-1)
                t[1:, 2].copy_(t[0, 1:])
            gc.set_threshold(*thresholds)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert torch.equal(x.cpu(), expected)
    assert sorted(reads) == [float(n) for n in range(1, 41)] and total.tolist() == [40.0] * 3


@contextmanager
def threads_that_switch(every_s: float, works: Sequence[Callable[[], None]]) -> Iterator[None]:
    """Runs each of ``works`` in a thread beside the block, with Python switching between them after ``every_s``."""
    interval = sys.getswitchinterval()
    threads = [threading.Thread(target=work) for work in works]
    try:
        sys.setswitchinterval(every_s)
        for t in threads:
            t.start()
        yield
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)


def test_threads_that_record_while_others_cut(device: torch.device) -> None:
    """Each thread works on tensors of its own; all of them share the one trace."""
    rounds, failures = 10, []

    def work(k: int) -> None:
        try:
            x, expected = torch.zeros(4, 4, device=device), torch.zeros(4, 4)
            for i in range(rounds):
                for t in (x, expected):
                    t.add_(k)
                    t.t()[1].mul_(-1)
                    t[0].copy_(t[1] + i)
                    torch.add(t[2], t[3], out=t[0])
                    torch._foreach_add_([t, t[:1]], 1)
                if i % 4 == k:
                    lazytpu.mark_step()
                if i % 5 == 4 and not torch.equal(x.cpu(), expected):
                    failures.append((k, i))
        except Exception as error:
            failures.append((k, error))

    with threads_that_switch(1e-5, [partial(work, k) for k in range(3)]):
        pass
    assert not failures


def test_a_new_node_stays_where_it_was_looked_up(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another op is recorded while the node of one is made; each keeps its number."""
    step.forget()  # or another test may have recorded the op
    x, y = torch.ones(2).to(device), torch.ones(2).to(device)
    real, armed, others = record._operand, [True], []

    def operand(*args: Any) -> Any:
        if armed:
            armed.clear()
            others.append(y * 7)
        return real(*args)

    monkeypatch.setattr(record, "_operand", operand)
    assert (x * 3).tolist() == [3.0, 3.0]
    assert others[0].tolist() == [7.0, 7.0]
    assert ((y * 7).tolist(), (x * 3).tolist()) == ([7.0, 7.0], [3.0, 3.0])  # and found again


def test_no_update_is_lost_between_threads(device: torch.device) -> None:
    total = torch.zeros(2, 2, device=device)
    rows = total[1]

    def work() -> None:
        for i in range(25):
            total.add_(1)
            rows.add_(1)
            if i == 12:
                lazytpu.mark_step()

    with threads_that_switch(1e-6, [work] * 4):
        pass
    assert total.tolist() == [[100.0] * 2, [200.0] * 2]


def test_reading_while_another_thread_overwrites(device: torch.device) -> None:
    """The buffer that is being read is donated; what is read is the state before or after some update."""
    x = torch.zeros(64, 64, device=device)
    lazytpu.mark_step()
    done, seen, failures = threading.Event(), [], []

    def read() -> None:
        try:
            while not done.is_set():
                values = x.cpu()
                seen.append(values[0, 0].item())
                if not torch.equal(values, values[0, 0].expand(64, 64)):
                    failures.append(values)
        except Exception as error:
            failures.append(error)

    with threads_that_switch(1e-5, [read] * 2):
        try:
            for _ in range(200):
                x.add_(1)
                lazytpu.mark_step()
        finally:
            done.set()
    assert not failures and seen
    assert x[0, 0].item() == 200.0


def test_a_signal_handler_in_the_middle_of_a_cut_is_refused(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    lazytpu.mark_step()
    x.add_(1)
    refused = 0
    for n in count(1):
        y = x * 2

        def handler() -> None:
            (x + 1).sum().item()

        try:
            with at_call(n, handler) as seen:
                lazytpu.mark_step()
        except RuntimeError as error:
            assert "signal handler" in str(error)
            refused += 1
        assert y.tolist() == [4.0] * 3 and x.tolist() == [2.0] * 3 and not trace.closed
        if seen[0] < n:
            break
    assert refused > 0
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs in the background
        return
    with pytest.raises(KeyboardInterrupt):  # whatever was interrupted, Ctrl-C works
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


RAISING: dict[str, Op] = {
    "shape": lambda s: s["x"] + torch.ones(7, device=s["x"].device),
    "in_place_shape": lambda s: s["x"].add_(torch.ones(7, device=s["x"].device)),
    "in_place_cast": lambda s: s["x"].add_(1j),
    "overlap": lambda s: s["x"][0, 1:].add_(s["x"][0, :2]),
    "expanded": lambda s: s["y"][:, :1].expand(2, 3).add_(1),
    "view": lambda s: s["view"].view(-1),
    "copy": lambda s: s["x"].copy_(torch.ones(7)),
    "out_cast": lambda s: torch.add(s["x"], 1j, out=s["out"]),
    "matmul": lambda s: s["x"] @ s["x"],
    "devices": lambda s: s["x"] + torch.ones(2, 3),
    "t_": lambda s: s["x"].unsqueeze(0).t_(),
    "set_": lambda s: s["x"].set_(torch.ones(2)),
    "list": lambda s: torch._foreach_add_([s["x"], s["y"]], [s["other"], torch.ones(7, device=s["x"].device)]),
}


@pytest.mark.parametrize("name", RAISING)
def test_an_op_that_raises_changes_nothing(name: str, device: torch.device) -> None:
    state = start(device)
    state["seven"] = torch.ones(7, device=device)
    _ = state["view"] + 1, state["x"] + state["other"]  # everything is loaded
    versions = {key: t._version for key, t in state.items()}
    numbers = [list(trace.floats), list(trace.ints), list(trace.complexes)]
    with pytest.raises(RuntimeError):
        RAISING[name](state)
    assert [trace.floats, trace.ints, trace.complexes][0] == numbers[0]
    assert {key: t._version for key, t in state.items()} == versions
    expected = start("cpu")
    assert everything({k: t for k, t in state.items() if k in expected}) == everything(expected)


def test_an_op_that_raises_leaves_the_cursor(device: torch.device) -> None:
    x, y = torch.ones(3, device=device), torch.ones(7, device=device)
    cursor, nodes = trace.cursor, trace.nodes
    for wrong in (lambda: x + y, lambda: x.mul_(y), lambda: x.add_(1j), lambda: torch.add(x, 1j, out=x)):
        with pytest.raises(RuntimeError):
            wrong()
        assert trace.cursor is cursor and trace.nodes == nodes
