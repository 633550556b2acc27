"""The shim for torch_xla: its names on this device, found by import, and by the runner."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lazytpu
from lazytpu import compat
from lazytpu.compat.names import MISSING
from lazytpu.runtime import platforms
from tests.support.dynamo_marks import QUIET
from tests.support.processes import run_code, run_python

compat.install("torch_xla")

import torch_xla  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.amp as xla_amp  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.core.xla_model as xm  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.debug.metrics as met  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.debug.profiler as xp  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.distributed.parallel_loader as pl  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.distributed.xla_multiprocessing as xmp  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.runtime as xr  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.utils.serialization as xser  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.utils.utils as xu  # type: ignore[import-not-found]  # noqa: E402
from torch_xla.experimental import eager_mode_context  # type: ignore[import-not-found]  # noqa: E402


def test_both_names_are_one_module() -> None:
    import lazytpu.compat.torch_xla.core.xla_model as by_full_name

    assert by_full_name is xm
    assert xm.__name__ == "lazytpu.compat.torch_xla.core.xla_model"
    assert xm.__spec__.name == xm.__name__
    compat.install("torch_xla")  # again changes nothing
    assert sys.modules["torch_xla"] is torch_xla


def test_only_known_packages_are_installed() -> None:
    with pytest.raises(ValueError, match="no shim for 'torch_xxx'"):
        compat.install("torch_xxx")


@pytest.mark.parametrize("module", [name for name in MISSING if name.startswith("torch_xla.")])
def test_a_missing_module_says_what_to_use(module: str) -> None:
    parent, _, name = module.rpartition(".")
    for statement in (f"import {module}", f"from {parent} import {name}"):
        with pytest.raises(ImportError, match="use instead: |not needed: "):
            exec(statement, {})


def test_a_missing_name_says_what_to_use() -> None:
    with pytest.raises(
        ImportError, match=r"no torch_xla\.core\.xla_model\.send; use instead: torch\.distributed\.send"
    ):
        exec("from torch_xla.core.xla_model import send", {})
    with pytest.raises(ImportError, match="cannot import name 'no_such_thing'"):
        exec("from torch_xla.core.xla_model import no_such_thing", {})
    with pytest.raises(ModuleNotFoundError, match="no torch_xla.no_such_module; see the migration guide"):
        exec("import torch_xla.no_such_module", {})
    assert not hasattr(xm, "no_such_thing")


def test_one_device(device: torch.device) -> None:
    assert xm.xla_device() == torch_xla.device() == device == torch_xla.devices()[0]
    assert xm.get_xla_supported_devices() == [str(device)]
    assert xm.get_xla_supported_devices("TPU") == []
    assert xm.xla_device_hw(device) == xr.device_type() == "CPU"
    assert (xr.world_size(), xm.xrt_world_size(), xr.global_ordinal(), xm.get_ordinal()) == (1, 1, 0, 0)
    assert xm.is_master_ordinal()
    assert xm.get_memory_info(device)["bytes_limit"] > 0
    with pytest.raises(ValueError, match="there is one device"):
        xm.xla_device(1)


def test_a_training_loop(device: torch.device) -> None:
    def train(on: Any, step: Any) -> list[float]:
        torch.manual_seed(0)
        net = nn.Linear(4, 2).to(on)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        batches = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(4)]
        loader = pl.MpDeviceLoader(batches, on) if on != "cpu" else batches
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            step(optimizer)
            losses.append(loss.detach())
        return [float(loss) for loss in losses]

    ours = train(device, xm.optimizer_step)
    assert ours == pytest.approx(train("cpu", lambda optimizer: optimizer.step()), rel=1e-5)


def test_step_closures_run_in_order_with_the_values_of_then(device: torch.device) -> None:
    seen: list[Any] = []
    x = torch.ones(2, device=device)
    xm.add_step_closure(lambda v, name: seen.append((name, v.tolist())), (x, "first"))
    x += 1
    xm.add_step_closure(lambda v: seen.append(v.tolist()), (x,))
    assert seen == []
    xm.mark_step()
    assert seen == [("first", [1.0, 1.0]), [2.0, 2.0]]
    xm.mark_step()
    assert len(seen) == 2


def test_a_loader_ends_steps_and_runs_their_closures(device: torch.device) -> None:
    seen: list[Any] = []

    def again(x: torch.Tensor) -> None:  # a closure that a closure adds is for the next step
        seen.append(int(x.sum()))
        xm.add_step_closure(again, (x + 1,))

    steps = lazytpu.metrics.counter("step")
    for i, batch in enumerate(pl.MpDeviceLoader([torch.full((1,), n) for n in range(3)], device)):
        seen.append(f"step {i}")
        if i == 0:
            xm.add_step_closure(again, (batch,))
    assert seen == ["step 0", 0, "step 1", 1, "step 2", 2]
    assert lazytpu.metrics.counter("step") - steps == 4  # one before the first batch
    with xp.StepTrace("step", step_num=3):
        torch.ones(1, device=device)
    assert seen[-1] == 3
    xm._closures.clear()
    optimizer = torch.optim.SGD(nn.Linear(2, 2).to(device).parameters(), lr=0.1)
    assert xm._fetch_gradients(optimizer) == []


def test_what_is_compiled_is_lazy_where_all_else_is_not(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    eager = []

    @torch_xla.step()
    @torch_xla.compile()
    def inside(x: torch.Tensor) -> torch.Tensor:
        eager.append(lazytpu.config.eager)
        return x + 1

    with eager_mode_context(True):
        assert inside(x).tolist() == [2, 2, 2]
        assert lazytpu.config.eager
        with pytest.raises(ZeroDivisionError), torch_xla.compile():
            raise ZeroDivisionError
        assert lazytpu.config.eager
    assert eager == [False]
    with pytest.raises(ValueError, match="XLA_FLAGS"):
        torch_xla.compile(inside, custom_compile_options={"xla_cpu_enable_fast_math": True})


@QUIET[0]
@QUIET[1]
def test_torchs_backend_for_torch_xla_is_ours(device: torch.device) -> None:
    net = nn.Linear(3, 2).to(device)
    x = torch.ones(2, 3, device=device)
    torch.testing.assert_close(torch.compile(net, backend="openxla")(x), net(x))


def test_an_unknown_platform_is_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert platforms.choose("CPU") == ""
    assert platforms.choose("XYZ") == "not one of CPU, GPU, CUDA, TPU"


def test_the_platform_comes_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = "TPU"
    code = (
        "import warnings\nwith warnings.catch_warnings(record=True) as told:\n    warnings.simplefilter('always')\n"
        "    import lazytpu.compat.torch_xla as t\nprint(t.xm.device_type(), *(w.message for w in told))\n"
        "import lazytpu\nprint(lazytpu.config.eager)"
    )
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    done = run_code(code, PJRT_DEVICE=wanted, XLA_USE_EAGER_DEBUG_MODE="1")
    told, eager = done.stdout.splitlines()
    assert eager == "True"
    ran = told.partition(" ")[0]
    assert told == ran if ran == wanted else told.startswith(f"{ran} PJRT_DEVICE={wanted}, but ")


def test_compile_is_one_graph(device: torch.device) -> None:
    x = torch.arange(4.0, device=device)
    cuts = lazytpu.metrics.counter("cut")
    compiled = torch_xla.compile(lambda x: (x * 2).sum(), full_graph=True)
    assert float(compiled(x)) == 12
    with torch_xla.compile(), torch_xla.step():
        y = x + 1
    assert lazytpu.metrics.counter("cut") - cuts >= 2
    assert y.tolist() == [1, 2, 3, 4]


def test_compile_keeps_its_limits(device: torch.device) -> None:
    x = torch.arange(4.0, device=device)

    def reads(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum().item() > 0 else x

    with pytest.raises(RuntimeError, match="full_graph"):
        torch_xla.compile(reads, full_graph=True)(x)
    once = torch_xla.compile(lambda x: x * 3 - 1, num_different_graphs_allowed=1, name="once")
    once(x)
    once(x)
    with pytest.raises(RuntimeError, match="once: 2 different graphs, 1 are allowed"):
        once(x[:2].clone())
    again = torch_xla.compile(lambda x: x.tan() * 4, max_different_graphs=1)
    again(x)
    with pytest.raises(RuntimeError, match="2 different graphs, 1 are allowed"):
        again(x[:2].clone())


def test_collectives_of_one(device: torch.device) -> None:
    x = torch.arange(6.0, device=device).reshape(2, 3)
    assert torch.equal(xm.all_reduce(xm.REDUCE_SUM, x, scale=0.5).cpu(), x.cpu() / 2)
    y = x.clone()
    assert xm.all_reduce("sum", [y], scale=2.0)[0] is y
    assert torch.equal(y.cpu(), x.cpu() * 2)
    for result in (
        xm.all_gather(x),
        xm.reduce_scatter("sum", x, 1.0, 0, 1),
        xm.all_to_all(x, 0, 1, 1),
        xm.collective_permute(x, [[0, 0]]),
    ):
        assert torch.equal(result.cpu(), x.cpu())
    assert xm.mesh_reduce("tag", 3, sum) == 3
    assert xm.rendezvous("tag", b"x") == [b"x"]
    with pytest.raises(ValueError, match="only one"):
        xm.all_to_all(x, 0, 1, 2)
    with pytest.raises(ValueError, match="reduce_type"):
        xm.all_reduce("average", x)
    with pytest.raises(ValueError, match="only one"):
        xm.all_reduce("sum", x, groups=[[0, 1]])


def test_random_state_goes_on_where_it_was(device: torch.device) -> None:
    xm.set_rng_state(42)
    first = torch.rand(3, device=device).cpu()
    state = xm.get_rng_state()
    second = torch.rand(3, device=device).cpu()
    xm.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=device).cpu(), second)
    torch_xla.manual_seed(42)
    assert torch.equal(torch.rand(3, device=device).cpu(), first)


def test_saved_files_hold_cpu_tensors(device: torch.device, tmp_path: Path) -> None:
    net = nn.Linear(2, 2).to(device)
    file = io.BytesIO()
    xm.save(net.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert {t.device.type for t in loaded.values()} == {"cpu"}
    xser.save({"w": net.weight, "n": 3}, tmp_path / "x.pt")
    again = xser.load(tmp_path / "x.pt")
    assert again["n"] == 3
    assert torch.equal(again["w"], net.weight.detach().cpu())
    assert xm.send_cpu_data_to_device([torch.ones(2), {"a": torch.ones(3)}], device)[1]["a"].device == device


def test_metrics_under_their_names(device: torch.device) -> None:
    met.clear_all()
    x = torch.ones(3).to(device)
    (x * 5 + 1).cos().tolist()
    xm.mark_step()
    assert met.counter_value("UncachedCompile") in (1, None)  # None when loaded from the disk cache
    assert met.counter_value("MarkStep") == 1
    assert met.counter_value("NoSuchCounter") is None
    assert "xla::cos" in met.counter_names()
    count, total, samples = met.metric_data("TransferToDeviceTime")
    assert count >= 1
    assert total > 0
    assert len(samples) == count
    assert "Metric: TransferToDeviceTime" in met.short_metrics_report()
    assert "Counter: xla::cos" not in met.short_metrics_report()
    assert met.executed_fallback_ops() == []


def test_one_process(device: torch.device) -> None:
    calls: list[Any] = []
    xmp.spawn(lambda index, name: calls.append((index, name)), args=("x",), nprocs=1)
    torch_xla.launch(lambda index: calls.append(index))
    assert calls == [(0, "x"), 0]
    with pytest.raises(ValueError, match="join=False"):
        xmp.spawn(lambda index: None, nprocs=8, join=False)
    net = xmp.MpModelWrapper(nn.Linear(2, 2)).to(device)
    assert net.weight.device == device


def test_loaders(device: torch.device) -> None:
    batches = xu.SampleGenerator((torch.ones(2), torch.zeros(1)), 3)
    assert [x.device for x, _ in pl.ParallelLoader(batches, [device]).per_device_loader(device)] == [device] * 3
    assert len(pl.MpDeviceLoader(batches, device)) == 3
    with pytest.raises(ValueError, match="one device"):
        pl.ParallelLoader(batches, [device, device])
    with pytest.raises(TypeError, match="no_such_option"):
        pl.MpDeviceLoader(batches, device, no_such_option=1)


def test_mixed_precision(device: torch.device) -> None:
    net = nn.Linear(4, 4).to(device)
    optimizer = xla_amp.syncfree.Adam(net.parameters(), lr=0.1)
    scaler = xla_amp.GradScaler(init_scale=128.0)  # 2 ** 16 is beyond float16
    with xla_amp.autocast(device, dtype=torch.float16):
        out = net(torch.ones(2, 4, device=device))
    assert out.dtype == torch.float16
    before = net.weight.detach().cpu()
    scaler.scale(out.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(net.weight.detach().cpu(), before)


def test_graphs_can_be_looked_at(device: torch.device) -> None:
    x = torch.ones(2, device=device) + 1
    assert "aten.add" in torch_xla._XLAC._get_xla_tensors_text([x])
    assert "digraph" in torch_xla._XLAC._get_xla_tensors_dot([x])
    assert "HloModule" in torch_xla._XLAC._get_xla_tensors_hlo([x])
    assert "stablehlo.add" in xm.get_stablehlo([x])
    assert xm.get_stablehlo_bytecode([x])[:20].count(b"StableHLO_v") == 1


def test_the_precision_of_products_is_set(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "matmul_precision", "highest")
    torch_xla.backends.set_mat_mul_precision("default")
    assert torch_xla.backends.get_mat_mul_precision() == lazytpu.config.matmul_precision == "default"
    with pytest.raises(ValueError, match="highest"):
        torch_xla.backends.set_mat_mul_precision("fastest")
    assert torch_xla.xr is torch_xla.runtime is xr


@QUIET[0]
@QUIET[1]
def test_loops_are_ops(device: torch.device) -> None:
    from torch_xla.experimental.fori_loop import fori_loop, while_loop  # type: ignore[import-not-found]
    from torch_xla.experimental.scan import scan  # type: ignore[import-not-found]
    from torch_xla.experimental.scan_layers import scan_layers  # type: ignore[import-not-found]

    weight = torch.ones(3, device=device, requires_grad=True)
    steps = torch.arange(12.0, device=device).reshape(4, 3)
    carry, before = scan(lambda c, x: (c + x * weight, c), torch.zeros(3, device=device), steps)
    (carry.sum() + before.sum()).backward()
    assert before.tolist() == [[0, 0, 0], [0, 1, 2], [3, 5, 7], [9, 12, 15]]
    assert weight.grad is not None
    assert weight.grad.tolist() == [30, 40, 50]
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]).to(device)
    x = torch.randn(2, 4, device=device)
    torch.testing.assert_close(scan_layers(layers, x).cpu(), nn.Sequential(*layers)(x).cpu())
    start, end = (torch.tensor([n], device=device) for n in (2, 52))
    assert fori_loop(start, end, lambda a: a + 1, torch.ones(1, device=device))[1].tolist() == [51]
    carried = torch.tensor(5, device=device), torch.zeros(2, device=device)
    step = torch.ones(2, device=device)
    _, total = while_loop(lambda n, x, w: n > 0, lambda n, x, w: (n - 1, x + w), carried, (step,))
    assert total.tolist() == [5, 5]


def test_dlpack_comes_to_the_device(device: torch.device) -> None:
    from torch_xla.utils import dlpack  # type: ignore[import-not-found]

    there = dlpack.from_dlpack(torch.arange(3.0))
    assert there.device == device
    assert dlpack.from_dlpack(dlpack.to_dlpack(there)).tolist() == [0, 1, 2]


def test_names_of_variables_are_there() -> None:
    from torch_xla.core import xla_env_vars as xenv  # type: ignore[import-not-found]

    assert xenv.PJRT_DEVICE == "PJRT_DEVICE"
    assert xenv.TPU_MESH_CTLER_ADDR == "TPU_MESH_CONTROLLER_ADDRESS"


SCRIPT = """
import torch, torch_xla
import torch_xla.core.xla_model as xm
t = torch.ones(2, 2, device=xm.xla_device())
print(t.device, t + t, t.mm(t).device.type, torch.device("xla:0") == t.device, t.is_xla)
xm.mark_step()
"""


def test_the_runner_needs_no_edit(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    files = {name: tmp_path / name for name in ("graphs", "metrics")}
    done = run_python(
        *("-m", "lazytpu", "run", script),
        cwd=tmp_path,
        XLA_SAVE_TENSORS_FILE=str(files["graphs"]),
        XLA_SAVE_TENSORS_FMT="text",
        XLA_METRICS_FILE=str(files["metrics"]),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("xla:0 tensor([[2., 2.],\n        [2., 2.]], device='xla:0') xla True True")
    assert "aten.add" in files["graphs"].read_text()
    assert "Counter: MarkStep" in files["metrics"].read_text()
