"""Files: torch.save and torch.load in every form, pickle, safetensors; and reading them without lazytpu."""

from __future__ import annotations

import copy
import io
import pickle
import textwrap

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

import lazytpu
from lazytpu.tensors.storage import resolve
from lazytpu.tracing.record import cell_of
from tests.support.lockstep import differences
from tests.support.processes import run_code


def saved(value, **options) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


def tensors(device):
    torch.manual_seed(0)
    base = torch.arange(24.0).reshape(4, 6).to(device)
    return {
        "float32": base,
        "row": base[1],
        "block": base[1:3, ::2].t(),
        "scalar": torch.tensor(2.5, device=device),
        "empty": torch.empty(0, 3, device=device),
        "int64": torch.arange(3, device=device),
        "bool": torch.tensor([True, False], device=device),
        "half": torch.ones(2, dtype=torch.float16, device=device),
        "bfloat16": torch.ones(2, dtype=torch.bfloat16, device=device),
        "float8": torch.ones(2, device=device).to(torch.float8_e5m2),
        "uint16": torch.ones(2, device=device).to(torch.uint16),
        "complex": torch.tensor([1 + 2j, 3j], device=device),
        "conjugate": torch.tensor([1 + 2j, 3j], device=device).conj(),
        "negative": torch.tensor([1 + 2j], device=device).conj().imag,
        "channels_last": torch.arange(24.0).reshape(1, 2, 3, 4).to(device, memory_format=torch.channels_last),
        "expanded": torch.tensor([1.0], device=device).expand(3),
        "requires_grad": torch.tensor([1.0], device=device, requires_grad=True),
        "parameter": nn.Parameter(torch.tensor([1.0, 2.0], device=device)),
        "nest": [torch.ones(1, device=device), {"a": (torch.zeros(2, device=device), "text", 3)}],
    }


MAPS = {
    "none": (None, "tpu"),
    "cpu": ("cpu", "cpu"),
    "cpu_device": (torch.device("cpu"), "cpu"),
    "tpu": ("tpu", "tpu"),
    "tpu_device": (torch.device("tpu:0"), "tpu"),
    "dict_away": ({"tpu:0": "cpu"}, "cpu"),
    "dict_stays": ({"cuda:0": "cpu"}, "tpu"),
    "callable": (lambda storage, location: storage, "cpu"),
    "callable_device": (lambda storage, location: storage.tpu(), "tpu"),
    "callable_none": (lambda storage, location: None, "tpu"),
}


@pytest.mark.parametrize("form", ["zip", "legacy"])
@pytest.mark.parametrize("name", MAPS)
def test_load(name, form):
    where, device = MAPS[name]
    given = tensors("tpu")
    if form == "legacy":  # which torch itself cannot use for these
        given = {k: v for k, v in given.items() if k not in ("float8", "uint16")}
    loaded = torch.load(saved(given, _use_new_zipfile_serialization=form == "zip"), map_location=where)
    reference = torch.load(saved({k: v for k, v in tensors("cpu").items() if k in given}))
    for key, expected in reference.items():
        got = loaded[key]
        if isinstance(expected, torch.Tensor):
            assert got.device.type == device, key
            assert isinstance(got, nn.Parameter) == isinstance(expected, nn.Parameter)
            assert (got.requires_grad, got.is_leaf, got.is_conj(), got.is_neg()) == (
                expected.requires_grad,
                expected.is_leaf,
                expected.is_conj(),
                expected.is_neg(),
            ), key
            assert (got.shape, got.stride(), got.storage_offset(), got.dtype) == (
                expected.shape,
                expected.stride(),
                expected.storage_offset(),
                expected.dtype,
            ), key
            assert torch.equal(
                got.detach().cpu().resolve_conj().resolve_neg(), expected.resolve_conj().resolve_neg()
            ), key
    assert loaded["nest"][1]["a"][1:] == ("text", 3)


@pytest.mark.parametrize("where", ["tpu", "cpu"])
def test_what_shared_memory_shares_it_again(where):
    loaded = torch.load(saved(tensors("tpu")), map_location=where)
    with torch.no_grad():
        loaded["row"].zero_()
    assert loaded["float32"][1].tolist() == [0] * 6 and loaded["float32"][0].tolist() == [0, 1, 2, 3, 4, 5]
    assert loaded["block"][:, 0].tolist() == [0, 0, 0]
    assert loaded["float32"].untyped_storage().data_ptr() == loaded["row"].untyped_storage().data_ptr()


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_storage_is_saved_as_one(device, weights_only):
    x = torch.arange(3.0, device=device).view(torch.uint8)
    assert torch.is_storage(x.untyped_storage()) and not torch.is_storage(x)
    loaded = torch.load(saved({"x": x, "storage": x.untyped_storage()}), weights_only=weights_only)
    assert loaded["storage"].device == x.device and loaded["storage"].tolist() == x.tolist()
    loaded["x"].zero_()
    assert loaded["storage"].tolist() == [0] * 12


