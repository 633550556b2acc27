"""Scripts for ``torch.cuda`` with "cuda" replaced: ``torch.tpu.FloatTensor``, ``torch.tpu.amp``, names of memory."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from lazytpu.torch_backend import tensor_types


def test_a_type_makes_what_the_cpus_type_makes() -> None:
    for kind, data in (("Float", [[1.5, 2], [3, 4]]), ("Long", [1, 2]), ("Double", np.arange(3)), ("Bool", [True])):
        on_cpu, made = getattr(torch, f"{kind}Tensor")(data), getattr(torch.tpu, f"{kind}Tensor")(data)
        assert made.is_tpu and made.dtype == on_cpu.dtype and made.tolist() == on_cpu.tolist()
    assert torch.tpu.FloatTensor(2, 3).shape == torch.tpu.FloatTensor(torch.Size([2, 3])).shape == (2, 3)
    assert torch.tpu.HalfTensor().shape == (0,) and torch.tpu.HalfTensor().dtype is torch.float16


def test_a_type_takes_a_tensor_of_its_own_as_an_alias(device: torch.device) -> None:
    given = torch.ones(2, device=device)
    torch.tpu.FloatTensor(given).zero_()
    assert given.tolist() == [0, 0]
    for other in (torch.ones(2), given.int()):
        with pytest.raises(TypeError, match=r"torch.tpu.FloatTensor takes a tensor of its own device and dtype"):
            torch.tpu.FloatTensor(other)


def test_a_type_converts_and_recognizes(device: torch.device) -> None:
    made = torch.ones(2).type(torch.tpu.LongTensor)
    assert made.is_tpu and made.dtype is torch.int64 and made.type() == "torch.tpu.LongTensor"
    assert isinstance(made, torch.tpu.LongTensor) and not isinstance(made, torch.tpu.FloatTensor)
    assert not isinstance(torch.ones(2), torch.tpu.FloatTensor)
    assert repr(torch.tpu.FloatTensor) == "<class 'torch.tpu.FloatTensor'>"
    assert torch.tpu.FloatTensor.__qualname__ == torch.FloatTensor.__qualname__


def test_a_type_is_the_default(recwarn: pytest.WarningsRecorder) -> None:
    try:
        torch.set_default_tensor_type("torch.tpu.FloatTensor")
        assert torch.ones(2).is_tpu
        torch.set_default_tensor_type(torch.tpu.DoubleTensor)
        assert (torch.ones(2).dtype, torch.ones(2).device.type) == (torch.float64, "tpu")
        with pytest.raises(TypeError, match="only floating-point types"):
            torch.set_default_tensor_type(torch.tpu.LongTensor)
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
    assert (torch.ones(2).dtype, torch.ones(2).device.type) == (torch.float32, "cpu")
    assert len(recwarn) <= 1  # torch's own, that the function is deprecated


def test_amp_is_a_module_as_that_of_cuda(device: torch.device) -> None:
    amp = importlib.import_module("torch.tpu.amp")
    with amp.autocast(dtype=torch.bfloat16):
        assert torch.nn.Linear(2, 2, device=device)(torch.ones(1, 2, device=device)).dtype is torch.bfloat16
    assert amp.GradScaler(enabled=False).get_scale() == 1.0

    class Twice(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @amp.custom_bwd
        def backward(ctx, grad):
            return grad * 2

    x = torch.ones(2, device=device, dtype=torch.bfloat16, requires_grad=True)
    with amp.autocast(dtype=torch.bfloat16):
        y = Twice.apply(x)
    y.sum().backward()
    assert y.dtype is torch.float32 and x.grad is not None and x.grad.tolist() == [2, 2]


def test_memory_is_told_in_words() -> None:
    assert "MiB allocated" in torch.tpu.memory_summary()
    assert torch.tpu.memory_cached() == torch.tpu.memory_allocated()
    assert torch.tpu.OutOfMemoryError is torch.OutOfMemoryError


def test_the_types_of_torch_make_tensors_here_once_they_are_replaced(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name in vars(torch) if name.endswith("Tensor") and name in vars(torch.tpu)]
    for name in names:
        monkeypatch.setattr(torch, name, getattr(torch, name))  # for it to come back
    on_cpu = torch.ones(2)
    tensor_types.replace_those_of_torch()
    made = torch.LongTensor([[1, 2], [3, 4]])
    assert made.is_tpu and made.tolist() == [[1, 2], [3, 4]] and torch.FloatTensor(2, 3).is_tpu and len(names) == 10
    assert isinstance(made, torch.LongTensor) and isinstance(on_cpu, torch.FloatTensor)
    assert not isinstance(made, torch.FloatTensor) and made.float().type(torch.LongTensor).is_tpu
