"""Packages: one file with executable, StableHLO and weights, which runs without the model's Python."""

from __future__ import annotations

import json
import pickle
import sys
import zipfile
from hashlib import sha256

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import lazytpu
from lazytpu.cli.app import app
from lazytpu.errors import ArtifactError
from lazytpu.export.package import seal
from lazytpu.observe import metrics
from tests.support.processes import run_lazytpu

pytest.importorskip("flatbuffers")
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).amax((2, 3))), {"n": 3}


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def x():
    return torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def file(net, x, tmp_path_factory):
    return lazytpu.export.package(net, (x,), tmp_path_factory.mktemp("p") / "net.ltz", metadata={"task": "digits"})


def rewritten(file, target, change):
    """A copy of a package whose members ``change`` has changed, with a manifest and seal that fit where it likes."""
    with zipfile.ZipFile(file) as archive:
        members = {n: archive.read(n) for n in archive.namelist()}
    manifest = json.loads(members["manifest.json"])
    change(manifest, members)
    members["manifest.json"] = json.dumps(manifest).encode()
    members["manifest.json.sha256"] = sha256(members["manifest.json"]).hexdigest().encode()
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.comment = b"0" * 64
    seal(target)
    return target


@pytest.fixture
def warned(caplog):
    """Messages of the log."""
    return lambda: [r.getMessage() for r in caplog.records if r.name.startswith("lazytpu")]


def test_it_runs_what_was_compiled(file, net, x, warned):
    metrics.reset()
    loaded = lazytpu.load(file)
    out, rest = loaded(x)
    torch.testing.assert_close(out, net(x)[0].detach())
    assert rest == {"n": 3}
    assert loaded.precompiled
    assert metrics.counter("package_loaded") == 1 and not metrics.counter("package_recompiled")
    assert warned() == []


def test_tensors_of_the_device_go_in_and_out(file, net, x, device):
    out, _ = lazytpu.load(file)(x.to(device) * 1)
    assert out.device == device
    torch.testing.assert_close((out * 2).cpu(), net(x)[0].detach() * 2)


def test_no_python_of_the_model_is_needed(file, net, x, tmp_path):
    np.save(tmp_path / "x.npy", x.numpy())
    command = "run-package", file, "--input", tmp_path / "x.npy", "--output", tmp_path / "y.npz"
    ran = run_lazytpu(*command)
    assert ran.returncode == 0, ran.stderr
    assert "f32[4,3]" in ran.stdout
    (got,) = np.load(tmp_path / "y.npz").values()
    np.testing.assert_allclose(got, net(x)[0].detach(), rtol=1e-5, atol=1e-6)


def test_the_file_is_a_zip_of_plain_members(file):
    with zipfile.ZipFile(file) as archive:
        names = set(archive.namelist())
        assert all(i.compress_type == zipfile.ZIP_STORED for i in archive.infolist())
        manifest = json.loads(archive.read("manifest.json"))
        assert "stablehlo.convolution" in archive.read("module.mlir").decode()
        assert archive.read("executable.bin")
    assert names == {*manifest["sha256"], "manifest.json", "manifest.json.sha256"}
    assert manifest["metadata"]["versions"]["torch"] == torch.__version__
    assert manifest["metadata"]["task"] == "digits"


def test_another_device_compiles_the_stablehlo_and_says_so(file, net, x, tmp_path, warned):
    def for_another(manifest, members):
        manifest["metadata"]["executable"]["target"][-1] = "jaxlib 0.0.1"

    metrics.reset()
    loaded = lazytpu.load(rewritten(file, tmp_path / "other.ltz", for_another))
    assert not loaded.precompiled
    assert metrics.counter("package_recompiled") == 1
    (message,) = warned()
    assert "instead of 'jaxlib 0.0.1'" in message and message.endswith("its StableHLO is compiled here")
    torch.testing.assert_close(loaded(x)[0], net(x)[0].detach())


def test_an_executable_that_xla_refuses(file, net, x, tmp_path, warned):
    def nonsense(manifest, members):
        members["executable.bin"] = b"nonsense"
        manifest["sha256"]["executable.bin"] = sha256(b"nonsense").hexdigest()

    loaded = lazytpu.load(rewritten(file, tmp_path / "bad.ltz", nonsense))
    assert not loaded.precompiled and "XLA refuses its executable" in warned()[0]
    torch.testing.assert_close(loaded(x)[0], net(x)[0].detach())


