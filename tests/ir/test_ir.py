"""Golden tests of what the IR and HLO look like."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import nn

import lazytpu
from lazytpu.ir.printer import graph_text
from lazytpu.tracing.reading import pending_graph


@pytest.fixture(autouse=True)
def clean() -> None:
    lazytpu.mark_step()


def test_ir_text_is_what_the_documentation_shows(device: torch.device) -> None:
    x = torch.ones(2, 3).to(device)
    y = (x * 2.5 + torch.ones(3).to(device)).sum(1)
    text = re.sub(r"\btest_ir.py:\d+", "test_ir.py:N", lazytpu.ir_text(y))
    assert text == (
        "graph(%p0: f32[2,3], %p1: f32[3], %s0: f64[]) {  # %s0: a scalar input\n"
        "  %0: f32[2,3] = aten.mul.Tensor(%p0, %s0)                       # test_ir.py:N\n"
        "  %1: f32[2,3] = aten.add.Tensor(%0, %p1)                        # test_ir.py:N\n"
        "  %2: f32[2] = aten.sum.dim_IntList(%1, [1])                     # test_ir.py:N\n"
        "  return %2\n"
        "}"
    )


def test_the_head_names_the_scalar_inputs_and_keys_that_are_there(device: torch.device) -> None:
    x = torch.ones(2, device=device)

    def note(*tensors: torch.Tensor) -> str:
        return lazytpu.ir_text(*tensors).splitlines()[0].partition("  # ")[2]

    lazytpu.mark_step()
    assert note(x + x) == ""
    assert note(x * 3) == "%n0: a scalar input"
    lazytpu.mark_step()
    assert note(x * 2.5 + 3) == "%s0, %n0: scalar inputs"
    lazytpu.mark_step()
    assert note(torch.rand(2, device=device) * 2.5) == "%s0: a scalar input; %n0: a random key"
    lazytpu.mark_step()
    assert note((((x + 1.5) * 2.5).sin() + 3.5).cos() * 4.5) == "%s0, %s1, ..., %s3: scalar inputs"


def test_the_lines_behind_return(device: torch.device) -> None:
    x = torch.ones(2).to(device)
    graph = pending_graph((x * 2.5, x + 1.5))
    full = dataclasses.replace(graph, donated=(0,), checked=True, uniform=(("f", 0, 2),), concatenated=2)
    assert graph_text(full).splitlines()[-6:] == [
        "  return %0, %1",
        "  donate %p0",
        "  check bounds",
        "  equal %s0 to %s1",
        "  concatenate the last 2",
        "}",
    ]


def test_several_results_lists_and_strides(device: torch.device) -> None:
    x = torch.ones(4, 6).to(device)
    values, _ = x.t().max(0)
    text = lazytpu.ir_text(values)
    assert "%0: f32[6,4]{1,6} = aten.t(%p0)" in text
    assert re.search(r"%1\.0: f32\[4\], %1\.1: i64\[4\] = aten\.max\.dim\(%0, 0\)", text)
    assert "return %1.0" in text


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(1, 2, 3)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.c1(x)))


def test_module_paths_reach_the_ir_and_the_hlo(device: torch.device) -> None:
    net = Net().to(device)
    loss = net(torch.ones(1, 1, 4, 4, device=device)).sum()
    loss.backward()
    grad = net.c1.weight.grad
    assert grad is not None
    ir = lazytpu.ir_text(loss, grad)
    assert re.search(r"aten\.convolution\(.*test_ir\.py:\d+  Net\.c1$", ir, re.M)
    assert re.search(r"aten\.linear\(.*Net\.head\.1$", ir, re.M)
    assert re.search(r"aten\.convolution_backward\(.*Net\.c1 \(backward\)$", ir, re.M)
    assert "Net/c1/aten.convolution" in lazytpu.hlo_text(loss)
    assert "Net/c1/aten.convolution" in lazytpu.hlo_text(loss, optimized=True)
    stablehlo = lazytpu.stablehlo_text(loss)
    assert "stablehlo.dot_general" in stablehlo
    assert re.search(r'test_ir\.py":\d+', stablehlo)


def test_looking_changes_nothing(device: torch.device) -> None:
    x = torch.ones(3).to(device) * 2
    executed = lazytpu.metrics.counter("execute")
    lazytpu.ir_text(x), lazytpu.ir_dot(x), lazytpu.stablehlo_text(x), lazytpu.hlo_text(x, optimized=True)
    assert lazytpu.metrics.counter("execute") == executed
    assert x.tolist() == [2.0, 2.0, 2.0]


def test_what_is_not_needed_is_not_in_the_graph(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    _ = x.exp()
    y = x + 1
    assert [n.op.name for n in pending_graph((y,)).nodes] == ["aten.add.Tensor"]


def test_dot_names_every_op(device: torch.device) -> None:
    dot = lazytpu.ir_dot(torch.ones(3).to(device).sin().cos())
    assert dot.startswith("digraph") and "aten.sin" in dot and "aten.cos" in dot and "->" in dot


def test_equal_programs_have_equal_hashes_and_share_an_executable(device: torch.device) -> None:
    def program(offset: float) -> torch.Tensor:
        return (torch.ones(5).to(device) * offset).tanh()

    first, second = program(1.0), None
    key = pending_graph((first,)).key
    lazytpu.mark_step()
    before = lazytpu.metrics.counter("compile")
    second = program(2.0)
    assert pending_graph((second,)).key == key
    lazytpu.mark_step()
    assert lazytpu.metrics.counter("compile") == before


def test_types_print_one_way() -> None:
    from lazytpu.dtypes import type_name

    assert type_name((64, 10), torch.bfloat16) == "bf16[64,10]"
    assert type_name((), torch.int64) == "i64[]"


def test_looking_records_nothing(device: torch.device) -> None:
    from lazytpu.ir.tree import trace

    def step(look: bool) -> None:
        x = torch.ones(4, 6).to(device)
        y = x.t() + 1
        if look:
            lazytpu.ir_text(x, x[1:3], y.t()[0])
            lazytpu.ir_text(torch.empty(3, device=device))
        (y * x[0, 0]).sum()
        lazytpu.mark_step()

    step(False)
    nodes, compiles = trace.nodes, lazytpu.metrics.counter("compile")
    step(True)
    step(False)
    assert (trace.nodes, lazytpu.metrics.counter("compile")) == (nodes, compiles)
