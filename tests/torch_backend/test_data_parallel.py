"""``nn.DataParallel`` on the one device: the model as it is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import comm, data_parallel, gather, replicate, scatter

from lazytpu.torch_backend import data_parallel as data_parallel_module


def test_a_wrapped_model_trains_as_the_model(device: torch.device) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    wrapped = nn.DataParallel(copy.deepcopy(plain))
    x = torch.randn(8, 3)
    plain(x).square().mean().backward()
    for given in (x, x.to(device)):
        wrapped.zero_grad()
        wrapped.module[1].reset_running_stats()
        out = wrapped(given)
        out.square().mean().backward()
        assert out.is_tpu and next(iter(wrapped.state_dict())) == "module.0.weight"
    for mine, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
    torch.testing.assert_close(wrapped.module[1].running_mean.cpu(), plain[1].running_mean)


@pytest.mark.filterwarnings("ignore:Using -1 to represent CPU")  # which torch itself does
def test_inputs_keep_their_form_and_gradients_their_device(device: torch.device) -> None:
    class Sum(nn.Module):
        def forward(self, pair, scale=None):
            return {"sum": pair[0] + pair[1] * scale["by"]}

    x = torch.ones(2, requires_grad=True)
    out = nn.DataParallel(Sum())((x, torch.ones(2)), scale={"by": 3})["sum"]
    out.sum().backward()
    assert out.tolist() == [4, 4] and x.grad.device.type == "cpu" and x.grad.tolist() == [1, 1]
    assert data_parallel(nn.Linear(2, 1).to(device), torch.ones(4, 2)).shape == (4, 1)


def test_the_functions_of_one_device(device: torch.device) -> None:
    x = torch.arange(4.0)
    (moved,) = scatter(x, [0])
    assert moved.is_tpu and gather([moved], "cpu").device.type == "cpu" and gather([moved], 0).is_tpu
    assert replicate(nn.Linear(2, 2).to(device), [0])[0].weight.is_tpu
    assert comm.broadcast(x, [0])[0].is_tpu
    with pytest.raises(RuntimeError, match=r"nn.DataParallel over 2 devices: use lazytpu.spmd.data_parallel"):
        scatter(x, [0, 0])


@pytest.mark.parametrize(("has_gpu", "taken"), [(False, "ours"), (True, "theirs")])
def test_a_build_for_cuda_keeps_its_own_where_it_finds_a_gpu(
    has_gpu: bool, taken: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("_scatter", "_gather", "_broadcast", "_broadcast_coalesced")
    for name in names:
        monkeypatch.setattr(torch._C, name, lambda *args: "theirs", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    data_parallel_module.register()
    found = torch._C._scatter(torch.ones(2), [0], None, 0, None)
    assert ("theirs" if found == "theirs" else "ours") == taken
