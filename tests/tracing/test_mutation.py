"""Ops that move a tensor to another place in memory and writes to overlapping memory, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazytpu
from tests.support.lockstep import Case, check, numbers, outcome

Tensors = list[torch.Tensor]


MOVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "t_": lambda x: x[0].t_(),
    "t_in_place": lambda x: x.squeeze_(0).t_(),
    "t_of_three": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(1, 2),
    "transpose_negative": lambda x: x.transpose_(-1, 0),
    "transpose_outside": lambda x: x.transpose_(0, 3),
    "swapaxes_": lambda x: x.swapaxes_(1, 2),
    "swapdims_": lambda x: x.swapdims_(1, 2),
    "squeeze_": lambda x: x.squeeze_(),
    "squeeze_dim": lambda x: x.squeeze_(0),
    "squeeze_dim_kept": lambda x: x.squeeze_(1),
    "squeeze_dims": lambda x: x.squeeze_((0, 1)),
    "unsqueeze_": lambda x: x.unsqueeze_(2),
    "unsqueeze_negative": lambda x: x.unsqueeze_(-1),
    "unsqueeze_outside": lambda x: x.unsqueeze_(5),
    "as_strided_": lambda x: x.as_strided_((2, 2), (4, 1), 1),
    "as_strided_outside": lambda x: x.as_strided_((9, 9), (9, 1)),
    "several": lambda x: x.transpose_(1, 2).squeeze_(0).unsqueeze_(1).transpose_(0, 2),
    "resize_smaller": lambda x: x.resize_(2, 2),
    "resize_same": lambda x: x.resize_(1, 3, 4),
    "resize_other_shape": lambda x: x.resize_(6, 2),
    "resize_empty": lambda x: x.resize_(0),
    "resize_channels_last": lambda x: x.resize_((1, 2, 2, 3), memory_format=torch.channels_last),
    "resize_as_": lambda x: x.resize_as_(torch.empty(2, 5, device=x.device)),
    "set_nothing": lambda x: x.set_(),
    "set_tensor": lambda x: x.set_(numbers(4, 5, device=x.device)[1:].t()),
    "set_itself": lambda x: x.set_(x),
    "set_view_of_itself": lambda x: x.set_(x[0, 1:].t()),
    "set_other_dtype": lambda x: x.set_(numbers(3, device=x.device, dtype=torch.int64)),
    "set_storage": lambda x: x.set_(numbers(2, 3, device=x.device).untyped_storage()),
    "set_storage_strided": lambda x: x.set_(x.untyped_storage(), 2, (3, 2), (2, 1)),
    "set_storage_sizes": lambda x: x.set_(x.untyped_storage(), 1, (2, 5)),
    "data": lambda x: setattr(x, "data", numbers(5, device=x.device)),
    "data_of_view": lambda x: setattr(x, "data", numbers(5, 2, device=x.device).t()[1]),
    "data_dtype": lambda x: setattr(x, "data", numbers(5, device=x.device, dtype=torch.int64)),
    "data_moves": lambda x: x.data.t_() if x.dim() == 2 else x.data.transpose_(1, 2),
}


@pytest.mark.parametrize("name", MOVES)
def test_place_in_memory_changes(name: str, device: torch.device) -> None:
    def case(on: Any) -> Any:
        x = numbers(1, 3, 4, device=on)
        view, detached = x[:, 1:], x.detach()
        _, error = outcome(lambda: MOVES[name](x))
        after = x[:1] if x.dim() and len(x) else x
        if x.numel():
            after.add_(10)
            view.mul_(2)
        return [x, view, detached, after, x + 1], error

    check(case, device)


def test_moves_follow_the_parameter(device: torch.device) -> None:
    def case(on: Any) -> Any:
        layer = torch.nn.Linear(3, 2, bias=False, device=on)
        layer.weight.data = numbers(2, 3, device=on)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        layer(torch.ones(1, 3, device=on)).sum().backward()
        layer.weight.data.mul_(2)
        optimizer.step()
        return [layer.weight, layer.weight.grad]

    check(case, device)


def grown(on: Any, resize: Callable[[torch.Tensor], Any]) -> Tensors:
    """What a tensor and its aliases hold after it has outgrown its storage; the new part is filled."""
    x = numbers(2, 3, device=on)
    view, flat, bits = x[1], x.view(-1), x.view(torch.int32)
    resize(x)
    x.view(-1)[6:].fill_(7) if x.is_contiguous() else x.fill_(7)
    view.add_(1)
    return [x, view, flat, bits, x.view_as(x)]


GROWTH: dict[str, Callable[[torch.Tensor], Any]] = {
    "resize_": lambda x: x.resize_(3, 4),
    "resize_twice": lambda x: x.resize_(3, 3).resize_(5, 2),
    "resize_channels_last": lambda x: x.resize_((2, 2, 2, 2), memory_format=torch.channels_last),
    "resize_after_a_cut": lambda x: (lazytpu.mark_step(), x.resize_(3, 4)),
    "resize_after_a_write": lambda x: x.add_(1).resize_(3, 4),
    "resize_view_dtype": lambda x: (x.view(torch.int16).resize_(40), x.resize_(4, 5)),
    "set_storage": lambda x: x.set_(x.untyped_storage(), 0, (4, 4)),
}


@pytest.mark.parametrize("name", GROWTH)
def test_storage_grows(name: str, device: torch.device) -> None:
    check(lambda on: grown(on, GROWTH[name]), device)


def test_storage_of_odd_length_under_a_wider_dtype(device: torch.device) -> None:
    def case(on: Any) -> Any:
        wide = torch.empty(0, dtype=torch.int32, device=on)
        narrow = wide.view(torch.uint8).resize_(6)
        narrow.copy_(torch.arange(6))
        wide.set_(wide.untyped_storage(), 0, (1,))
        wide.add_(1)
        return [wide, narrow]

    check(case, device)


def test_empty_tensor_grows_into_what_is_asked(device: torch.device) -> None:
    x = torch.empty(0, device=device)
    alias = x.detach()
    x.resize_(2, 3).copy_(numbers(2, 3, device=device))
    alias.resize_(6)
    assert alias.tolist() == [0, 1, 2, 3, 4, 5]
    assert x.untyped_storage().nbytes() == 24


ALIASING: dict[str, Case] = {}


def aliasing(case: Case) -> Case:
    ALIASING[case.__name__] = case
    return case


@aliasing
def tensor_and_its_transpose(on: Any) -> Any:
    x = numbers(3, 3, device=on)
    return x.add_(x.t())


@aliasing
def shifted_copy(on: Any) -> Any:
    x = numbers(9, device=on)
    return x[1:].copy_(x[:-1])


@aliasing
def disjoint_halves(on: Any) -> Any:
    x = numbers(8, device=on)
    x[4:].copy_(x[:4])
    x[:4].mul_(x[4:])
    return x


@aliasing
def interleaved(on: Any) -> Any:
    x = numbers(3, 4, device=on)
    x[:, 0].add_(x[:, 1])
    x[0].add_(x[1])
    return x


@aliasing
def the_same_view_twice(on: Any) -> Any:
    x = numbers(3, 4, device=on)
    x[1:].mul_(x[1:])
    return x


@aliasing
def scattered_into_itself(on: Any) -> Any:
    x = numbers(3, 3, device=on)
    return x.scatter_(0, torch.zeros(3, 3, dtype=torch.int64, device=on), x)


@aliasing
def index_copied_into_itself(on: Any) -> Any:
    x = numbers(9, device=on)
    return x.index_copy_(0, torch.tensor([0], device=on), x[:1])


@aliasing
def masked_by_itself(on: Any) -> Any:
    x = torch.tensor([True, False, True], device=on)
    return x.masked_fill_(x, False)


@aliasing
def filled_with_its_own_element(on: Any) -> Any:
    x = numbers(3, 3, device=on)
    return x.fill_(x[1, 1])


@aliasing
def expanded(on: Any) -> Any:
    return numbers(3, device=on).expand(2, 3).add_(1)


@aliasing
def expanded_and_filled(on: Any) -> Any:
    x = numbers(3, device=on)
    x.expand(2, 3).fill_(4)
    return x


@aliasing
def out_is_the_input_shifted(on: Any) -> Any:
    x = numbers(9, device=on)
    return torch.add(x[1:], 1, out=x[:-1])


@aliasing
def out_is_another_half(on: Any) -> Any:
    x = numbers(8, device=on)
    torch.add(x[4:], 1, out=x[:4])
    return x


@aliasing
def out_is_expanded(on: Any) -> Any:
    return torch.add(numbers(2, 3, device=on), 1, out=torch.zeros(3, device=on).expand(2, 3))


@aliasing
def list_with_one_tensor_twice(on: Any) -> Any:
    x = numbers(3, device=on)
    torch._foreach_add_([x, x], 1)
    return x


@aliasing
def lists_that_cross(on: Any) -> Any:
    a, b = numbers(3, device=on), numbers(3, device=on) + 5
    torch._foreach_add_([a, b], [b, a])
    return [a, b]


@aliasing
def list_of_overlapping_views(on: Any) -> Any:
    x = numbers(4, device=on)
    torch._foreach_mul_([x[:3], x[1:]], 2)
    return x


@aliasing
def list_of_views(on: Any) -> Any:
    x = numbers(4, device=on)
    torch._foreach_mul_([x[:2], x[2:]], [x[1].clone(), x[2].clone()])
    return x


@pytest.mark.parametrize("name", ALIASING)
def test_overlapping_memory(name: str, device: torch.device) -> None:
    check(ALIASING[name], device)
    check(ALIASING[name], device)  # the second time torch is not asked again


def test_pow_in_place_is_not_the_reverse(device: torch.device) -> None:
    check(lambda on: numbers(4, device=on).pow_(2), device)


FORMATS: dict[str, Case] = {
    "to": lambda on: numbers(2, 3, 4, 5, device=on).to(memory_format=torch.channels_last),
    "contiguous": lambda on: numbers(2, 3, 4, 5, device=on).contiguous(memory_format=torch.channels_last),
    "three_dims": lambda on: numbers(1, 2, 3, 4, 2, device=on).to(memory_format=torch.channels_last_3d),
    "empty": lambda on: torch.empty(2, 3, 4, 5, device=on, memory_format=torch.channels_last).fill_(1),
    "empty_like": lambda on: torch.empty_like(
        numbers(2, 3, 4, 5, device=on), memory_format=torch.channels_last
    ).zero_(),
    "zeros_like": lambda on: torch.zeros_like(numbers(2, 3, 4, 5, device=on).to(memory_format=torch.channels_last)),
    "clone": lambda on: numbers(2, 3, 4, 5, device=on).to(memory_format=torch.channels_last).clone(),
    "clone_contiguous": lambda on: (
        numbers(2, 3, 4, 5, device=on)
        .to(memory_format=torch.channels_last)
        .clone(memory_format=torch.contiguous_format)
    ),
    "keeps": lambda on: numbers(2, 3, 4, 5, device=on).to(memory_format=torch.channels_last).add(1).relu(),
    "write": lambda on: numbers(2, 3, 4, 5, device=on).to(memory_format=torch.channels_last).add_(1)[:, 1:].mul_(2),
    "flat": lambda on: (
        numbers(2, 3, 4, 5, device=on).to(memory_format=torch.channels_last).permute(0, 2, 3, 1).view(-1)
    ),
    "no_view": lambda on: numbers(2, 3, 4, 5, device=on).to(memory_format=torch.channels_last).view(-1),
    "copy_": lambda on: torch.empty(2, 3, 4, 5, device=on, memory_format=torch.channels_last).copy_(
        numbers(2, 3, 4, 5, device=on)
    ),
    "empty_strided": lambda on: torch.empty_strided((2, 3), (1, 4), device=on).fill_(2),
    "empty_permuted": lambda on: torch.empty_permuted((2, 3, 4), (1, 2, 0), device=on).fill_(2),
}


@pytest.mark.parametrize("name", FORMATS)
def test_memory_format(name: str, device: torch.device) -> None:
    check(FORMATS[name], device)


def test_views_outlive_their_base(device: torch.device) -> None:
    view = numbers(3, 4, device=device)[1:].t()
    lazytpu.mark_step()
    view.add_(1)
    part = view[2:]
    del view
    assert part.tolist() == [[7, 11], [8, 12]]


def test_views_from_before_and_after_a_cut(device: torch.device) -> None:
    def case(on: Any) -> Any:
        x = numbers(3, 4, device=on)
        before = x.t()
        lazytpu.mark_step()
        after = x[1]
        before.mul_(2)
        lazytpu.mark_step()
        after.sub_(1)
        x.add_(10)
        return [x, before, after]

    check(case, device)


def test_who_shares_what(device: torch.device) -> None:
    x = numbers(3, 4, device=device)
    view, copy = x[1:], x.clone()
    assert view._base is x and view._is_view() and not copy._is_view()
    assert torch._C._is_alias_of(x, view) and not torch._C._is_alias_of(x, copy)
    assert x.untyped_storage()._cdata == view.untyped_storage()._cdata != copy.untyped_storage()._cdata
    assert x.is_set_to(x.view(3, 4)) and not x.is_set_to(view) and not x.is_set_to(copy)


def test_autograd_sees_what_was_written(device: torch.device) -> None:
    def through_a_view(on: Any) -> Any:
        x = numbers(2, 3, device=on).requires_grad_()
        y = x * 2
        y[0].mul_(3)
        y.t()[1].add_(1)
        y.sum().backward()
        return [x.grad, y.detach()]

    def leaf(on: Any) -> Any:
        numbers(3, device=on).requires_grad_().add_(1)

    def one_of_many(on: Any) -> Any:
        numbers(3, 2, device=on).requires_grad_().mul(1).unbind(0)[1].add_(1)

    for case in (through_a_view, leaf, one_of_many):
        check(case, device)


def test_autograd_refuses_what_was_overwritten(device: torch.device) -> None:
    x = numbers(3, device=device).requires_grad_()
    y = x * 2
    z = y**2
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: .* is at version 1; expected version 0"):
        z.sum().backward()


def test_a_write_of_no_elements_changes_nothing(device: torch.device) -> None:
    x = torch.arange(3, device=device)
    torch.add(x[:0].reshape(0, 1).expand(0, 3), 1, out=x.expand(0, 3))
    x.expand(0, 3).add_(1)
    x.view(3, 1)[:, :0].fill_(7)
    x.unfold(0, 2, 1)[:0].zero_()
    x[:0] = 7
    assert x.tolist() == [0, 1, 2]


@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 3, 2)])
def test_a_write_through_memory_after_a_copy_from_a_view(device: torch.device, shape: tuple[int, ...]) -> None:
    results = []
    for where in ("cpu", device):
        x = torch.arange(float(torch.Size(shape).numel()), device=where).reshape(shape)
        y = torch.zeros_like(x)
        windows = y.unfold(1, 1, 1)
        y.copy_(x)  # y holds the value of a view of x's storage
        windows[-1:] -= 5
        windows.mul_(2)
        results.append([t.cpu().tolist() for t in (x, y, windows)])
    assert results[0] == results[1]


def test_a_view_read_in_a_step_whose_base_another_step_filled_alike(device: torch.device) -> None:
    x, base = torch.ones(2, 3).to(device), torch.zeros(3).to(device)
    view = base.expand(2, 3)
    for more in (False, True):
        base.fill_(2.0)  # in both steps the same node, and the base holds the same value
        between = x * 3 if more else x
        total = view + between
        lazytpu.mark_step()
    assert total.tolist() == [[5.0] * 3] * 2
