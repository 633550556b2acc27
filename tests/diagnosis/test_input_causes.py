"""An input of another shape, dtype or memory layout is named, with the line that moved it to the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lazytpu
from tests.support.explanations import Explanations, kinds

explained = Explanations(__file__)


def total(x: torch.Tensor) -> torch.Tensor:
    result = x.sinh().sum()  # [use]
    lazytpu.mark_step()
    return result


def run_each(make: Callable[[int], torch.Tensor], device: torch.device, times: int = 2) -> str:
    for i in range(times):
        x = make(i).to(device)  # [moved]
        total(x)
    return explained.last()


def test_shape_of_a_batch(device: torch.device) -> None:
    for (x,) in DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=4):
        total(x.to(device))  # [batch]
    assert (
        explained.last()
        == """\
2  2 ops, # s: diverges from graph 1 at op 1 (aten.sinh), argument 'self': input %p0 was f32[4,4] and is f32[2,4]: \
dimension 0 changed
   at   [use]
   with `x`, moved to the device at [batch]; 2 types seen here: f32[4,4], f32[2,4]
   fix  keep the shapes of batches the same: drop_last=True, or pad the last batch"""
    )


def test_another_dimension_of_three_types(device: torch.device) -> None:
    assert (
        run_each(lambda i: torch.ones(2, 3 + i), device, times=3)
        == """\
3  2 ops, # s: diverges from graph 2 at op 1 (aten.sinh), argument 'self': input %p0 was f32[2,4] and is f32[2,5]: \
dimension 1 changed
   at   [use]
   with `x`, moved to the device at [moved]; 3 types seen here: f32[2,3], f32[2,4], f32[2,5]
   fix  pad it to one of a few sizes, and mask the padding"""
    )


def test_several_dimensions_and_another_rank(device: torch.device) -> None:
    assert ": dimensions 0, 2 changed\n" in run_each(lambda i: torch.ones(2 + i, 3, 4 + i), device)
    assert ": rank changed\n" in run_each(lambda i: torch.ones([7] * (1 + i)), device)


def test_dtype(device: torch.device) -> None:
    text = run_each(lambda i: torch.ones(2, dtype=(torch.float32, torch.float64)[i]), device)
    assert "input %p0 was f32[2] and is f64[2]: dtype changed\n" in text
    assert text.endswith("fix  convert it to one dtype before the step")


def test_memory_layout(device: torch.device) -> None:
    text = run_each(lambda i: torch.ones(2, 3) if i == 0 else torch.ones(3, 2).t(), device)
    assert (
        "input %p0 was f32[2,3] and is f32[2,3]{1,2}: memory layout changed, strides were [3, 1] and are [1, 2]" in text
    )
    assert text.endswith("fix  give it one memory layout before the step, with contiguous()")


def test_memory_layout_of_a_view(device: torch.device) -> None:
    layer = nn.Linear(3, 3).to(device)
    for i in range(2):
        x = torch.ones(3, 3).to(device)
        x = x.t() if i else x
        lazytpu.mark_step()
        total(layer(x))  # [layer]
    assert kinds() in (["first", "operand"], ["first", "branch"])
    assert "   at   [layer]  Linear\n" in explained.last()
    assert "memory layout" in explained.last()


def test_parameter_buffer_and_optimizer_state(device: torch.device) -> None:
    net = nn.Linear(4, 3, bias=False).to(device)
    for n in (3, 5):
        net.weight = nn.Parameter(torch.ones(n, 4).to(device))
        total(net.weight)
    assert explained.last().splitlines()[2:] == [
        "   with parameter `net.weight`; 2 types seen here: f32[3,4], f32[5,4]",
        "   fix  none needed if it was replaced on purpose; else assign to it in place (copy_)",
    ]
    for n in (3, 5):
        norm = nn.BatchNorm1d(n).to(device)
        assert norm.running_mean is not None
        total(norm.running_mean)
    assert "   with buffer `norm.running_mean`; 4 types" in explained.last()
    for n in (6, 7):
        weight = nn.Parameter(torch.ones(n).to(device))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        weight.grad = torch.ones(n).to(device)
        optimizer.step()
        lazytpu.mark_step()
        total(optimizer.state[weight]["momentum_buffer"])
    assert "   with state `momentum_buffer` of parameter 0 in `optimizer` (SGD); 6 types" in explained.last()


class Trainer:
    def __init__(self, device: torch.device) -> None:
        self.net, self.batch = nn.Linear(4, 3, bias=False).to(device), {"x": torch.ones(3, 4).to(device)}


def test_names_inside_objects(device: torch.device) -> None:
    for n in (3, 5):
        trainer = Trainer(device)
        trainer.net.weight = nn.Parameter(torch.ones(n, 4).to(device))
        total(trainer.net.weight)
    assert "   with parameter `trainer.net.weight`;" in explained.last()
    for n in (6, 7):
        batches = {"x": torch.ones(n, 4).to(device)}  # [in_dict]
        total(batches["x"])
    assert "   with `batches['x']`, moved to the device at [in_dict];" in explained.last() or "   with `x`" in (
        explained.last()
    )


def test_a_size_that_depends_on_values(device: torch.device) -> None:
    for i in range(3):
        y = torch.arange(5.0).to(device)
        z = y[y > i].sum()
        lazytpu.mark_step()
    assert explained.last().endswith(
        "fix  its size depends on values: keep all elements and choose with torch.where, or pad it"
    )
    del z


def test_one_module_called_from_two_lines(device: torch.device) -> None:
    net = nn.Linear(4, 3).to(device)
    y = net(torch.ones(5, 4).to(device))  # [validated]
    lazytpu.mark_step()
    z = net(torch.ones(4, 4).to(device))  # [other_size]
    lazytpu.mark_step()
    assert kinds() == ["first", "input"]
    assert "was f32[5,4] and is f32[4,4]: dimension 0 changed" in explained.last()
    assert "   at   [other_size]  Linear\n   was  [validated]  Linear\n" in explained.last()
    del y, z


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