def test_a_loaded_tensor_is_a_whole_storage(device):
    """So ops on it take the short way, without a view."""
    loaded = torch.load(saved(nn.Linear(3, 2, device=device).state_dict()))
    assert lazytpu.tensors.storage.Storage is type(loaded["weight"]._s)


def test_saving_cuts_at_most_once_and_sees_this_step(device):
    x = torch.ones(3, device=device)
    lazytpu.mark_step()
    x.add_(1)
    y = x * 2
    before = lazytpu.metrics.counter("cut")
    file = saved([x, y, y[1:]])
    assert lazytpu.metrics.counter("cut") == before + 1
    x.add_(1)
    lazytpu.mark_step()
    assert [t.tolist() for t in torch.load(file)] == [[2, 2, 2], [4, 4, 4], [4, 4]] and x.tolist() == [3, 3, 3]


def test_other_ways_to_load(device, tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"x": torch.arange(3.0, device=device)}, path)
    assert torch.load(path, mmap=True)["x"].tolist() == [0, 1, 2] and torch.load(path, mmap=True)["x"].is_tpu
    assert torch.load(path, map_location="meta")["x"].is_meta
    with torch.device("tpu"):
        assert torch.load(path)["x"].is_tpu
    with open(path, "rb") as file:
        assert torch.load(file)["x"].is_tpu
    with pytest.raises(RuntimeError, match="there is one device, tpu:0"):
        torch.load(path, map_location="tpu:1")
    torch.save(torch.arange(3.0), path)
    assert torch.load(path, map_location="tpu").tolist() == [0, 1, 2]
    assert torch.load(path, map_location=device).is_tpu and not torch.load(path).is_tpu


def test_file_is_that_of_an_accelerator(device, tmp_path):
    """No name of lazytpu is in it."""
    torch.save([nn.Parameter(torch.ones(2, device=device)), torch.ones(2, device=device)], tmp_path / "x.pt")
    content = (tmp_path / "x.pt").read_bytes()
    assert b"tpu:0" in content and b"lazytpu" not in content and b"LazyTensor" not in content


def run_without_lazytpu(code: str) -> str:
    done = run_code("import sys; sys.modules['lazytpu'] = None\n" + textwrap.dedent(code))
    return done.stdout + done.stderr


def test_load_where_lazytpu_is_not(tmp_path):
    model = Net().to("tpu")
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "all": tensors("tpu")}, tmp_path / "x.pt"
    )
    torch.save(model.inner, tmp_path / "module.pt")
    out = run_without_lazytpu(
        f"""
        import torch
        for where in ("cpu", torch.device("cpu"), {{"tpu:0": "cpu"}}, lambda storage, location: storage):
            loaded = torch.load({str(tmp_path / "x.pt")!r}, map_location=where)
            print(loaded["model"]["inner.weight"].double().sum().item(), loaded["all"]["conjugate"].tolist())
            optimizer = torch.optim.AdamW([torch.ones(3, 3), torch.ones(3), torch.ones(3, 3)])
            optimizer.load_state_dict(loaded["optimizer"])
        module = torch.load({str(tmp_path / "module.pt")!r}, map_location="cpu", weights_only=False)
        print(type(module.weight).__name__, module.weight.double().sum().item())
        torch.load({str(tmp_path / "x.pt")!r})
        """
    ).splitlines()
    total = model.inner.weight.cpu().double().sum().item()
    assert out[:4] == [f"{total} [(1-2j), -3j]"] * 4
    assert out[4] == f"Parameter {total}"
    assert "don't know how to restore data location" in out[-1] and "tagged with tpu:0" in out[-1]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.outer.weight = nn.Parameter(torch.ones(3, 3))
        self.tied = self.outer.weight
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        return self.outer(self.inner(x)) * (1 + self.count)


def step(model, optimizer):
    torch.manual_seed(1)
    x = torch.randn(4, 3).to(model.count.device)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("pack", [lambda m: saved(m), lambda m: io.BytesIO(pickle.dumps(m))])
@pytest.mark.parametrize("where", ["tpu", "cpu"])
def test_whole_module(pack, where):
    model = Net().to("tpu")
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    file = pack(model)
    try:
        loaded = torch.load(file, weights_only=False, map_location=where)
    except (pickle.UnpicklingError, RuntimeError):  # a pickle of the standard library
        file.seek(0)
        loaded = pickle.load(file).to(where)
    assert loaded.tied is loaded.outer.weight and isinstance(loaded.tied, nn.Parameter)
    assert loaded.inner.weight.device.type == where and loaded.inner.weight.requires_grad
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].cpu(), value.cpu()), name
    assert loaded(torch.ones(1, 3, device=where)).shape == (1, 3)


