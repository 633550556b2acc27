"""Tensors and parameters of users' classes, and attributes that are copied from tensor to tensor."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn


class Named(torch.Tensor):
    """A tensor with a name, which `deepcopy` can copy."""

    def new_empty(self, size: Any, **options: Any) -> Named:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).new_empty(size, **options).as_subclass(type(self))


class Bare(torch.Tensor):
    """A tensor that torch refuses to copy."""


class Scale(nn.Parameter):
    """A parameter with a method."""

    def doubled(self) -> torch.Tensor:
        return self * 2


def test_attributes_copied_to_another_tensor_do_not_bring_its_values(device: torch.device) -> None:
    a, b = nn.Parameter(torch.ones(3).to(device)), nn.Parameter(torch.zeros(3).to(device))
    b.note = "kept"
    _ = (a + b).sum().item()
    a.__dict__.update(b.__dict__)
    assert a.tolist() == [1, 1, 1] and a.note == "kept"
    b.__dict__ = a.__dict__
    b.__dict__["more"] = 1
    assert b.tolist() == [0, 0, 0] and b.note == "kept" and b.more == 1
    x, y = (torch.full((2,), n).to(device).as_subclass(Named) for n in (1.0, 2.0))
    _ = (x + y).tolist()
    assert vars(x) == {}
    x.__dict__ = copy.deepcopy(y.__dict__)
    assert x.tolist() == [1, 1]


def test_data_of_a_user_class_is_seen_to_change(device: torch.device) -> None:
    x = torch.ones(3).to(device).as_subclass(Named)
    assert x.sum().item() == 3
    x.data = torch.zeros(2).to(device)
    assert x.sum().item() == 0 and x.shape == (2,)


def test_deepcopy(device: torch.device) -> None:
    whole = torch.arange(4.0).to(device)
    x = whole.as_subclass(Named)
    x.note = "kept"
    y = copy.deepcopy({"x": x, "whole": whole})
    y["x"].add_(1)
    assert type(y["x"]) is Named and y["x"].note == "kept"
    assert x.tolist() == [0, 1, 2, 3] and y["x"].tolist() == y["whole"].tolist() == [1, 2, 3, 4]
    errors = []
    for where in ("cpu", device):
        with pytest.raises(RuntimeError) as error:
            copy.deepcopy(torch.ones(2).to(where).as_subclass(Bare))
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_save_and_load(device: torch.device) -> None:
    x = torch.arange(4.0).to(device).as_subclass(Named)[1:]
    x.note = "kept"
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    y = torch.load(file, weights_only=False)
    assert type(y) is Named and y.tolist() == [1, 2, 3] and y.note == "kept" and y.device == x.device


def test_parameter_keeps_its_class(device: torch.device) -> None:
    module = nn.Module()
    module.scale = held = Scale(torch.arange(2.0))
    module.scale.note = "kept"
    module.to(device)
    assert module.scale is held and type(held) is Scale and held.note == "kept" and held.device == device
    for p in (held, Scale(torch.arange(2.0).to(device)), copy.deepcopy(held)):
        assert type(p) is Scale and isinstance(p, nn.Parameter) and p.requires_grad
        optimizer = torch.optim.AdamW([p], 0.5)
        p.doubled().sum().backward()
        optimizer.step()
        assert type(p) is Scale and p.grad.tolist() == [2, 2] and p.tolist() == pytest.approx([-0.5, 0.495])
    module.to("cpu")
    assert module.scale is held and type(held) is Scale and held.device.type == "cpu"
