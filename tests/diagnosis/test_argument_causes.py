"""An attribute, a Python number or an operand that is another than before is the cause."""

from __future__ import annotations

import torch

import lazytpu
from tests.support.explanations import Explanations, kinds

explained = Explanations(__file__)


def total(x: torch.Tensor) -> torch.Tensor:
    result = x.sum()
    lazytpu.mark_step()
    return result


def test_attribute(device: torch.device) -> None:
    x = torch.ones(2, 6).to(device)
    for shape in ((3, 4), (4, 3), (6, 2)):
        total(x.view(shape).cosh())  # [viewed]
    assert (
        explained.last()
        == """\
3  3 ops, # s: diverges from graph 2 at op 1 (aten.view), argument 'size': was [4, 3] and is [6, 2], \
which is part of the program
   at   [viewed]
   with 3 values seen here: [3, 4], [4, 3], [6, 2]
   fix  keep it constant, or expect one graph per value: it decides shapes or selects the formula"""
    )


def test_number_that_is_part_of_the_program(device: torch.device) -> None:
    for n in (3, 4):
        total(torch.arange(n, device=device))
    assert "argument 'end': was 3 and is 4, which is part of the program\n" in explained.last()


def test_number_that_becomes_a_scalar_input(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    for n in (1.5, 2.5, 3.5):
        total(x.pow(n))  # [pow]
    assert kinds() == ["first", "dynamic"]
    assert (
        explained.last()
        == """\
2  2 ops, # s: diverges from graph 1 at op 1 (aten.pow.Tensor_Scalar), argument 'exponent': the constant 1.5 changed \
and is a scalar input from now on (float)
   at   [pow]
   fix  none needed, other values reuse this graph"""
    )
    assert explained.section("scalars made dynamic because they changed").splitlines()[0] == (
        "  aten.pow.Tensor_Scalar exponent at [pow]"
    )


def test_type_of_a_number(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    for n in (1, 2.0):
        total(x * n)  # [times]
    assert (
        explained.last()
        == """\
2  2 ops, # s: diverges from graph 1 at op 1 (aten.mul.Tensor), argument 'other': was a Python int and is a Python float
   at   [times]
   fix  use the same type in every step: 1.0, not 1"""
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
        explained.last()
        == """\
2  3 ops, # s: diverges from graph 1 at op 3 (aten.div.Tensor), argument 'self': was the result of op 1 (aten.sinh), \
f32[3] ([a]) and is the result of op 2 (aten.cosh), f32[3] ([b])
   at   [divide]
   with `b`
   fix  pass the same tensors, with the same memory layout, in every step"""
    )
    del quotient


def test_operand_left_out(device: torch.device) -> None:
    weight, bias = torch.ones(3, 4).to(device), torch.ones(3).to(device)
    with torch.no_grad():
        for given in (bias, None):
            total(torch.nn.functional.linear(torch.ones(2, 4).to(device), weight, given))
    assert kinds() == ["first", "operand"]
    assert "argument 'bias': was input %p2, f32[3] and is not given\n" in explained.last()


def test_a_list_of_more_tensors(device: torch.device) -> None:
    for n in (2, 3):
        y = torch.cat([torch.ones(2).to(device) for _ in range(n)])  # [cat]
        lazytpu.mark_step()
        del y
    assert (
        explained.last()
        == """\
2  1 ops, # s: diverges from graph 1 at op 1 (aten.cat), argument 'tensors': was a list of 2 tensors and is one of 3
   at   [cat]
   fix  pass as many tensors in every step, or one tensor that holds them all, padded"""
    )