def test_a_truncated_file_is_refused(file, tmp_path):
    data = file.read_bytes()
    for length in (0, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.ltz").write_bytes(data[:length])
        with pytest.raises(ArtifactError, match="cut short or changed"):
            lazytpu.load(tmp_path / "cut.ltz")
    with pytest.raises(FileNotFoundError):
        lazytpu.load(tmp_path / "none.ltz")


def test_every_changed_byte_is_noticed(file, tmp_path):
    """Some bytes in members, headers and the directory, before anything parses them."""
    data = file.read_bytes()
    for position in range(0, len(data), max(1, len(data) // 40)):
        changed = bytearray(data)
        changed[position] ^= 0x41
        (tmp_path / "changed.ltz").write_bytes(changed)
        with pytest.raises(ArtifactError, match="cut short or changed"):
            lazytpu.load(tmp_path / "changed.ltz")


def test_members_that_do_not_belong_are_refused(file, tmp_path):
    def more(manifest, members):
        members["evil.pkl"] = pickle.dumps(print)

    def less(manifest, members):
        del members["executable.bin"]

    def other_weights(manifest, members):
        name = manifest["weights"][0]["file"]
        members[name] = members[name][:-1] + bytes([members[name][-1] ^ 1])

    for change, message in ((more, "evil.pkl"), (less, "executable.bin"), (other_weights, "sha256 differs")):
        with pytest.raises(ArtifactError, match=message):
            lazytpu.load(rewritten(file, tmp_path / "x.ltz", change))


def test_no_pickle_is_read(file, tmp_path, monkeypatch):
    """Neither of the package's own, nor inside an array."""

    def objects(manifest, members):
        entry = manifest["weights"][0]
        path = tmp_path / "objects.npy"
        np.save(path, np.array([print], dtype=object), allow_pickle=True)
        members[entry["file"]] = path.read_bytes()
        manifest["sha256"][entry["file"]] = sha256(members[entry["file"]]).hexdigest()

    with pytest.raises(ArtifactError, match="allow_pickle"):
        lazytpu.load(rewritten(file, tmp_path / "objects.ltz", objects))

    def refuse(*args, **kwargs):
        raise AssertionError("a pickle was read")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert lazytpu.load(file).precompiled


def test_functions_and_constants(tmp_path):
    weights = torch.randn(3, 2)

    def f(x, power):
        return (x @ weights).abs() ** power

    loaded = lazytpu.load(lazytpu.export.package(f, (torch.ones(4, 3), 2), tmp_path / "f.ltz"))
    x = torch.randn(4, 3)
    torch.testing.assert_close(loaded(x, 2), f(x, 2))
    with pytest.raises(ValueError, match="made for 2 in this place, not 3"):
        loaded(x, 3)


def test_dynamic_sizes_compile_where_they_are_loaded(net, tmp_path, warned):
    batch = torch.export.Dim("batch", min=1, max=16)
    x = torch.randn(4, 1, 6, 6)
    lazytpu.export.package(net, (x,), tmp_path / "d.ltz", dynamic_shapes=({0: batch},))
    loaded = lazytpu.load(tmp_path / "d.ltz")
    assert "it has no executable" in warned()[0]
    for n in (1, 3, 16):
        x = torch.randn(n, 1, 6, 6)
        torch.testing.assert_close(loaded(x)[0], net(x)[0].detach(), rtol=1e-5, atol=1e-6)


def test_random_numbers_and_updates_in_a_package(tmp_path):
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)).train()
    loaded = lazytpu.load(lazytpu.export.package(module, (torch.ones(8, 3),), tmp_path / "r.ltz"))
    assert loaded.precompiled
    x = torch.randn(8, 3)
    torch.manual_seed(0)
    first = loaded(x)
    assert (loaded(x) != first).any()
    module[0](x), module[0](x)
    np.testing.assert_allclose(loaded.weights["0.running_mean"], module[0].running_mean, rtol=1e-5, atol=1e-6)


def test_a_package_for_another_platform_is_refused(file, monkeypatch):
    where = sys.modules["lazytpu.export.package"]
    monkeypatch.setattr(where, "PLATFORMS", {"cpu": "abacus"})
    monkeypatch.setattr(where, "target", lambda: ["another"])
    with pytest.raises(ArtifactError, match="has programs for cpu, cuda, rocm, tpu, and this process runs on abacus"):
        lazytpu.load(file)


def test_describe_and_the_commands(file, tmp_path):
    found = lazytpu.export.describe(file)
    assert found["inputs"] == {"x": "f32[4,1,6,6]"}
    assert found["weights"]["conv.weight"] == "f32[4,1,3,3] parameter"
    assert found["runs_here_without_compiling"] and found["metadata"]["task"] == "digits"

    def run(*command):
        done = CliRunner().invoke(app, [str(c) for c in command], env={"COLUMNS": "200"})
        return done.exit_code, done.output

    code, printed = run("inspect", file)
    assert code == 0 and "f32[4,1,3,3] parameter" in printed and "digits" in printed
    code, printed = run("run-package", file)
    assert code == 1 and "the program takes 1 inputs (x: f32[4,1,6,6]), but 0 were passed" in printed
    (tmp_path / "cut.ltz").write_bytes(file.read_bytes()[:500])
    for command in ("inspect", "run-package"):
        code, printed = run(command, tmp_path / "cut.ltz")
        assert code == 1 and "cut short or changed" in printed and "Traceback" not in printed


def test_a_change_outside_of_the_members_is_refused(file, tmp_path):
    whole = file.read_bytes()
    changed = tmp_path / "changed.ltz"
    for position in (10, len(whole) - 1, whole.rindex(b"PK\x01\x02") + 12):  # dates of the zip, the seal itself
        data = bytearray(whole)
        data[position] ^= 1
        changed.write_bytes(data)
        with pytest.raises(ArtifactError, match="cut short or changed"):
            lazytpu.load(changed)
    changed.write_bytes(whole + b"more")
    with pytest.raises(ArtifactError):
        lazytpu.load(changed)
