"""What is around a step on a mesh: jax arrays, memory, debugging, the disk cache, compiled functions."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

import lazytpu
from lazytpu import spmd
from lazytpu.runtime import client
from tests.support import xla_flags
from tests.support.eight_devices import eight_devices
from tests.support.processes import run_code

WHOLE = torch.arange(32.0).reshape(8, 4)


def marked(*spec: object) -> torch.Tensor:
    return spmd.mark_sharding(WHOLE.to(lazytpu.device()), spmd.Mesh((2, 4), ("data", "model")), spec)


@eight_devices
def test_arrays_of_jax_go_in_and_out_with_their_sharding() -> None:
    array = lazytpu.to_jax(marked("data", "model"))
    assert array.sharding.spec == PartitionSpec("data", "model")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    placed = jax.device_put(WHOLE.numpy(), NamedSharding(mesh, PartitionSpec("x")))
    x = lazytpu.from_jax(placed)
    assert spmd.sharding_of(x).spec == ("x", None) and torch.equal(x.cpu(), WHOLE)
    assert lazytpu.to_jax(x) is placed
    x.add_(1)  # leaves the array as it was
    assert torch.equal(x.cpu(), WHOLE + 1) and np.array_equal(placed, WHOLE.numpy())


@eight_devices
def test_memory_allocated_counts_parts() -> None:
    before = client.memory_allocated()
    x = marked("data", "model")
    assert client.memory_allocated() - before == 128
    y = marked("data")
    assert client.memory_allocated() - before == 128 + 4 * 128
    del x, y


@eight_devices
def test_padding_and_cropping_are_compiled_once() -> None:
    mesh = spmd.Mesh((8,), ("data",))
    assert spmd.mark_sharding(torch.ones(10).to(lazytpu.device()), mesh, ("data",)).sum().item() == 10
    x = spmd.mark_sharding(torch.arange(10.0).to(lazytpu.device()), mesh, ("data",))
    assert lazytpu.to_jax(x).shape == (10,)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", lambda *args, **options: pytest.fail("compiled again"))
        x = spmd.mark_sharding(torch.arange(10.0).to(lazytpu.device()), mesh, ("data",))
        assert lazytpu.to_jax(x).tolist() == list(range(10))


@eight_devices
def test_verify_and_check_look_at_steps_on_a_mesh() -> None:
    x = marked("data", "model")
    lazytpu.config.verify = "first"
    try:
        x.mul_(x.sum())
        lazytpu.mark_step()
    finally:
        lazytpu.config.verify = ""
    assert lazytpu.metrics.counter("verified_program") == 1
    assert torch.equal(x.cpu(), WHOLE * WHOLE.sum())


@eight_devices
def test_a_dump_has_the_shardings() -> None:
    with tempfile.TemporaryDirectory() as folder:
        lazytpu.config.dump = folder
        try:
            _ = marked("data").tan()
            lazytpu.mark_step()
        finally:
            lazytpu.config.dump = ""
        texts = [path.read_text() for path in Path(folder).rglob("*.txt")]
    assert any("on mesh (data=2, model=4) of devices 0-7" in text for text in texts)
    assert any("num_partitions=8" in text for text in texts)


@eight_devices
def test_export_is_of_the_whole_model() -> None:
    model = torch.nn.Linear(4, 8).to(lazytpu.device())
    spmd.mark_sharding(model.weight, spmd.Mesh((8,), ("model",)), ("model",))
    exported = lazytpu.export.stablehlo(torch.export.export(model, (marked("data"),)))
    want = model(marked("data")).detach().cpu()
    torch.testing.assert_close(exported(WHOLE.to(lazytpu.device())).cpu(), want)


@eight_devices
def test_compiled_functions_take_what_a_step_on_a_mesh_gave_to_all_devices() -> None:
    x, compiled = WHOLE.to(lazytpu.device()), lazytpu.jit(lambda x: x * 2 + 1)
    for _ in range(4):
        compiled(x)
    _ = marked("data") + x
    lazytpu.mark_step()
    torch.testing.assert_close(compiled(x).cpu(), WHOLE * 2 + 1)


@eight_devices
def test_torch_compile_computes_on_a_mesh_op_by_op() -> None:
    x = marked("data")

    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).cos()

    want = (WHOLE * 2).cos()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(step, backend="lazytpu")
        torch.testing.assert_close(compiled(x).cpu(), want)
    assert spmd.sharding_of(x) is not None


@eight_devices
def test_call_jax_sees_whole_tensors() -> None:
    assert torch.equal(lazytpu.call_jax(lambda x: x @ x.T, marked("data", "model")).cpu(), WHOLE @ WHOLE.T)


def test_the_disk_cache_keeps_programs_of_many_devices() -> None:
    code = """
        import torch, lazytpu
        from lazytpu import spmd
        x = torch.arange(32.0).reshape(8, 4).to(lazytpu.device())
        w = torch.ones(4, 5).to(lazytpu.device())
        spmd.mark_sharding(x, spmd.Mesh((2, 4), ("data", "model")), ("data", "model"))
        for _ in range(2):
            x.mul_(2)
            y = x @ w
            lazytpu.mark_step()
        print(y.sum().item(), spmd.sharding_of(x).spec, *map(lazytpu.metrics.counter, ("compile", "disk_hit")))
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = {"XLA_FLAGS": xla_flags.devices(8), "LAZYTPU_DISK_CACHE": "1", "LAZYTPU_DISK_CACHE_DIR": folder}
        printed = []
        for _ in range(2):
            done = run_code(code, loaded=True, **settings)
            printed.append(done.stdout.split())
            assert done.returncode == 0, done.stderr
    assert printed[0][:-2] == printed[1][:-2] == ["9920.0", "('data',", "'model')"]
    assert printed[0][-2:] == ["2", "0"] and printed[1][-2:] == ["0", "2"]
