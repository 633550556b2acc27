"""Recurrent layers are one op with one gradient op, and compute what the CPU computes, in every tier."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

import lazytpu
from lazytpu.diagnosis import events
from lazytpu.export.to_jax import convert
from lazytpu.runtime.disk_cache.provenance import is_portable
from tests.support.both_devices import check, close, given

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # on the CPU

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "projected": lambda *a, **k: nn.LSTM(*a, proj_size=2, **k),
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}
DEEP = {"num_layers": 2, "bidirectional": True, "batch_first": True}
LENGTHS = {"plain": None, "deep": None, "packed": [2, 4, 3], "sorted": [4, 4, 1]}
CASES = {
    "plain": {},
    "deep": DEEP | {"bias": False},
    "packed": DEEP,
    "sorted": {"num_layers": 2},
}


def outcome(device: str, kind: str, case: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return output, states and every gradient of a module; with a first state where it is deep."""
    torch.manual_seed(0)
    model = KINDS[kind](3, 4, dtype=dtype, **CASES[case]).to(device)
    x = torch.randn(3, 4, 3, dtype=dtype) if model.batch_first else torch.randn(4, 3, 3, dtype=dtype)
    x = x.to(device).requires_grad_()
    units = model.num_layers * (2 if model.bidirectional else 1)
    widths = model.proj_size or 4, 4
    first = [torch.randn(units, 3, w, dtype=dtype).to(device).requires_grad_() for w in widths]
    hx = None if case == "plain" else tuple(first) if kind in ("lstm", "projected") else first[0]
    lengths = LENGTHS[case]
    given_x: Any = x
    if lengths:
        given_x = pack_padded_sequence(x, torch.tensor(lengths), model.batch_first, enforce_sorted=case == "sorted")
    output, last = model(given_x, hx)
    if lengths:
        output, _ = pad_packed_sequence(output, batch_first=model.batch_first)
    results = [output, *tree_leaves(last)]
    loss = sum((t * torch.arange(1.0, t.numel() + 1, dtype=dtype, device=device).view(t.shape)).sum() for t in results)
    loss.backward()
    inputs = [x, *model.parameters(), *([] if hx is None else tree_leaves(hx))]
    return [*results, *[t.grad for t in inputs]], [t.stride() for t in results]


@pytest.fixture
def interpreted() -> Iterator[None]:
    lazytpu.mark_step()
    lazytpu.config.compile_after = 1 << 30
    lazytpu.metrics.reset()
    yield
    lazytpu.config.compile_after = 1


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_interpreted_as_the_cpu(kind: str, case: str, interpreted: None) -> None:
    (expected, strides), (got, ours) = outcome("cpu", kind, case), outcome("tpu", kind, case)
    close(expected, got, rtol=1e-4, atol=1e-5)
    assert ours == strides
    assert lazytpu.metrics.counter("compile_op") == 0, "an op was compiled by itself"


@pytest.mark.parametrize("case", [*CASES, "packed projected"])
def test_compiled_as_the_cpu(case: str) -> None:
    case, *kinds = case.split()
    kinds = kinds or [*KINDS]
    expected = [outcome("cpu", kind, case)[0] for kind in kinds]
    got = [outcome("tpu", kind, case)[0] for kind in kinds]  # one program
    lazytpu.metrics.reset()
    close(expected, got, rtol=1e-4, atol=1e-5)
    assert lazytpu.metrics.counter("compile") == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types(dtype: torch.dtype, interpreted: None) -> None:
    for kind in KINDS:
        exact = outcome("cpu", kind, "packed", torch.float64)[0]
        got = outcome("tpu", kind, "packed", dtype)[0]
        assert all(t.dtype == dtype for t in got)
        if dtype == torch.float64:
            close(exact, got)


def test_half_precision_is_rounded_once() -> None:
    """The state stays in float32 through the loop."""
    torch.manual_seed(0)
    module = nn.GRU(3, 8, dtype=torch.bfloat16)
    x = torch.randn(40, 2, 3, dtype=torch.bfloat16)
    exact = nn.GRU(3, 8, dtype=torch.float64)
    exact.load_state_dict(module.state_dict())
    with torch.no_grad():
        expected = exact(x.double())[0].to(torch.bfloat16)
        got = module.to("tpu")(x.to("tpu"))[0].cpu()
    torch.testing.assert_close(got, expected, rtol=2**-8, atol=2**-12)


