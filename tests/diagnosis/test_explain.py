"""What `lazytpu.explain`, the compile budget and the log say: each text as it is, for each kind of cause.

In the expected texts ``[name]`` stands for the line of this file that ends in the comment ``# [name]``.
"""

from __future__ import annotations

import linecache
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lazytpu
from lazytpu.diagnosis import cause, events
from lazytpu.dispatch import cpu_fallback
from lazytpu.errors import CompileBudgetError
from lazytpu.location import conversion, source
from lazytpu.runtime import client, executables, transfers
from lazytpu.runtime.disk_cache import lookup, serialized
from lazytpu.tracing import step

HERE = Path(__file__)
LINES = HERE.read_text().splitlines()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No graph is known, and the next one is graph 1."""
    monkeypatch.setattr(lazytpu.config, "disk_cache", False)
    step.forget()
    lazytpu.metrics.reset()
    monkeypatch.setattr(events, "_total", 0)
    yield
    step.forget()
    lazytpu.metrics.reset()


def marked(text: str) -> str:
    """A text with marks in place of lines of this file, and ``#`` in place of times."""

    def mark(match: re.Match[str]) -> str:
        found = re.search(r"# (\[\w+\])$", LINES[int(match[1]) - 1])
        return found[1] if found else match[0]

    return re.sub(r"\d+\.\d+ (m?s)\b", r"# \1", re.sub(rf"{HERE.name}:(\d+)", mark, text))


def last() -> str:
    """What is told of the last compilation."""
    return marked("\n".join(events.lines_of(events.compilations[-1])))


def kinds() -> list[str]:
    return [event.cause.kind for event in events.compilations]


def section(title: str) -> str:
    """The lines below a title in what `explain` says."""
    return marked(lazytpu.explain()).partition(title + "\n")[2]


# --- the first ----------------------------------------------------------------------------------------------


def test_first(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    y = x.sinh()  # [sinh]
    lazytpu.mark_step()
    assert (
        last()
        == """\
1  1 ops, # s: the first graph
   at   [sinh]"""
    )
    del y


def test_first_after_the_tree_was_dropped(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    y = x.sinh()
    lazytpu.mark_step()
    step.forget()
    y = x.cosh()  # [cosh]
    lazytpu.mark_step()
    assert (
        last()
        == """\
2  1 ops, # s: the first graph since the trace tree was dropped (max_tree_nodes)
   at   [cosh]"""
    )
    del y


def test_another_program(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    y = x.sinh()  # [begin_a]
    lazytpu.mark_step()
    y = x.cosh()  # [begin_b]
    lazytpu.mark_step()
    assert (
        last()
        == """\
2  1 ops, # s: diverges from graph 1 at a graph that begins with aten.cosh
   at   [begin_b]
   was  [begin_a]"""
    )
    del y


# --- inputs -------------------------------------------------------------------------------------------------


def total(x: torch.Tensor) -> torch.Tensor:
    result = x.sinh().sum()  # [use]
    lazytpu.mark_step()
    return result


def batches(n: int = 6) -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(n, 4)), batch_size=4)


BATCH = """\
2  2 ops, # s: diverges from graph 1 at op 1 aten.sinh, argument 'self': input %p0 was f32[4,4] and is f32[2,4]: \
its dimension 0 changed
   at   [use]
   with `x`, a batch of `{}`; type 2 of 2 seen here: f32[4,4], f32[2,4]
   fix  keep the shapes of batches the same: drop_last=True, or pad the last batch"""


def test_batch_of_a_data_loader(device: torch.device) -> None:
    loader = batches()
    for (x,) in loader:  # [for_data]
        total(x.to(device))
    assert last() == BATCH.format("loader` (DataLoader, [for_data])").replace(")`", ")")


def test_batch_of_a_device_loader(device: torch.device) -> None:
    loader = lazytpu.DeviceLoader(batches())
    for (x,) in loader:  # [for_device]
        total(x)
    assert last() == BATCH.format("loader` (DeviceLoader, [for_device])").replace(")`", ")")


class Trainer:
    def __init__(self) -> None:
        self.loader = batches()

    def fit(self, device: torch.device) -> None:
        for _, batch in enumerate(self.loader):  # [for_self]
            total({"x": batch[0].to(device)}["x"])


def test_batch_of_a_loader_that_is_an_attribute(device: torch.device) -> None:
    Trainer().fit(device)
    assert last() == BATCH.format("self.loader` (DataLoader, [for_self])").replace(")`", ")")


def test_item_of_another_loop_and_the_third_type(device: torch.device) -> None:
    for x in [torch.ones(n, 4) for n in (2, 3, 5)]:  # [for_list]
        x = x.to(device)
        total(x)
    assert (
        last()
        == """\
3  2 ops, # s: diverges from graph 2 at op 1 aten.sinh, argument 'self': input %p0 was f32[3,4] and is f32[5,4]: \
its dimension 0 changed
   at   [use]
   with `x`, from the loop over `[torch.ones(n, 4) for n in (2, 3, 5)]` ([for_list]); type 3 of 3 seen here: \
f32[2,4], f32[3,4], f32[5,4]
   fix  keep the shapes of batches the same: drop_last=True, or pad the last batch"""
    )


def run_each(make: Callable[[int], torch.Tensor], device: torch.device) -> str:
    for i in range(2):
        x = make(i).to(device)  # [moved]
        total(x)
    return last()


def test_another_dimension(device: torch.device) -> None:
    assert (
        run_each(lambda i: torch.ones(2, 3 + i), device)
        == """\
2  2 ops, # s: diverges from graph 1 at op 1 aten.sinh, argument 'self': input %p0 was f32[2,3] and is f32[2,4]: \
its dimension 1 changed
   at   [use]
   with `x`, moved to the device at [moved]; type 2 of 2 seen here: f32[2,3], f32[2,4]
   fix  pad it to one of a few sizes, and leave the padding out of the result"""
    )


def test_several_dimensions_and_another_rank(device: torch.device) -> None:
    assert ": its dimensions 0 and 2 changed\n" in run_each(lambda i: torch.ones(2 + i, 3, 4 + i), device)
    assert ": it has 2 dimensions, it had 1\n" in run_each(lambda i: torch.ones([7] * (1 + i)), device)


def test_dtype(device: torch.device) -> None:
    assert (
        run_each(lambda i: torch.ones(2, dtype=(torch.float32, torch.float64)[i]), device)
        == """\
2  2 ops, # s: diverges from graph 1 at op 1 aten.sinh, argument 'self': input %p0 was f32[2] and is f64[2]: \
its dtype changed
   at   [use]
   with `x`, moved to the device at [moved]; type 2 of 2 seen here: f32[2], f64[2]
   fix  convert it to one dtype before the step"""
    )


def test_memory_layout(device: torch.device) -> None:
    assert (
        run_each(lambda i: torch.ones(2, 3) if i == 0 else torch.ones(3, 2).t(), device)
        == """\
2  2 ops, # s: diverges from graph 1 at op 1 aten.sinh, argument 'self': input %p0 was f32[2,3] and is f32[2,3]{1,2}: \
its memory layout changed: strides [3, 1] before, [1, 2] now, the same shape and dtype
   at   [use]
   with `x`, moved to the device at [moved]; type 2 of 2 seen here: f32[2,3], f32[2,3]{1,2}
   fix  give it one memory layout before the step, with contiguous()"""
    )


def test_memory_layout_of_a_view(device: torch.device) -> None:
    layer = nn.Linear(3, 3).to(device)
    for i in range(2):
        x = torch.ones(3, 3).to(device)  # [made_for_view]
        x = x.t() if i else x
        lazytpu.mark_step()
        total(layer(x))  # [layer]
    assert kinds() == ["first", "input"]
    assert (
        last()
        == """\
2  5 ops, # s: diverges from graph 1 at op 3 aten.addmm, argument 'mat1': was f32[3,3] and is f32[3,3]{1,3}, a view of \
input %p1: its memory layout changed: strides [3, 1] before, [1, 3] now, the same shape and dtype
   at   [layer]  Linear
   with `x`, moved to the device at [made_for_view]
   fix  give it one memory layout before the step, with contiguous()"""
    )


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.fc(x))  # [two]


