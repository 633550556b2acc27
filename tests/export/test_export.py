"""StableHLO of exported programs: text, files, calls, dynamic sizes, and jax without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from hashlib import sha256

import jax
import numpy as np
import pytest
import torch
from torch import nn

import lazytpu
from lazytpu.compat.torch_xla import stablehlo as compat
from lazytpu.errors import ArtifactError, UnsupportedOpError

pytest.importorskip("flatbuffers")
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning")


class Add(nn.Module):
    def forward(self, x, y):
        return x + y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x, *, shift=None):
        x = torch.relu(self.norm(self.conv(x)))
        pooled = x.mean((2, 3)).reshape(x.shape[0], 2, -1).flatten(1)
        logits = self.head(pooled) * self.scale
        return {"logits": logits if shift is None else logits + shift, "size": x.shape[0], "pooled": pooled}


def exported(module, *args, **kwargs):
    return torch.export.export(module, args, **kwargs)


def images(n=4):
    return torch.randn(n, 1, 6, 6, generator=torch.Generator().manual_seed(n))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def dynamic(net):
    batch = torch.export.Dim("batch", min=2, max=64)
    return lazytpu.export.stablehlo(exported(net, images(), dynamic_shapes={"x": {0: batch}}))


def test_the_add_model_as_text():
    x, y = torch.randn(4, 3, 224, 224), torch.randn(4, 3, 224, 224)
    text = lazytpu.export.stablehlo(exported(Add(), x, y)).text()
    assert text.startswith("module @jit_forward attributes")
    t = "tensor<4x3x224x224xf32>"
    assert f"func.func public @main(%arg0: {t}, %arg1: {t}) -> ({t}" in text
    assert f"%0 = stablehlo.add %arg0, %arg1 : {t}" in text
    assert text.count("stablehlo.") == 1


def test_resnet18_as_text():
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18().eval()
    program = lazytpu.export.stablehlo(exported(model, torch.randn(4, 3, 224, 224)))
    text = program.text()
    assert text.startswith("module @jit_forward attributes")
    assert "tensor<4x3x224x224xf32>" in text and "-> (tensor<4x1000xf32>" in text
    assert text.count("stablehlo.convolution") == 20


def test_names_types_and_metadata(net):
    program = lazytpu.export.stablehlo(exported(net, images()), metadata={"task": "digits"})
    assert program.input_names == ["x"]
    assert [program.output(n).describe() for n in program.output_names] == ["f32[4,3]", "f32[4,4]"]
    assert list(program.weights) == [*dict(net.named_parameters()), *dict(net.named_buffers())]
    assert program.metadata["task"] == "digits"
    assert program.metadata["versions"]["torch"] == torch.__version__
    assert program.bytecode()[:4] == b"ML\xefR"
    assert repr(program).startswith("StableHLOModule((x: f32[4,1,6,6]) -> (")


@pytest.mark.parametrize("where", ["cpu", "tpu"])
def test_it_computes_what_the_module_does(net, where):
    program = lazytpu.export.stablehlo(exported(net.to(where), images().to(where)))
    x = images().to(where)
    wanted = net(x)
    for given in (x, x.cpu(), x.to("tpu")):
        got = program(given)
        assert got["size"] == 4
        assert got["logits"].device == given.device
        torch.testing.assert_close(got["logits"].cpu(), wanted["logits"].detach().cpu())
    got = program(x.cpu().numpy())
    assert isinstance(got["logits"], jax.Array)


def test_a_call_on_the_device_is_one_node(net, device):
    program = lazytpu.export.stablehlo(exported(net, images()))
    text = lazytpu.ir_text(program(images().to(device))["logits"])
    assert text.count("lazytpu.call_jax") == 1 and "aten." not in text


def test_inlined_weights(net):
    program = lazytpu.export.stablehlo(exported(net, images()), inline_weights=True)
    assert program.weights == {} and "%arg1" not in program.text()
    torch.testing.assert_close(program(images())["logits"], net(images())["logits"].detach())


def test_training_mode_updates_the_statistics(net):
    program = lazytpu.export.stablehlo(exported(net.train(), images()))
    program(images())
    net(images())
    for name, buffer in net.named_buffers():
        np.testing.assert_allclose(program.weights[name], buffer, rtol=1e-5, atol=1e-6)


def test_dynamic_sizes(dynamic, net):
    for n in (2, 5, 64):
        got = dynamic(images(n))
        assert got["size"] == n
        torch.testing.assert_close(got["logits"], net(images(n))["logits"].detach(), rtol=1e-5, atol=1e-6)
    assert "tensor<?x1x6x6xf32>" in dynamic.text()
    for n in (1, 65):
        with pytest.raises(ValueError, match="constraint|less or equal|greater or equal"):
            dynamic(images(n))


def test_wrong_inputs_are_refused(dynamic):
    with pytest.raises(ValueError, match=r"input x is f32\[\w+,1,6,6\], not f32\[4,2,6,6\]"):
        dynamic(torch.zeros(4, 2, 6, 6))
    with pytest.raises(ValueError, match=r"not f64\[4,1,6,6\]"):
        dynamic(images().double())
    with pytest.raises(TypeError, match=r"takes 1 inputs \(x\)"):
        dynamic(images(), images())
    with pytest.raises(TypeError, match=r"torch.export.export\(module, args\) returns, not a Net"):
        lazytpu.export.stablehlo(Net())


def test_checks_of_the_tracer_and_fused_inference_paths():
    class Casts(nn.Module):
        def forward(self, x):
            return x.double().float() * 2

    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    for module, x in ((Casts(), torch.arange(3)), (layer, torch.randn(2, 3, 8))):
        got = lazytpu.export.stablehlo(exported(module, x))(x)
        torch.testing.assert_close(got, module(x).detach(), rtol=1e-5, atol=1e-5)


def test_constants_among_the_arguments(net):
    class Power(nn.Module):
        def forward(self, x, p, names):
            return x**p, names

    program = lazytpu.export.stablehlo(exported(Power(), torch.ones(2), 3, {"a": "b"}))
    out, names = program(torch.tensor([1.0, 2.0]), 3, {"a": "b"})
    assert (out.tolist(), names) == ([1.0, 8.0], {"a": "b"})
    with pytest.raises(ValueError, match="made for 3 in this place, not 2"):
        program(torch.ones(2), 2, {"a": "b"})


def test_inputs_that_are_written():
    class Writes(nn.Module):
        def forward(self, x):
            x.add_(1)
            return x * 2

    program = lazytpu.export.stablehlo(exported(Writes(), torch.zeros(2)))
    x = torch.ones(2)
    assert program(x).tolist() == [4, 4]
    assert x.tolist() == [2, 2]


def test_random_numbers():
    program = lazytpu.export.stablehlo(exported(nn.Dropout(0.5).train(), torch.ones(64)))
    torch.manual_seed(0)
    first, second = program(torch.ones(64)), program(torch.ones(64))
    torch.manual_seed(0)
    assert (program(torch.ones(64)) == first).all() and (first != second).any()
    assert set(first.tolist()) == {0.0, 2.0}


def test_control_flow():
    class Branch(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t - 1, (x,))

    program = lazytpu.export.stablehlo(exported(Branch(), torch.ones(3)))
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(program(x), Branch()(x))


def test_half_precision_is_saved(tmp_path):
    module = nn.Linear(3, 2).to(torch.bfloat16)
    lazytpu.export.stablehlo(exported(module, torch.ones(1, 3, dtype=torch.bfloat16))).save(tmp_path)
    got = lazytpu.export.load(tmp_path)(torch.ones(1, 3, dtype=torch.bfloat16))
    torch.testing.assert_close(got, module(torch.ones(1, 3, dtype=torch.bfloat16)).detach())


def test_what_has_no_lowering_names_the_line():
    @torch.library.custom_op("lazytpu_tests::opaque", mutates_args=())
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    opaque.register_fake(lambda x: torch.empty_like(x))

    class Uses(nn.Module):
        def forward(self, x):
            return opaque(x)

    with pytest.raises(UnsupportedOpError, match=r"lazytpu_tests.opaque.* has no lowering[\s\S]*test_export.py"):
        lazytpu.export.stablehlo(exported(Uses(), torch.ones(2)))


def test_several_platforms(net):
    program = lazytpu.export.stablehlo(exported(net, images()), platforms=["cpu", "cuda", "tpu"])
    assert program.exported.platforms == ("cpu", "cuda", "tpu")
    torch.testing.assert_close(program(images())["logits"], net(images())["logits"].detach())


# --- files --------------------------------------------------------------------------------------------------------


def test_saved_and_loaded(net, tmp_path):
    program = lazytpu.export.stablehlo(exported(net, images()), metadata={"note": 1})
    program.save(tmp_path / "model")
    names = {p.relative_to(tmp_path / "model").as_posix() for p in (tmp_path / "model").rglob("*") if p.is_file()}
    assert {"manifest.json", "module.jax_export", "module.stablehlo.bc", "module.mlir"} < names
    assert "weights/0000-conv.weight.npy" in names
    loaded = lazytpu.export.load(tmp_path / "model")
    assert loaded.text() == program.text() and loaded.metadata == program.metadata
    torch.testing.assert_close(loaded(images()), program(images()))


def test_dynamic_sizes_survive_saving(dynamic, net, tmp_path):
    dynamic.save(tmp_path)
    got = lazytpu.export.load(tmp_path)(images(7))["logits"]
    torch.testing.assert_close(got, net(images(7))["logits"].detach(), rtol=1e-5, atol=1e-6)


def test_changed_and_missing_files_are_refused(net, tmp_path):
    program = lazytpu.export.stablehlo(exported(net, images()))
    program.save(tmp_path / "m")
    weight = tmp_path / "m/weights/0000-conv.weight.npy"
    data = weight.read_bytes()
    weight.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ArtifactError, match="0000-conv.weight.npy is not what was saved"):
        lazytpu.export.load(tmp_path / "m")
    weight.unlink()
    with pytest.raises(ArtifactError, match="lacks weights/0000-conv.weight.npy"):
        lazytpu.export.load(tmp_path / "m")
    manifest = tmp_path / "m/manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(ArtifactError, match="its manifest was changed"):
        lazytpu.export.load(tmp_path / "m")
    (tmp_path / "m/manifest.json.sha256").write_text(sha256(manifest.read_bytes()).hexdigest())
    with pytest.raises(ArtifactError, match="has format 99"):
        lazytpu.export.load(tmp_path / "m")
    with pytest.raises(FileNotFoundError):
        lazytpu.export.load(tmp_path / "none")
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not written by lazytpu.export"):
        program.save(tmp_path)


WITHOUT_TORCH = """
import sys