def recorded(length: int, train: bool = True, **options: Any) -> list[str]:
    """Return the ops of our own, and how many others there are, of a step on sequences of a length."""
    torch.manual_seed(0)
    model = nn.LSTM(3, 4, num_layers=2, **options).train(train).to("tpu")
    x = given("tpu", (length, 2, 3))
    lazytpu.mark_step()
    loss = model(x)[0].sum()
    loss.backward()
    text = lazytpu.ir_text(*[p.grad for p in model.parameters()])
    ops = re.findall(r"= (\w+\.\w+)", text)
    return [op for op in ops if not op.startswith("aten")] + [str(len(ops))]


def test_one_op_and_one_gradient_op_whatever_the_length() -> None:
    short = recorded(3)
    assert short[:2] == ["lazytpu.lstm", "lazytpu.lstm_backward"]
    assert len(short) == 3 and recorded(300) == short
    assert recorded(3, dropout=0.5)[:4] == ["lazytpu.lstm"] * 2 + ["lazytpu.lstm_backward"] * 2
    assert recorded(3, train=False, dropout=0.5) == short


def test_the_program_is_as_long_for_long_sequences() -> None:
    sizes = []
    for length in (7, 300):
        with torch.no_grad():
            hlo = lazytpu.stablehlo_text(nn.GRU(3, 4).to("tpu")(torch.ones(length, 2, 3, device="tpu"))[0])
        sizes.append(len(hlo.splitlines()))
        assert hlo.count("stablehlo.while") == 1
        body = hlo[hlo.index("stablehlo.while") :]
        assert "stablehlo.dot_general" in hlo[: hlo.index("stablehlo.while")] and "dot_general" in body
    assert sizes[0] == sizes[1]


def test_lines_of_both_ops() -> None:
    model, x = nn.GRU(3, 4).to("tpu"), given("tpu", (3, 2, 3))
    loss = model(x)[0].sum()
    lines = [line for line in lazytpu.ir_text(loss).splitlines() if "lazytpu.gru" in line]
    loss.backward()
    lines += [line for line in lazytpu.ir_text(x.grad).splitlines() if "lazytpu.gru_backward" in line]
    places = [line.rpartition("# ")[2] for line in lines]
    assert places[1] == f"{places[0]} (backward)" and places[0].endswith("GRU")


def test_equal_totals_share_a_program() -> None:
    model = nn.RNN(3, 4).to("tpu")

    def run(lengths: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(pack_padded_sequence(torch.ones(3, 3, 3).to("tpu"), torch.tensor(lengths)))[1].cpu()

    run([3, 3, 1])
    lazytpu.metrics.reset()
    twos, one = run([3, 2, 2])[0, 1:], run([3, 3, 1])[0, 2]
    assert torch.equal(twos[0], twos[1]) and not torch.equal(twos[0], one)
    assert lazytpu.metrics.counter("compile") == 0


def test_programs_may_be_kept_on_disk() -> None:
    with torch.no_grad():
        nn.RNN(3, 4).to("tpu")(torch.ones(2, 1, 3).to("tpu"))[0].cpu()
    assert is_portable(events.compilations[-1].executable.graph)


def test_gradients_of_gradients(interpreted: None) -> None:
    def program(device: str) -> Any:
        torch.manual_seed(0)
        model = nn.LSTM(3, 4, bidirectional=True).to(device)
        x, h, c = given(device, (3, 2, 3), (2, 2, 4), (2, 2, 4))
        h = h + x.sum()  # what one argument owes to another is not counted twice
        inputs = [x, c, *model.parameters()]
        grads = torch.autograd.grad(model(x, (h, c))[0].square().sum(), inputs, create_graph=True)
        return grads, torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)

    close(program("cpu"), program("tpu"), rtol=1e-4, atol=1e-5)


def test_only_what_requires_one_has_a_gradient(interpreted: None) -> None:
    def program(device: str) -> Any:
        torch.manual_seed(0)
        model = nn.GRU(3, 4, num_layers=2).to(device)
        model.weight_hh_l0.requires_grad_(False)
        x = given(device, (3, 2, 3), requires_grad=False)
        _, last = model(x)
        last[1].sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    check(program)


