"""Parameters and modules: moving, copying, saving and loading them, against the CPU."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.register_buffer("hidden_away", torch.ones(1), persistent=False)
        self.register_parameter("nothing", None)

    def forward(self, tokens):
        return self.head(self.norm(self.hidden(self.embedding(tokens))) * self.scale * self.hidden_away)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def test_parameter(device):
    x = torch.ones(2, device=device)
    p = nn.Parameter(x)
    assert isinstance(p, nn.Parameter) and isinstance(p, torch.Tensor) and not isinstance(x, nn.Parameter)
    assert p.requires_grad and p.is_leaf and p.data_ptr() == x.data_ptr() and p.is_tpu
    assert not nn.Parameter(x, requires_grad=False).requires_grad
    assert isinstance(nn.Parameter(torch.Tensor.detach(x)), nn.Parameter)
    module = nn.Module()
    module.p = p
    assert dict(module.named_parameters()) == {"p": p}
    module.b = nn.Buffer(x)
    assert dict(module.named_buffers())["b"].data_ptr() == x.data_ptr() and isinstance(module.b, nn.Buffer)
    assert (
        isinstance(p * 1, torch.Tensor) and not isinstance(p * 1, nn.Parameter) and not isinstance(p.data, nn.Parameter)
    )
    from_plain = nn.Parameter(torch.Tensor.detach(x))
    from_plain.data.add_(1)
    assert x.tolist() == [2, 2] and repr(from_plain).startswith(
        "Parameter containing:\ntensor([2., 2.], device='tpu:0'"
    )


def test_module_moves_whole():
    model = net()
    parameters, optimizer = list(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    assert model.to("tpu") is model
    assert all(t.is_tpu for t in (*model.parameters(), *model.buffers()))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))  # as on a GPU
    assert model.head.weight is model.embedding.weight
    assert all(isinstance(p, nn.Parameter) for p in parameters)
    model(torch.arange(5, device="tpu")).sum().backward()
    optimizer.step()
    expected = net()
    expected_optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    expected(torch.arange(5)).sum().backward()
    expected_optimizer.step()
    torch.testing.assert_close(list(model.cpu().parameters()), list(expected.parameters()))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert type(model.head.weight) is nn.Parameter and model.head.weight is model.embedding.weight
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm])
def test_weights_that_a_graph_or_a_weak_reference_has_move_whole(wrap):
    model = wrap(nn.Linear(3, 2))
    model(torch.ones(1, 3))  # the old form of spectral_norm keeps a weight with its graph
    parameters = list(model.parameters())
    references = [weakref.ref(p) for p in parameters]
    model.to("tpu")
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(r() is p for r, p in zip(references, parameters, strict=True))
    model(torch.ones(1, 3, device="tpu")).sum().backward()
    assert all(p.grad.is_tpu for p in parameters)


def test_a_move_between_forward_and_backward_is_refused():
    model = nn.Linear(3, 2)
    loss = model(torch.ones(1, 3)).sum()
    model.to("tpu")
    with pytest.raises(RuntimeError, match="moved to another device between"):
        loss.backward()


@pytest.mark.parametrize("change", ["half", "bfloat16", "float", "double"])
def test_module_changes_its_dtype(change):
    model, expected = getattr(net().to("tpu"), change)(), getattr(net(), change)()
    assert model.head.weight is model.embedding.weight
    for (name, got), want in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert (got.dtype, got.device.type) == (want.dtype, "tpu"), name
        assert torch.equal(got.cpu(), want), name
    both = net().to("tpu", torch.bfloat16)
    assert both.hidden.weight.dtype == torch.bfloat16 and both.norm.num_batches_tracked.dtype == torch.int64
    assert both.hidden.weight.is_tpu


def test_module_to_empty_and_meta():
    with torch.device("meta"):
        model = net()
    model.to_empty(device="tpu")
    assert all(p.is_tpu for p in model.parameters()) and model.head.weight is model.embedding.weight
    model.load_state_dict(net().state_dict())
    assert torch.equal(model.hidden.weight.cpu(), net().hidden.weight)


def test_module_keeps_gradients_attributes_and_hooks_when_it_moves():
    model, seen = nn.Linear(2, 1), []
    model.weight.tag = "kept"
    model.weight.requires_grad_(True)
    model.bias.requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    model.register_forward_hook(lambda m, args, out: seen.append(out.device.type))
    model.to("tpu")
    assert model.weight.grad.is_tpu and model.weight.grad.tolist() == [[1, 1]] and not model.bias.requires_grad
    assert model.weight.tag == "kept"
    model(torch.ones(1, 2, device="tpu")).sum().backward()
    assert model.weight.grad.tolist() == [[2, 2]] and seen == ["tpu"]


@pytest.mark.parametrize(
    "make", [lambda: nn.LazyLinear(3), lambda: nn.LazyLinear(3, device="tpu"), lambda: nn.LazyConv1d(3, 1)]
)
def test_lazy_modules(make):
    model = make().to("tpu")
    x = torch.ones(2, 4, device="tpu") if isinstance(model, nn.LazyLinear) else torch.ones(2, 4, 5, device="tpu")
    model(x).sum().backward()
    assert isinstance(model.weight, nn.Parameter) and model.weight.is_tpu and model.weight.grad.is_tpu
    assert model.weight.shape[1] == 4 and "device='tpu:0'" in repr(model.weight)
    copied = copy.deepcopy(model)
    assert torch.equal(copied.weight, model.weight) and copied.weight is not model.weight


def test_lazy_batch_norm():
    model = nn.LazyBatchNorm1d().to("tpu")
    model(torch.arange(8.0, device="tpu").reshape(2, 4))
    assert model.running_mean.is_tpu and model.running_mean.tolist() == pytest.approx([0.2, 0.3, 0.4, 0.5])


def test_state_dict():
    source, target = net().to("tpu"), net().to("tpu")
    with torch.no_grad():
        for p in source.parameters():
            p.add_(1)
    state = source.state_dict()
    assert all(t.is_tpu for t in state.values()) and "hidden_away" not in state
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    parameters = list(target.parameters())
    assert target.load_state_dict(state) == nn.modules.module._IncompatibleKeys([], [])
    assert all(a is b for a, b in zip(parameters, target.parameters(), strict=True))
    assert torch.equal(target.hidden.weight, source.hidden.weight) and target.hidden.weight is not source.hidden.weight
    with torch.no_grad():
        target.hidden.weight.zero_()
    assert not torch.equal(target.hidden.weight, source.hidden.weight)
    on_cpu = net()
    on_cpu.load_state_dict(state)
    assert torch.equal(on_cpu.hidden.weight, source.hidden.weight.cpu()) and on_cpu.hidden.weight.device.type == "cpu"
    target.load_state_dict(net().state_dict())
    assert target.hidden.weight.is_tpu and torch.equal(target.hidden.weight.cpu(), net().hidden.weight)


def test_load_state_dict_errors_and_assign():
    target, state = net().to("tpu"), net().to("tpu").state_dict()
    state["extra"] = state.pop("hidden.weight")
    assert target.load_state_dict(state, strict=False) == nn.modules.module._IncompatibleKeys(
        ["hidden.weight"], ["extra"]
    )
    with pytest.raises(RuntimeError, match="Missing key"):
        target.load_state_dict(state)
    state = {**net().state_dict(), "hidden.bias": torch.ones(7)}
    with pytest.raises(RuntimeError, match="size mismatch for hidden.bias"):
        target.load_state_dict(state)
    half = net().half().to("tpu").state_dict()
    target.load_state_dict(half, assign=True)
    assert target.hidden.weight.dtype == torch.float16 and isinstance(target.hidden.weight, nn.Parameter)
    assert target.hidden.weight.data_ptr() == half["hidden.weight"].data_ptr() and target.hidden.weight.requires_grad


def test_deepcopy_of_a_module():
    model = net().to("tpu")
    model(torch.arange(5, device="tpu")).sum().backward()
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.embedding.weight is not model.head.weight
    assert copied.head.weight.grad is None  # as torch's parameters
    assert copy.deepcopy(net()).head.weight.grad is None
    with torch.no_grad():
        copied.hidden.weight.zero_()
    assert model.hidden.weight.abs().sum().item() > 0
    copied(torch.arange(5, device="tpu")).sum().backward()
    assert copied.head.weight.grad is not None and copied.scale.is_tpu