def test_a_layer_without_bias(device: torch.device) -> None:
    net, x = TwoLayers().to(device), torch.ones(5, 4).to(device)

    def told(bias: bool) -> str:
        net.fc = nn.Linear(4, 3, bias=bias).to(device)
        total(net(x))
        return last()

    told(True)
    assert (
        told(False)
        == """\
2  5 ops, # s: diverges from graph 1 at op 2, aten.mm instead of aten.addmm: it has no bias now; it had parameter \
`net.fc.bias`, f32[3]
   at   [two]  TwoLayers.fc
   fix  nothing, if a layer was replaced on purpose: one graph for each is kept"""
    )
    with torch.no_grad():  # one op takes the layer's tensors as they are
        told(True)
        assert "aten.linear: it has no bias now; it had parameter `net.fc.bias`, f32[3]\n" in told(False)
    step.forget()
    told(False)
    assert "aten.addmm instead of aten.mm: it has parameter `net.fc.bias`, f32[3], now; it had no bias\n" in told(True)
    step.forget()
    told(True)
    net.fc = nn.Linear(4, 3, bias=False).to(device)
    net.out = nn.Linear(3, 7).to(device)
    total(net(x))
    assert "it has no bias now; it had parameter `net.fc.bias`, f32[3]\n" in last(), "although more changed below"


def test_parameter(device: torch.device) -> None:
    net = nn.Linear(4, 3, bias=False).to(device)
    for n in (3, 5):
        net.weight = nn.Parameter(torch.ones(n, 4).to(device))
        total(net.weight)
    assert last().splitlines()[2:] == [
        "   with parameter `net.weight`; type 2 of 2 seen here: f32[3,4], f32[5,4]",
        "   fix  nothing, if it was replaced on purpose; else assign to it in place (copy_)",
    ]


def test_buffer_and_optimizer_state(device: torch.device) -> None:
    for n in (3, 5):
        net = nn.BatchNorm1d(n).to(device)
        assert net.running_mean is not None
        total(net.running_mean)
    assert "   with buffer `net.running_mean`; type 2 of 2" in last()
    for n in (6, 7):
        weight = nn.Parameter(torch.ones(n).to(device))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        weight.grad = torch.ones(n).to(device)
        optimizer.step()
        lazytpu.mark_step()
        total(optimizer.state[weight]["momentum_buffer"])
    assert "   with state `momentum_buffer` of parameter 0 in `optimizer` (SGD); type 4 of 4" in last()


def test_asking_for_names_keeps_no_tensor(device: torch.device) -> None:
    def compiled(n: int) -> int:
        before = lazytpu.metrics.counter("compile")
        x = torch.ones(n, 4).to(device)
        y = x.sinh()
        z = y.cosh()
        lazytpu.mark_step()
        w = z.exp()
        del y, z  # held only until here, whatever looked at these variables above
        lazytpu.mark_step()
        del w, x
        return lazytpu.metrics.counter("compile") - before

    assert [compiled(n) for n in (2, 3, 2, 3)] == [2, 2, 0, 0]


def test_an_object_that_refuses_to_be_looked_at(device: torch.device) -> None:
    class Refusing:
        @property
        def __class__(self):  # type: ignore[no-untyped-def] # what isinstance asks for
            raise RuntimeError("do not look")

    unwilling = Refusing()
    assert "was f32[2] and is f32[3]" in run_each(lambda i: torch.ones(2 + i), device)
    del unwilling