sys.modules["torch"] = None  # an import of torch raises ImportError from here on
import json, pathlib
import jax, numpy as np
from jax import export

folder = pathlib.Path(sys.argv[1])
manifest = json.loads((folder / "manifest.json").read_text())
weights = [np.load(folder / w["file"]).view(jax.numpy.dtype(w["dtype"])) for w in manifest["weights"]]
program = export.deserialize(bytearray((folder / "module.jax_export").read_bytes()))
with jax.enable_x64(True):
    outputs = program.call(weights, np.load(sys.argv[2]))
np.save(sys.argv[3], outputs[0])
try:
    import lazytpu
except ImportError:
    print("no torch here")
"""


def test_it_runs_in_jax_where_torch_cannot_be_imported(dynamic, net, tmp_path):
    dynamic.save(tmp_path / "m")
    np.save(tmp_path / "x.npy", images(5).numpy())
    command = [sys.executable, "-c", WITHOUT_TORCH, tmp_path / "m", tmp_path / "x.npy", tmp_path / "y.npy"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "no torch here" in ran.stdout
    wanted = net(images(5))["logits"].detach()
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), wanted, rtol=1e-5, atol=1e-6)


def test_savedmodel_without_tensorflow_says_so(net, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match="needs tensorflow: pip install tensorflow-cpu"):
        lazytpu.export.stablehlo(exported(net, images())).save_as_saved_model(tmp_path)
    with pytest.raises(ImportError, match="needs tensorflow"):
        compat.save_torch_module_as_tf_saved_model(net, (images(),), tmp_path)


def test_savedmodel_in_tensorflow(net, tmp_path):
    tf = pytest.importorskip("tensorflow")
    lazytpu.export.stablehlo(exported(net, images())).save_as_saved_model(tmp_path)
    program = tf.saved_model.load(tmp_path).signatures["serving_default"]
    (logits, *_) = program(x=tf.constant(images().numpy())).values()
    np.testing.assert_allclose(logits, net(images())["logits"].detach(), rtol=1e-5, atol=1e-6)


# --- the interface of torch_xla -----------------------------------------------------------------------------------


def test_torch_xla_stablehlo(net, tmp_path):
    program = compat.exported_program_to_stablehlo(exported(net, images()))
    assert program.get_stablehlo_text("forward")[:19] == "module @jit_forward"
    assert program.get_stablehlo_text() == program.get_stablehlo_text("forward")
    assert program.get_stablehlo_bytecode("forward")[:4] == b"ML\xefR"
    with pytest.raises(KeyError):
        program.get_stablehlo_text("backward")
    torch.testing.assert_close(program(images())["logits"], net(images())["logits"].detach())

    compat.save_as_stablehlo(exported(net, images()), tmp_path / "m")
    files = {p.relative_to(tmp_path / "m").as_posix() for p in (tmp_path / "m").rglob("*") if p.is_file()}
    assert {f"functions/forward.{kind}" for kind in ("meta", "bytecode", "mlir")} < files
    assert {f"data/{name}" for name in net.state_dict()} < files
    assert np.load(tmp_path / "m/data/conv.weight").shape == (4, 1, 3, 3)
    meta = json.loads((tmp_path / "m/functions/forward.meta").read_text())
    assert meta["name"] == "forward"
    assert meta["input_locations"][0] == {"type_": "parameter", "position": -1, "name": "conv.weight"}
    assert meta["input_locations"][-1] == {"type_": "input_arg", "position": 0, "name": ""}
    assert meta["input_signature"][-1] == {"shape": [4, 1, 6, 6], "dtype": "float32", "dynamic_dims": []}
    loaded = compat.StableHLOGraphModule.load(tmp_path / "m")
    torch.testing.assert_close(loaded.evaluate("forward", (images(),))["logits"], net(images())["logits"].detach())


def test_torch_xla_options_and_constants(tmp_path):
    table = torch.arange(3.0)

    class Adds(nn.Module):
        def forward(self, x):
            return x + table

    options = compat.StableHLOExportOptions(include_human_readable_text=False)
    compat.save_torch_model_as_stablehlo(Adds(), (torch.ones(3),), tmp_path / "m", options)
    assert not (tmp_path / "m/functions/forward.mlir").exists()
    assert np.load(tmp_path / "m/constants/0").tolist() == [0, 1, 2]
    loaded = compat.StableHLOGraphModule.load(tmp_path / "m")
    assert loaded.get_stablehlo_text() is None
    assert loaded(torch.ones(3)).tolist() == [1, 2, 3]
    program = compat.exported_program_to_stablehlo(exported(nn.Linear(2, 2), torch.ones(1, 2)))
    program.save(tmp_path / "n", compat.StableHLOExportOptions(save_weights=False))
    with pytest.raises(FileNotFoundError, match="saved without weights"):
        compat.StableHLOGraphModule.load(tmp_path / "n")
    options = compat.StableHLOExportOptions(export_weights=False, export_node_metadata=True)
    linear = compat.exported_program_to_stablehlo(exported(nn.Linear(2, 2), torch.ones(1, 2)), options)
    assert "aten.linear" in linear.get_stablehlo_text() or "aten.addmm" in linear.get_stablehlo_text()
    linear.save(tmp_path / "o")
    assert not (tmp_path / "o/data/weight").exists() and (tmp_path / "o/functions/forward.mlir").exists()