def test_gradients_go_through_nan_of_relu(interpreted: None) -> None:
    def program(device: str) -> Any:
        torch.manual_seed(0)
        model = nn.RNN(3, 4, nonlinearity="relu").to(device)
        x = torch.tensor([[[float("nan"), 1, 2]], [[1, 2, 3]]], device=device).requires_grad_()
        model(x)[0].sum().backward()
        return [x.grad, *[p.grad for p in model.parameters()]]

    check(program, equal_nan=True)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_writing_to_the_output_before_the_gradient(kind: str, interpreted: None) -> None:
    def program(device: str) -> Any:
        x = given(device, (3, 2, 3))
        output = KINDS[kind](3, 4).to(device)(x)[0]
        output.mul_(2)
        output.sum().backward()
        return x.grad is not None

    if kind == "gru":
        assert program("cpu") and program("tpu")
        return
    for device in ("cpu", "tpu"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            program(device)


WRONG = {
    "features": lambda m, d: m(torch.ones(3, 2, 5, device=d)),
    "dtype": lambda m, d: m(torch.ones(3, 2, 3, device=d, dtype=torch.float64)),
    "no steps": lambda m, d: m(torch.ones(0, 2, 3, device=d)),
    "state": lambda m, d: m(torch.ones(3, 2, 3, device=d), torch.ones(1, 2, 7, device=d)),
    "parameters": lambda m, d: torch.gru(
        torch.ones(3, 2, 5, device=d), torch.ones(1, 2, 4, device=d), m._flat_weights, True, 1, 0.0, False, False, False
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    errors = []
    for device in ("cpu", "tpu"):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            WRONG[name](nn.GRU(3, 4).to(device), device)
        errors.append((type(raised.value), re.sub(r"\(\d+x", "(", str(raised.value))))
    assert errors[0] == errors[1]


def test_a_batch_of_none_and_no_batch(interpreted: None) -> None:
    def program(device: str) -> Any:
        torch.manual_seed(0)
        model = nn.LSTM(3, 4).to(device)
        none, alone = given(device, (3, 0, 3), (3, 3), requires_grad=False)
        return model(none), model(alone)

    check(program)


def test_autocast_computes_in_half_precision(interpreted: None) -> None:
    model, x = nn.LSTM(3, 4).to("tpu"), given("tpu", (3, 2, 3))
    with torch.autocast("tpu", torch.bfloat16):
        output, (h, _) = model(x)
    output.sum().backward()
    assert output.dtype == h.dtype == torch.bfloat16 and x.grad.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_verified_beside_the_cpu() -> None:
    lazytpu.metrics.reset()
    lazytpu.config.verify = "first"
    try:
        results = outcome("tpu", "gru", "plain")
        lazytpu.wait()
    finally:
        lazytpu.config.verify = ""
    assert results and lazytpu.metrics.counter("verified_program") == 1


def test_whole_functions(fresh_dynamo: None) -> None:
    torch.manual_seed(0)
    model, x = nn.GRU(3, 4, batch_first=True), torch.randn(2, 3, 3)
    expected = model(x)[0]
    wanted = torch.autograd.grad(expected.sum(), list(model.parameters()))
    model = model.to("tpu")
    output = lazytpu.jit(lambda t: model(t)[0])(x.to("tpu"))
    found = torch.autograd.grad(output.sum(), list(model.parameters()))
    close((expected, wanted), (output, found))
    assert lazytpu.metrics.counter("compile") == 3  # forward and backward, and the sum


def test_torch_func_composes_the_steps(interpreted: None) -> None:
    def program(device: str) -> Any:
        torch.manual_seed(0)
        model, x = nn.LSTM(3, 4).to(device), given(device, (3, 2, 3), requires_grad=False)

        def loss(params: Any) -> torch.Tensor:
            return torch.func.functional_call(model, params, (x,))[0].sum()

        return torch.func.grad(loss)(dict(model.named_parameters()))

    check(program)


@pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights")  # torch.export
def test_modules_of_the_cpu_are_traced_as_one_op(fresh_dynamo: None) -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(3, 4, num_layers=2).eval(), torch.randn(5, 2, 3)
    with torch.no_grad():
        expected = model(x)[0]
    torch.testing.assert_close(lazytpu.jit(lambda t: model(t)[0])(x).cpu().detach(), expected)
    function, params = lazytpu.as_jax_function(model)
    lowered = jax.jit(lambda p, t: function(p, t)[0]).lower(params, x.numpy())
    assert lowered.as_text().count("stablehlo.while") == 2  # one for each layer
    exported = convert(torch.export.export(model, (x,)), inline=False, platforms=["cpu"])
    assert exported.exported.mlir_module().count("stablehlo.while") == 2 and not exported.signature.random