# --- arguments and numbers ----------------------------------------------------------------------------------


def test_attribute(device: torch.device) -> None:
    x = torch.ones(2, 6).to(device)
    for shape in ((3, 4), (4, 3), (6, 2)):
        total(x.view(shape).cosh())  # [viewed]
    assert (
        last()
        == """\
3  4 ops, # s: diverges from graph 2 at op 1 aten.view, argument 'size': was [4, 3] and is [6, 2], \
which is part of the program
   at   [viewed]
   with value 3 of 3 seen here: [3, 4], [4, 3], [6, 2]
   fix  keep it the same, or expect one graph for each value: it decides shapes or selects the formula"""
    )


def test_number_that_is_part_of_the_program(device: torch.device) -> None:
    for n in (3, 4):
        total(torch.arange(n, device=device))  # [arange]
    assert (
        last()
        == """\
2  3 ops, # s: diverges from graph 1 at op 1 aten.arange, argument 'end': was 3 and is 4, which is part of the program
   at   [arange]
   with value 2 of 2 seen here: 3, 4
   fix  keep it the same, or expect one graph for each value: it decides shapes or selects the formula"""
    )


def test_number_that_becomes_an_input(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    for n in (1.5, 2.5, 3.5):
        total(x.pow(n))  # [pow]
    assert kinds() == ["first", "promoted"]
    assert (
        last()
        == """\
2  3 ops, # s: diverges from graph 1 at op 1 aten.pow.Tensor_Scalar, argument 'exponent': was the constant 1.5, changed, \
and is an input from now on (float)
   at   [pow]
   fix  nothing: other values of it compile nothing any more"""
    )
    assert section("scalars made dynamic because they changed").splitlines()[0] == (
        "  aten.pow.Tensor_Scalar exponent at [pow]"
    )


def test_kind_of_a_number(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    for n in (1, 2.0):
        total(x * n)  # [times]
    assert (
        last()
        == """\
2  3 ops, # s: diverges from graph 1 at op 1 aten.mul.Tensor, argument 'other': was a Python int and is a Python float
   at   [times]
   fix  give it the same kind in every step: 1.0, not 1"""
    )


def test_operand(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    for swapped in (False, True):
        a = x.sinh()  # [a]
        b = x.cosh()  # [b]
        c, d = (b, a) if swapped else (a, b)
        quotient = c / d  # [divide]
        lazytpu.mark_step()
    assert (
        last()
        == """\
2  3 ops, # s: diverges from graph 1 at op 3 aten.div.Tensor, argument 'self': was the result of op 1 aten.sinh, \
f32[3] ([a]) and is the result of op 2 aten.cosh, f32[3] ([b])
   at   [divide]
   with `b`
   fix  use the same tensors in every step; make one that is only there from the second step on before the first"""
    )
    del quotient


# --- control flow -------------------------------------------------------------------------------------------

KEPT = "nothing, if there are few ways: each is kept; where data decides, torch.where puts both into one graph"


def both_ways(f: Callable[[torch.Tensor, int], torch.Tensor], device: torch.device) -> str:
    x = torch.ones(3).to(device)
    for flag in (0, 1):
        result = f(x, flag)
        lazytpu.mark_step()  # [cut]
        del result
    return last()


def test_branch(device: torch.device) -> None:
    def f(x: torch.Tensor, flag: int) -> torch.Tensor:
        x = x.sinh()
        if flag:  # [if]
            x = x.cosh()  # [inside]
        return x.exp()  # [after]

    assert (
        both_ways(f, device)
        == f"""\
2  3 ops, # s: diverges from graph 1 at op 2, aten.cosh instead of aten.exp: `if flag:` at [if] took another control path
   at   [inside]
   was  [after]
   fix  {KEPT}"""
    )


def test_branch_on_one_line(device: torch.device) -> None:
    def f(x: torch.Tensor, flag: int) -> torch.Tensor:
        x = x.sinh()
        return x.cosh() if flag else x.exp()  # [conditional]

    assert (
        both_ways(f, device)
        == f"""\
2  2 ops, # s: diverges from graph 1 at op 2, aten.cosh instead of aten.exp: `return x.cosh() if flag else x.exp()` \
at [conditional] took another control path
   at   [conditional]
   fix  {KEPT}"""
    )


def test_branch_that_calls_functions(device: torch.device) -> None:
    def f(x: torch.Tensor, flag: int) -> torch.Tensor:
        x = x.sinh()
        if flag:  # [if_calls]
            return first(x)
        return second(x)

    assert (
        both_ways(f, device)
        == f"""\
2  2 ops, # s: diverges from graph 1 at op 2, aten.cosh instead of aten.exp: `if flag:` at [if_calls] took another control path
   at   [first]
   was  [second]
   fix  {KEPT}"""
    )


def first(x: torch.Tensor) -> torch.Tensor:
    return x.cosh()  # [first]


def second(x: torch.Tensor) -> torch.Tensor:
    return x.exp()  # [second]


def test_branch_of_the_first_op(device: torch.device) -> None:
    def f(x: torch.Tensor, flag: int) -> torch.Tensor:
        if flag:  # [if_first]
            return x.cosh()  # [yes]
        return x.exp()  # [no]

    assert both_ways(f, device).splitlines()[0] == (
        "2  1 ops, # s: diverges from graph 1 at op 1, aten.cosh instead of aten.exp: "
        "`if flag:` at [if_first] took another control path"
    )


def test_loop(device: torch.device) -> None:
    def longer(x: torch.Tensor, flag: int) -> torch.Tensor:
        for _ in range(2 + flag):  # [for_more]
            x = x.cosh()  # [turn]
        return x.exp()  # [out]

    assert (
        both_ways(longer, device)
        == """\
2  4 ops, # s: diverges from graph 1 at op 3, aten.cosh instead of aten.exp: the loop `for _ in range(2 + flag):` \
at [for_more] ran longer
   at   [turn]
   was  [out]
   fix  give the loop the same number of turns in every step, or pad"""
    )

    def shorter(x: torch.Tensor, flag: int) -> torch.Tensor:
        n = 3 - flag
        while n:  # [while]
            x, n = x.sin(), n - 1  # [lap]
        return x.exp()  # [done]

    assert both_ways(shorter, device).splitlines()[0] == (
        "4  3 ops, # s: diverges from graph 3 at op 3, aten.exp instead of aten.sin: "
        "the loop `while n:` at [while] ended sooner"
    )


def test_other_lines_without_a_branch_between_them(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    y = x.sinh().exp()  # [line_a]
    lazytpu.mark_step()
    y = x.sinh().cosh()  # [line_b]
    lazytpu.mark_step()
    assert last().splitlines()[0] == (
        "2  2 ops, # s: diverges from graph 1 at op 2, aten.cosh instead of aten.exp: Python took another control path, "
        "to [line_b] instead of [line_a]"
    )
    del y


def test_state_of_an_optimizer(device: torch.device) -> None:
    net = nn.Linear(4, 3).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(2, 4).to(device)).sum().backward()
        optimizer.step()  # [optimizer]
        lazytpu.mark_step()
    assert kinds() == ["first", "branch"]
    assert (
        last().partition(": ")[2]
        == """\
diverges from graph 1 at op 9, aten._foreach_mul.Scalar instead of aten.clone: [optimizer] took another control path \
inside torch: the first optimizer step allocates its state
   at   [optimizer]
   fix  none needed, later steps reuse this graph"""
    )


def test_one_line_called_from_others(device: torch.device) -> None:
    net = nn.Linear(4, 3).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train() -> None:
        optimizer.zero_grad()
        net(torch.ones(2, 4).to(device)).sum().backward()  # [trained]
        optimizer.step()  # [stepped]
        lazytpu.mark_step()

    train()  # [called]
    optimizer.param_groups[0]["weight_decay"] = 0.1
    train()  # [called_again]
    assert (
        "took another control path inside torch, called from [called_again] instead of [called]: it is another"
        in last()
    )
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    x = torch.ones(5, 4).to(device)
    y = net(x)  # [validated]
    lazytpu.mark_step()
    z = net(torch.ones(4, 4).to(device))  # [other_size]
    lazytpu.mark_step()
    assert kinds()[-1] == "input" and "was f32[5,4] and is f32[4,4]: its dimension 0 changed" in last()
    assert "   at   [other_size]  Linear\n   was  [validated]  Linear\n" in last()
    del y, z


def test_gradients_that_are_added_up(device: torch.device) -> None:
    net, x = nn.Sequential(nn.Tanh(), nn.Linear(4, 3)).to(device), torch.ones(2, 4).to(device).requires_grad_()

    def backward() -> str:
        net(x).sum().backward()  # [adding]
        lazytpu.mark_step()
        return last()

    backward()
    assert (
        backward()
        == """\
2  10 ops, # s: diverges from graph 1 at op 7, aten.add.Tensor instead of aten.tanh_backward: a gradient is added to the \
one that is there, where there was none before
   at   [adding]  Sequential.1 (backward)
   was  [adding]  Sequential.0 (backward)
   fix  nothing if gradients are accumulated; else optimizer.zero_grad() before each backward()"""
    )
    sites = {node.op.name: node.site.describe() for node in events.compilations[-1].graph.nodes}
    assert marked(sites["aten.tanh_backward"]) == "[adding]  Sequential.0 (backward)", "although its op was found"
    step.forget()
    backward()
    net.zero_grad()
    x.grad = None
    assert "a gradient is the first, where it was added to another before" in backward()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(x)).sinh()  # [forward]


def test_train_and_eval(device: torch.device) -> None:
    net, x = Net().to(device), torch.ones(4, 4).to(device)
    for train in (True, False, True):
        net.train(train)
        total(net(x))
    assert kinds() == ["first", "mode"]
    assert (
        last()
        == """\
2  4 ops, # s: diverges from graph 1 at op 1, aten._native_batch_norm_legit_functional instead of aten.add.Tensor: \
Net was in train mode and is in eval mode
   at   [forward]  Net.norm
   fix  nothing: one graph for train() and one for eval() are kept"""
    )


def test_dropout_switched_off(device: torch.device) -> None:
    net, x = Net().to(device), torch.ones(4, 4).to(device)
    total(net(x))
    net.drop.eval()
    total(net(x))
    assert last().splitlines()[0].endswith("aten.sinh instead of aten.native_dropout: dropout of Net.drop is off now")
    assert kinds() == ["first", "mode"]


def test_mode_given_to_a_function(device: torch.device) -> None:
    x, mean, var = [torch.ones(4, 4).to(device)] + [torch.ones(4).to(device) for _ in range(2)]
    for train in (True, False):
        total(torch.native_batch_norm(x, None, None, mean, var, train, 0.1, 1e-5)[0])  # [norm]
    assert kinds() == ["first", "mode"]


# --- what is held, donated, cut, configured -----------------------------------------------------------------


def test_live(device: torch.device) -> None:
    x, kept = torch.ones(3).to(device), []
    for keep in (False, True):
        y = x.sinh()  # [made]
        z = y.exp()  # [end]
        if keep:
            kept.append(y)
        del y
        lazytpu.mark_step()
    assert (
        last()
        == """\
2  2 ops, # s: is graph 1, but the result of aten.sinh, f32[3], is held at the cut now
   at   [made]
   was  [end]
   with held by `kept[0]`
   fix  what is kept from a step is computed; keep the same tensors in every step"""
    )
    del z


def test_no_longer_live(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    for keep in (True, False):
        y = x.sinh()  # [made_too]
        z = y.exp()  # [end_too]
        if not keep:
            del y
        lazytpu.mark_step()
    assert (
        last()
        == """\
2  2 ops, # s: is graph 1, but the result of aten.sinh, f32[3], is no longer held at the cut
   at   [made_too]
   was  [end_too]
   fix  what is kept from a step is computed; keep the same tensors in every step"""
    )
    del z


def test_donation(device: torch.device) -> None:
    x = torch.ones(3).to(device)  # [x]
    for shared in (False, True):
        x.sinh_()
        x._s.shared = shared
        lazytpu.mark_step()  # [donating]
    assert (
        last()
        == """\
2  1 ops, # s: is graph 1, but other inputs may be overwritten (%p0): input %p0, f32[3], may not be overwritten \
any more: something else holds it
   at   [donating]
   with `x`, moved to the device at [x]
   fix  share its memory (copy_, to_jax, dlpack) in every step or in none"""
    )


def test_settings(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, 3).to(device)

    def product() -> None:
        y = x @ x
        lazytpu.mark_step()  # [cut_of_product]
        del y

    y = x @ x  # the same path, recorded here first
    lazytpu.mark_step()
    for _ in range(2):
        for precision in ("high", "highest"):
            monkeypatch.setattr(lazytpu.config, "matmul_precision", precision)
            product()
    assert kinds() == ["first", "setting"]
    assert (
        last()
        == """\
2  1 ops, # s: is graph 1, but lazytpu.config.matmul_precision was 'highest' and is 'high'
   at   [cut_of_product]
   fix  nothing: the graph is kept for each setting"""
    )
    del y


def test_check_of_bounds_switched_on(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, i = torch.ones(3).to(device), torch.tensor([1]).to(device)
    for checked in (False, True):
        monkeypatch.setattr(lazytpu.config, "check_bounds", checked)
        y = x[i]
        lazytpu.mark_step()
    assert "is graph 1, but lazytpu.config.check_bounds was False and is True" in last()
    del y


def test_donation_switched_off(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3).to(device)
    x.sinh_()
    lazytpu.mark_step()
    monkeypatch.setattr(lazytpu.config, "donate", False)
    x.sinh_()
    lazytpu.mark_step()
    assert "is graph 1, but lazytpu.config.donate was True and is False" in last()


def test_settings_of_a_captured_graph(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, 3).to(device)
    compiled = torch.compile(lambda x: x @ x, backend="lazytpu")
    compiled(x)  # [captured]
    monkeypatch.setattr(lazytpu.config, "matmul_precision", "high")
    compiled(x)  # [called_with_high]
    assert kinds() == ["first", "setting"]
    assert "   at   [called_with_high]\n" in last()
    told = "is graph 1, but lazytpu.config.matmul_precision was 'highest' and is 'high'"
    assert told in last()


def test_flag_of_torch(device: torch.device) -> None:
    def ones() -> None:
        y = torch.ones(3, device=device) + 1  # [ones]
        lazytpu.mark_step()
        del y

    ones()
    try:
        for dtype in (torch.float64, torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            ones()
    finally:
        torch.set_default_dtype(torch.float32)
    assert kinds() == ["first", "flag"]
    assert (
        last()
        == """\
2  2 ops, # s: the first graph; torch.get_default_dtype() was torch.float32 and is torch.float64
   at   [ones]"""
    )


def test_another_version_on_disk(device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lazytpu.config, "disk_cache", True)
    monkeypatch.setattr(lazytpu.config, "disk_cache_dir", str(tmp_path / "cache"))
    x = torch.ones(3).to(device)

    def again() -> None:
        y = x.sinh()  # [sinh]
        lazytpu.mark_step()
        lookup.settle()
        del y
        step.forget()

    now = serialized._versions()
    monkeypatch.setattr(serialized, "_versions", lambda: (*now[:2], "0.9.0", *now[3:]))
    again()
    monkeypatch.setattr(serialized, "_versions", lambda: now)
    again()
    assert kinds() == ["first", "version"]
    assert (
        last()
        == f"""\
2  1 ops, # s: the first graph since the trace tree was dropped (max_tree_nodes); the disk cache has it, but jax was \
0.9.0 and is {now[2]}
   at   [sinh]"""
    )
    again()  # from disk now
    assert events.compilations[-1].loaded
    for name, value, text in (
        ("check_bounds", True, "lazytpu.config.check_bounds was False and is True"),
        ("donate", False, "lazytpu.config.donate was True and is False"),
    ):
        monkeypatch.setattr(lazytpu.config, name, value)
        again()
        assert text in last()


def test_longer(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    y = x.sinh()
    lazytpu.mark_step()  # [there]
    y = x.sinh()
    y = y.cosh()  # [further]
    lazytpu.mark_step()
    assert (
        last()
        == """\
2  2 ops, # s: is graph 1, but the graph goes on with aten.cosh where it was cut before, after op 1
   at   [further]
   was  [there]
   fix  cut at the same place in every step, once"""
    )
    del y


def test_longer_by_a_branch(device: torch.device) -> None:
    def f(x: torch.Tensor, flag: int) -> torch.Tensor:
        y = x.sinh()
        if not flag:  # [if_read]
            y.sum().item()  # [read_now_and_then]
        return y.sum().cosh()  # [goes_on]

    assert (
        both_ways(f, device)
        == f"""\
3  3 ops, # s: diverges from graph 1 at op 3, aten.cosh instead of a cut: `if not flag:` at [if_read] took another control path
   at   [goes_on]
   was  [read_now_and_then]
   fix  {KEPT}"""
    )


def test_shorter(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    y = x.sinh()
    y = y.cosh()  # [on]
    lazytpu.mark_step()
    y = x.sinh()
    lazytpu.mark_step()  # [stop]
    assert (
        last()
        == """\
2  1 ops, # s: is graph 1, but the graph ends after op 1 aten.sinh, where it went on with aten.cosh before
   at   [stop]
   was  [on]
   fix  cut at the same place in every step, once"""
    )
    del y


def test_shorter_by_a_branch(device: torch.device) -> None:
    def f(x: torch.Tensor, flag: int) -> torch.Tensor:
        y = x.sinh()
        if not flag:  # [if_more]
            y = y.cosh()  # [more]
        return y

    assert (
        both_ways(f, device)  # [ways]
        == f"""\
2  1 ops, # s: diverges from graph 1 at op 2, a cut instead of aten.cosh: `if not flag:` at [if_more] took another control path
   at   [cut]
   was  [more]
   fix  {KEPT}"""
    )


def test_forgotten(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    for _ in range(2):
        y = x.sinh()
        lazytpu.mark_step()  # [again]
        executables.forget_executables()
    assert (
        last()
        == """\
2  1 ops, # s: the graph was compiled before and forgotten since
   at   [again]
   fix  raise lazytpu.config.max_executables, or compile fewer different graphs"""
    )
    del y


def test_recorded_but_never_compiled(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    for keep in (False, True):
        y = x.sinh()
        if not keep:
            del y
        lazytpu.mark_step()  # [kept]
    assert (
        last()
        == """\
1  1 ops, # s: the ops up to op 1 were recorded before, but never compiled: nothing was held, or it failed
   at   [kept]"""
    )
    del y


def test_every_kind_is_documented_and_seen_here() -> None:
    page = (HERE.parents[2] / "docs/reference/logging.md").read_text()
    assert [kind for kind in cause.KINDS if f"`{kind}`" not in page] == []


# --- cuts, reads, fallbacks ---------------------------------------------------------------------------------


def test_cuts_and_reads(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    for _ in range(2):
        y = x.sinh()
        if y.sum() > 0:  # [bool]
            y = y + 1
        lazytpu.mark_step()
        y.tolist()  # [list]
        lazytpu.wait()  # [wait]
    told = section("cuts forced in the middle of a step")
    assert told.splitlines()[0] == "  2 x bool (if) at [bool], waited # ms for the device"
    reads = told.partition("reads that waited for a running step\n")[2].splitlines()
    assert sorted(reads) == [
        "  2 x copy to the CPU at [list], waited # ms for the device",
        "  2 x wait at [wait], waited # ms for the device",
    ]


def test_what_was_written_where_a_tensor_becomes_a_number(device: torch.device) -> None:
    x = torch.ones(()).to(device)
    w = torch.ones(3, device=device).requires_grad_()
    w.grad = torch.ones(3, device=device)

    def asked(read: Callable[[], object]) -> list[str]:
        lazytpu.metrics.reset()
        read()
        return [what for found in (events.cuts, events.reads) for what, _ in found]

    def statements() -> None:
        while x.sinh() < 0:
            pass
        assert x.sinh()

    assert asked(lambda: x.sinh().item()) == ["item"]
    assert asked(lambda: [float(x.sinh()), int(x.sinh()), bool(x.sinh())]) == ["float", "int", "bool"]
    assert asked(lambda: round(float(x.sinh() + 1))) == ["float"]
    assert asked(lambda: 1 if x.sinh() else 2) == ["bool (if)"]
    assert asked(lambda: not x.sinh()) == ["bool (not)"]
    assert asked(statements) == ["bool (while)", "bool (assert)"]
    assert asked(lambda: (5, 6)[x.long() - 1]) == ["int (index)"]
    assert asked(lambda: f"{x.sinh():.2f}") == ["item (by format)"]
    assert asked(lambda: range(x.long() + 2)) == ["item (by range)"]
    clipped = asked(lambda: nn.utils.clip_grad_norm_([w], 1.0, error_if_nonfinite=True))
    assert clipped in (["bool (if) inside torch"], ["bool (and) inside torch"])
    assert asked(lambda: exec("bool(x.sinh())", {"x": x})) == [conversion.UNKNOWN], "there is no source"
    assert asked(lambda: exec("if x.sinh(): pass", {"x": x})) == ["bool"]


def test_lines_of_gradients(device: torch.device) -> None:
    x = torch.ones(3).to(device).requires_grad_()
    y = x.tanh()  # [graded]
    mask = y > 0  # [ungraded]
    (y * mask).sum().backward()
    (line,) = [line for line in lazytpu.ir_text().splitlines() if "tanh_backward" in line]
    assert marked(line).endswith("# [graded] (backward)"), "not the line of what was recorded after it"
    z = x.exp()
    z.register_hook(lambda grad: grad.sinh())  # [hook]
    with torch.autograd.set_multithreading_enabled(False):  # on this thread, below the line of backward()
        z.sum().backward()
    (line,) = [line for line in lazytpu.ir_text().splitlines() if "aten.sinh" in line]
    assert marked(line).endswith("# [hook]")
    x.tanh()[mask].sum().backward()  # [masked]
    told = section("reads that waited for a running step")
    assert "  1 x aten.nonzero at [masked], waited # ms for the device" in told, "on the thread of the backward pass"


def test_cut_of_a_graph_that_grew_too_large(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "max_graph_ops", 3)
    y = torch.ones(3).to(device)
    for _ in range(5):
        y = y.sinh()  # [grow]
    lazytpu.mark_step()
    assert "  1 x max_graph_ops at [grow]" in section("cuts forced in the middle of a step")


def test_time_waited_is_that_of_the_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(transfers.time, "perf_counter", lambda: float(next(clock)))
    torch.ones(3).to(device).sinh().sum().item()
    monkeypatch.undo()
    ((_, tally),) = events.cuts.items()
    assert tally.count == 1 and tally.seconds == 1.0  # one tick from the beginning of the wait to its end


@pytest.mark.filterwarnings("ignore:.*runs on the CPU")
def test_fallback(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    op = cpu_fallback.fallback(torch.ops.aten.cos.default)
    x = torch.ones(3).to(device)
    for _ in range(2):
        op(x)  # [fallback]
    assert (
        section("ops without a lowering, which ran on the CPU") == "  2 x aten.cos at [fallback], on the CPU for # ms"
    )
    assert lazytpu.metrics.fallbacks() == {"aten.cos": 2} and lazytpu.metrics.counter("fallback") == 2


def test_nothing_to_say() -> None:
    assert lazytpu.explain() == "nothing was compiled"


# --- the budget ---------------------------------------------------------------------------------------------

BUDGET = """\
2 graphs were compiled; lazytpu.config.max_compiles is 1
  at    [use]
  with  diverges from graph 1 at op 1 aten.sinh, argument 'self': input %p0 was f32[2,3] and is f32[2,4]: \
its dimension 1 changed; `x`, moved to the device at [moved]; type 2 of 2 seen here: f32[2,3], f32[2,4]
  fix   pad it to one of a few sizes, and leave the padding out of the result"""


def test_budget_raises_with_the_cause(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "max_compiles", 1)
    with pytest.raises(CompileBudgetError) as raised:
        run_each(lambda i: torch.ones(2, 3 + i), device)
    assert marked(str(raised.value)) == BUDGET
    monkeypatch.setattr(lazytpu.config, "max_compiles", 0)
    lazytpu.mark_step()


def test_budget_warns_at_the_line(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "max_compiles", 1)
    monkeypatch.setattr(lazytpu.config, "max_compiles_action", "warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_each(lambda i: torch.ones(2, 3 + i), device)
    (warning,) = [w for w in caught if issubclass(w.category, events.CompileBudgetWarning)]
    assert marked(str(warning.message)) == BUDGET
    assert warning.filename == str(HERE) and LINES[warning.lineno - 1].endswith("# [use]")


# --- the log ------------------------------------------------------------------------------------------------


def logged(device: torch.device, caplog: pytest.LogCaptureFixture, topics: str) -> list[str]:
    lazytpu.config.log = topics
    try:
        for n in (2, 3):
            x = torch.ones(n).to(device)  # [log_moved]
            x.sinh().pow(n + 0.5).sum().item()  # [logged]
        lazytpu.mark_step()
    finally:
        lazytpu.config.log = "warning"
    return [marked(record.getMessage()) for record in caplog.records if record.name.startswith("lazytpu")]


COMPILED = [
    "compiled graph 1: 3 ops in # s: the first graph ([logged])",
    "compiled graph 2: 3 ops in # s: diverges from graph 1 at op 1 aten.sinh, argument 'self': input %p0 was f32[2] "
    "and is f32[3]: its dimension 0 changed; `x`, moved to the device at [log_moved]; type 2 of 2 seen here: "
    "f32[2], f32[3] ([logged])",
]


def test_log_of_compiles(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    promoted = "argument 'exponent' of aten.pow.Tensor_Scalar is an input from now on, because it changed, at [logged]"
    for topics in ("compile", "info", "error, compile"):
        step.forget()
        lazytpu.metrics.reset()
        events._total = 0
        caplog.clear()
        said = logged(device, caplog, topics)
        assert [m for m in said if m != promoted] == COMPILED, topics


def test_log_of_cuts(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    assert logged(device, caplog, "cut") == ["cut by item at [logged]", "item at [logged] waited # ms"] * 2


def test_log_of_steps(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    assert logged(device, caplog, "step") == ["step 1: # ms, 6 ops, 2 run, 2 compiled, waited # ms"]


@pytest.mark.filterwarnings("ignore:.*runs on the CPU")
def test_log_of_placement(device: torch.device, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(lazytpu.config, "log", "placement")
    fallback = cpu_fallback.fallback(torch.ops.aten.cos.default)
    for _ in range(2):
        x = torch.ones(2).to(device)
        y = x.sinh() @ x  # [placed]
        lazytpu.mark_step()
        fallback(y)  # [placed_host]
        y.nonzero()  # [placed_nonzero]
        x[x > 0]  # [placed_mask]
    messages = [marked(record.getMessage()) for record in caplog.records]
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
    """Each op is told of once, when the function is recorded or captured, and not when it is replayed."""
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
        said = [record for record in caplog.records if record.name == "lazytpu.placement"]
        messages = sorted(marked(record.getMessage()) for record in said)
        assert messages == sorted(f"placed {op}: {where}  # [placed_whole]" for op in ops)
    assert lazytpu.metrics.counter("replay") > 0


def test_log_of_a_warning_level_is_silent(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    assert logged(device, caplog, "warning") == []


def test_log_goes_to_standard_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch, lazytpu\nprint((torch.ones(2, device='tpu') + 1).sum().item())\n")
    environment = {**os.environ, "LAZYTPU_LOG": "info,cut", "PYTHONPATH": str(HERE.parents[2])}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "4.0\n"
    assert re.sub(r"\d+\.\d+", "#", done.stderr).splitlines() == [
        "lazytpu: compiled graph 1: 3 ops in # s: the first graph (script.py:2)",
        "lazytpu: cut by item at script.py:2",
        "lazytpu: item at script.py:2 waited # ms",
    ]


def test_a_wrong_topic_is_refused() -> None:
    with pytest.raises(ValueError, match="lazytpu.config.log is one of 'debug', .*, not 'info,everything'"):
        lazytpu.config.log = "info,everything"


# --- reading the source -------------------------------------------------------------------------------------

PROGRAM = """\
def f(x, y):
    try:
        a(x)
    except ValueError:
        b(x)
    match y:
        case 1:
            c(x)
        case _:
            d(x)
    if x: e(x)
    g(x)
def h(x):
    for i in range(3):
        if x:
            e(x)
    else:
        g(x)
    return [z for z in x]
while True:
    a(x)
    b(x)
    if x:
        c(x)
def k(x):
    a(x)
    if x:
        b(x)
"""


def test_branches_in_source(tmp_path: Path) -> None:
    file = str(tmp_path / "program.py")
    Path(file).write_text(PROGRAM)

    def between(line: int, other: int) -> tuple[int, bool, bool] | None:
        found = source.branch_between(file, line, other)
        return found and (found.line, found.loop, found.inside)

    assert between(3, 5) == (2, False, True)
    assert between(10, 8) == (6, False, False)
    assert between(16, 18) == (14, True, True)
    assert between(18, 19) == (14, True, False)
    assert between(11, 11) == (11, False, True)
    assert between(21, 24) == (23, False, False), "the next turn of a loop"
    assert between(12, 12) is None and between(3, 3) is None
    assert between(3, 16) is None, "lines of two functions"
    assert between(26, 28) is None, "the statement comes after one of the lines"
    assert source.branch_between(str(tmp_path / "missing.py"), 1, 2) is None
    Path(file).write_text("for x in loader:\n    a(x)\n    lazytpu.mark_step()\nb(x)\n")
    linecache.checkcache(file)
    assert between(4, 2) is None, "each turn is a step"
    Path(file).write_text("not python (")
    linecache.checkcache(file)
    assert source.branch_between(file, 1, 1) is None
    assert [loop.over for loop in source.loops_around(str(HERE), marked_line("[for_data]"))] == ["loader"]


def marked_line(mark: str) -> int:
    return next(i for i, line in enumerate(LINES, 1) if line.endswith(f"# {mark}"))


# --- what torch does differently at the same line ---------------------------------------------------------------


def test_autocast_and_no_grad(device: torch.device) -> None:
    w = torch.ones(3, 3).to(device).requires_grad_()

    def product() -> None:
        y = nn.functional.linear(w, w)  # [linear]
        lazytpu.mark_step()
        del y

    product()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        product()
    assert kinds() == ["first", "flag"]
    assert "torch.autocast was off and is on (bf16)" in last()
    with torch.no_grad():
        product()
    assert kinds()[2:] in ([], ["flag"]), "the ops may be the same"
    if kinds()[2:]:
        assert "gradients are not recorded here, and were (torch.no_grad)" in last()


def test_a_hook_in_the_backward_pass(device: torch.device) -> None:
    w = torch.ones(3).to(device).requires_grad_()

    def step_() -> None:
        w.grad = None
        w.sinh().cosh().sum().backward()  # [chain]
        lazytpu.mark_step()

    step_()
    w.register_hook(lambda grad: grad * 2)  # [hooked]
    step_()
    text = last()
    assert "before the cut: [hooked] runs before it, and did not" in text
    assert "   at   [hooked]" in text


def test_more_ops_before_the_same_cut(device: torch.device) -> None:
    def total(n: int) -> None:
        xs = [torch.ones(2).to(device) for _ in range(n)]
        y = sum(x.sinh() for x in xs)  # [comprehended]
        lazytpu.mark_step()  # [same_cut]
        del y

    total(2)
    total(3)
    assert (
        last()
        == """\
2  6 ops, # s: diverges from graph 1 at op 5, aten.sinh before the cut: \
the loop `y = sum(x.sinh() for x in xs)` at [comprehended] ran longer
   at   [comprehended]
   was  [same_cut]
   fix  give the loop the same number of turns in every step, or pad"""
    )


def test_a_list_of_more_tensors(device: torch.device) -> None:
    for n in (2, 3):
        y = torch.cat([torch.ones(2).to(device) for _ in range(n)])  # [cat]
        lazytpu.mark_step()
        del y
    assert (
        last()
        == """\
2  1 ops, # s: diverges from graph 1 at op 1 aten.cat, argument 'tensors': was a list of 2 tensors and is one of 3
   at   [cat]
   fix  give it as many tensors in every step, or one tensor that holds them all, padded"""
    )


def test_a_graph_after_a_cut_in_the_middle(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    for _ in range(2):
        y = x.sinh()  # [before_item]
        if y.sum().item() > 0:
            y = y.cosh()  # [after_item]
        lazytpu.mark_step()
    assert kinds() == ["first", "start"]
    assert (
        last()
        == """\
2  1 ops, # s: diverges from graph 1 at a graph that begins with aten.cosh, after a cut in the middle of a step
   at   [after_item]
   was  [before_item]"""
    )


def test_a_size_that_depends_on_values(device: torch.device) -> None:
    for i in range(3):
        y = torch.arange(5.0).to(device)
        z = y[y > i].sum()  # [masked]
        lazytpu.mark_step()
    assert last().endswith("fix  its size depends on values: keep all elements and choose with torch.where, or pad it")
    del z


def test_a_parameter_without_a_gradient(device: torch.device) -> None:
    ws = [torch.ones(3).to(device).requires_grad_() for _ in range(2)]
    optimizer = torch.optim.SGD(ws, lr=0.1, foreach=True)
    for i in range(3):
        for w in ws:
            w.grad = torch.ones(3).to(device) if i < 2 or w is ws[0] else None
        optimizer.step()  # [optimizer]
        lazytpu.mark_step()
    text = last()
    assert "[optimizer]" in text
    assert "makes its state" not in text
