"""Types for other sizes than those that torch was asked about are those that it gives, and so are the errors."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from lazytpu.ir.op_schema import aten, op_of
from lazytpu.tensors.layout import root_layout
from lazytpu.tracing import infer, size_patterns

Make = Callable[[int, torch.device], object]


def new(*size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype).to(device)


def _classes(n: int, device: torch.device) -> torch.Tensor:
    return new(n, device=device, dtype=torch.int64)


def _conv(n: int, d: torch.device) -> object:
    return F.conv2d(new(n, 3, 12, 12, device=d), new(4, 3, 3, 3, device=d), new(4, device=d))


def _gradients(n: int, d: torch.device) -> object:
    x = new(n, 3, 12, 12, device=d).requires_grad_()
    weight = new(4, 3, 3, 3, device=d).requires_grad_()
    pooled = F.max_pool2d(torch.relu(F.conv2d(x, weight)), 2)
    F.cross_entropy(pooled.amax((2, 3)), _classes(n, d)).backward()
    return x.grad, weight.grad


def _attention(n: int, d: torch.device) -> object:
    return F.scaled_dot_product_attention(
        new(1, 2, 3, 16, device=d), new(1, 2, n, 16, device=d), new(1, 2, n, 16, device=d)
    )


CALLS: dict[str, Make] = {
    "equal": lambda n, d: new(n, 5, device=d) + new(n, 5, device=d),
    "broadcast": lambda n, d: new(n, 1, device=d) * new(1, n, device=d),
    "promoted": lambda n, d: new(n, 5, device=d, dtype=torch.int64) + new(5, device=d, dtype=torch.float16),
    "comparison": lambda n, d: new(n, 5, device=d) > 1,
    "columns": lambda n, d: new(1, n, device=d)[:, -1:] + new(1, 2 * n, device=d)[:, :1],
    "softmax": lambda n, d: F.log_softmax(new(n, 5, device=d), 1),
    "sum": lambda n, d: new(n, 5, 3, device=d).sum((0, 2), keepdim=True),
    "sorted": lambda n, d: new(n, 6, device=d).sort(),
    "largest": lambda n, d: new(n, 6, device=d).topk(3),
    "norm": lambda n, d: F.layer_norm(new(n, 6, device=d), (6,), new(6, device=d)),
    "linear": lambda n, d: F.linear(new(n, 6, device=d), new(4, 6, device=d), new(4, device=d)),
    "loss": lambda n, d: F.cross_entropy(new(n, 6, device=d), _classes(n, d)),
    "embedded": lambda n, d: F.embedding(_classes(n, d), new(20, 4, device=d)),
    "gathered": lambda n, d: new(n, 6, device=d).gather(1, new(n, 2, device=d, dtype=torch.int64)),
    "joined": lambda n, d: torch.cat([new(2, n, 3, device=d), new(2, 1, 3, device=d)], 1),
    "product": lambda n, d: new(6, n, device=d).t() @ new(6, 4, device=d),
    "convolution": _conv,
    "gradients": _gradients,
    "attention": _attention,
}


def geometry(x: object) -> object:
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.stride(), x.dtype
    return [geometry(e) for e in x]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CALLS)
def test_types_are_those_of_the_cpu(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    call, cpu = CALLS[name], torch.device("cpu")
    for n in (7, 9):
        assert geometry(call(n, device)) == geometry(call(n, cpu))
    rules = set(infer._RULES)

    def asked(op: object, named: object) -> None:
        raise AssertionError(f"torch was asked about {op}")

    whole = infer._infer_new
    monkeypatch.setattr(infer, "_infer_new", lambda op, named: (whole if op.overload in rules else asked)(op, named))
    assert geometry(call(8, device)) == geometry(call(8, cpu))


REFUSED: dict[str, Make] = {
    "equal": lambda n, d: new(n, 5, device=d) + new(9, 5, device=d),
    "linear": lambda n, d: F.linear(new(3, n, device=d), new(4, 9, device=d)),
    "loss": lambda n, d: F.cross_entropy(new(n, 6, device=d), _classes(9, d)),
    "gathered": lambda n, d: new(n, 6, device=d).gather(1, new(9, 2, device=d, dtype=torch.int64)),
    "largest": lambda n, d: new(n, device=d).topk(9),
    "norm": lambda n, d: F.layer_norm(new(3, n, device=d), (9,)),
    "joined": lambda n, d: torch.cat([new(2, n, device=d), new(1, 9, device=d)]),
    "product": lambda n, d: new(6, n, device=d) @ new(9, 4, device=d),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_those_of_the_cpu(name: str, device: torch.device) -> None:
    call = REFUSED[name]
    call(9, device)
    for n in (7, 8):
        with pytest.raises((RuntimeError, IndexError, ValueError)) as expected:
            call(n, torch.device("cpu"))
        with pytest.raises(type(expected.value)) as error:
            call(n, device)
        assert str(error.value) == str(expected.value)


def test_a_size_of_the_result_that_is_computed_is_not_taken_for_that_of_the_batch(device: torch.device) -> None:
    for n in (10, 7, 4):  # the first batch is as large as a row of the result
        assert _conv(n, device).shape == (n, 4, 10, 10)  # type: ignore[attr-defined]


def test_numbers_among_the_arguments_are_not_sizes() -> None:
    op, keys = op_of(aten.topk.default), []
    for n in (2, 5, 6):
        pattern = size_patterns.pattern_of(op, (root_layout((3, n), (n, 1), torch.float32), 2, True, False))
        assert pattern is not None
        keys.append(pattern.key)
    assert keys[0] != keys[1] == keys[2]