def test_weights_only_refuses_a_module():
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(saved(Net().to("tpu")))


@pytest.mark.parametrize(
    "value", [lambda d: torch.arange(6.0, device=d).reshape(2, 3).t(), lambda d: nn.Parameter(torch.ones(2, device=d))]
)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(device, value, protocol):
    expected, got = (pickle.loads(pickle.dumps(value(d), protocol)) for d in ("cpu", "tpu"))
    assert list(differences(expected, got)) == [] and isinstance(got, nn.Parameter) == isinstance(
        expected, nn.Parameter
    )


def test_pickle_keeps_attributes(device):
    x, p = torch.ones(2, device=device), nn.Parameter(torch.ones(2, device=device))
    x.note = p.note = "kept"
    for got in (*pickle.loads(pickle.dumps([x, p])), *torch.load(saved([x, p]))):
        assert got.note == "kept" and got.is_tpu and (got + 1).tolist() == [2, 2]
    assert torch.load(saved([x, p]), map_location="cpu")[0].note == "kept"
    assert type(torch.load(saved([x, p]), map_location="cpu")[0]) is torch.Tensor


def test_pickle_of_a_tensor_that_cpp_made(device):
    x = torch.Tensor.detach(torch.ones(2, device=device))
    assert type(x) is torch.Tensor
    assert pickle.loads(pickle.dumps(x)).tolist() == torch.load(saved(x)).tolist() == [1, 1]


def test_hooks_are_not_saved(device):
    x = torch.ones(2, device=device, requires_grad=True)
    x.register_hook(lambda g: g)
    with pytest.warns(UserWarning, match="backward hook .* will not be serialized"):
        saved(x)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_training_goes_on_from_a_checkpoint(kind):
    def make(device):
        model = Net().to(device)
        options = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    model, optimizer, schedule = make("tpu")
    for _ in range(3):
        step(model, optimizer)
        schedule.step()
    file = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()})
    for _ in range(2):
        step(model, optimizer)
    for where, device in ((None, "tpu"), ("cpu", "tpu"), ("cpu", "cpu")):
        file.seek(0)
        state = torch.load(file, map_location=where)
        again, optimizer_again, schedule_again = make(device)
        again.load_state_dict(state["model"])
        optimizer_again.load_state_dict(state["optimizer"])
        schedule_again.load_state_dict(state["schedule"])
        assert optimizer_again.param_groups[0]["lr"] == 0.01 * 0.5**3
        for _ in range(2):
            step(again, optimizer_again)
        torch.testing.assert_close([p.cpu() for p in again.parameters()], [p.cpu() for p in model.parameters()])
    copied = copy.deepcopy(optimizer)
    assert copied.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


# --- safetensors --------------------------------------------------------------------------------------------


def test_safetensors(tmp_path):
    path = str(tmp_path / "x.safetensors")
    given = {k: v.contiguous() for k, v in Net().inner.to("tpu", torch.bfloat16).state_dict().items()}
    save_file(given, path)
    loaded = load_file(path)
    assert loaded.keys() == given.keys()
    assert {(v.dtype, v.device.type) for v in loaded.values()} == {(torch.bfloat16, "cpu")}
    assert all(torch.equal(loaded[k], given[k].cpu()) for k in given)
    model = nn.Linear(3, 3, device="tpu", dtype=torch.bfloat16)
    model.load_state_dict(loaded)
    assert model.weight.is_tpu and torch.equal(model.weight, given["weight"])


def test_safetensors_of_tied_weights(tmp_path):
    path, model = str(tmp_path / "x.safetensors"), Net().to("tpu")
    with pytest.raises(RuntimeError, match="Some tensors share memory"):
        save_file(model.state_dict(), path)
    save_model(model, path)
    other = Net().to("tpu")
    with torch.no_grad():
        other.tied.zero_()
    assert load_model(other, path) == (set(), [])
    assert torch.equal(other.tied, model.tied) and other.outer.weight is other.tied


def test_resizing_to_nothing_drops_the_contents_and_keeps_aliasing(device):
    x = torch.arange(6.0, device=device).reshape(2, 3)
    view, storage = x[1], x.untyped_storage()
    storage.resize_(0)
    assert storage.size() == x.untyped_storage().nbytes() == 0
    assert resolve(cell_of(x))[0].buffer is None
    storage.resize_(24)
    x.copy_(torch.ones(2, 3))
    view.add_(1)
    assert storage.nbytes() == 24
    assert x.tolist() == [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    storage.resize_(24)
    assert x[1].tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(NotImplementedError, match="of 24 bytes can be resized to none and back, not to 48"):
        storage.resize_(48)
