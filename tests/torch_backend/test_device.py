"""The device as torch sees it: its name, its module ``torch.tpu``, ``torch.accelerator``, and what an import checks."""

from __future__ import annotations

import re
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import torch

import lazytpu
from lazytpu import versions
from lazytpu.dispatch import autocast
from lazytpu.errors import VersionError
from tests.support.processes import run_code, run_python

ROOT = Path(__file__).parents[2]


# --- device -------------------------------------------------------------------------------------------------


def test_there_is_one_device():
    assert lazytpu.device() == torch.device("tpu", 0) and lazytpu.device_count() == 1 and lazytpu.is_available()
    with pytest.raises(ValueError, match="there is one device"):
        lazytpu.device(1)


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.ones(2, device="tpu:1"),
        lambda: torch.empty(2, device="tpu:1"),
        lambda: torch.ones(2).to("tpu:1"),
        lambda: torch.ones(2, device="tpu").to("tpu:1"),
        lambda: torch.zeros_like(torch.ones(2), device="tpu:1"),
        lambda: torch.tensor([1.0], device="tpu:1"),
        lambda: torch.tpu.set_device(1),
        lambda: torch.accelerator.set_device_index(1),
        lambda: torch.tpu.device(1),
    ],
)
def test_a_device_that_is_not_there_is_refused(use):
    with pytest.raises(RuntimeError, match="invalid device ordinal: there is one device, tpu:0, not number 1"):
        use()


def test_default_device():
    torch.set_default_device("tpu")
    try:
        made = torch.arange(3)
        layer = torch.nn.Linear(2, 2)
        assert made.is_tpu and layer.weight.is_tpu
        assert repr(made) == "tensor([0, 1, 2], device='tpu:0')"
    finally:
        torch.set_default_device(None)  # the device that was in force would stay as a mode
    with torch.device("tpu"):
        assert torch.ones(2).is_tpu and torch.tensor([1.0]).is_tpu
        assert not torch.ones(2, device="cpu").is_tpu
    assert not torch.ones(2).is_tpu


# --- torch.tpu ----------------------------------------------------------------------------------------------


def test_module_describes_the_device():
    module = torch.get_device_module("tpu")
    assert module is torch.tpu is sys.modules["torch.tpu"]
    assert module.is_available() and module.is_initialized() and module.device_count() == 1
    assert module.current_device() == 0 and not module._is_in_bad_fork()
    module.set_device(0)
    module.set_device("tpu:0")
    with pytest.raises(ValueError, match="expected a tpu device, but got cpu"):
        module.set_device("cpu")
    with module.device(0), module.device("tpu"), module.device_of(torch.ones(1, device="tpu")):
        assert module.current_device() == 0
    properties = module.get_device_properties()
    assert properties.name == module.get_device_name(0) and properties.platform == lazytpu.platform()
    assert properties.total_memory > 1 << 20
    assert module.get_device_capability() == (1, 0)
    assert module.is_bf16_supported()


def test_module_exports_what_other_device_modules_do():
    expected = {n for n in torch.mtia.__all__ if not re.search("graph|snapshot|history|memory_observer|attach", n)}
    missing = {n for n in expected if not hasattr(torch.tpu, n)} - {"DeferredMtiaCallError", "MTIAGraph"}
    assert missing == set()


def test_a_stream_has_what_torchs_have(device):
    stream = torch.tpu.current_stream()
    assert (stream.device, stream.device_index, stream.stream_id) == (device, 0, 0)
    assert stream.device_type == torch.accelerator.current_stream().device_type
    assert not torch.tpu.is_current_stream_capturing()


def test_synchronize_runs_what_is_pending(device):
    x = torch.ones(3, device=device) + 1
    cuts = lazytpu.metrics.counter("cut")
    torch.tpu.synchronize()
    assert lazytpu.metrics.counter("cut") == cuts + 1
    y = x + 1
    torch.accelerator.synchronize()
    assert lazytpu.metrics.counter("cut") == cuts + 2
    assert y.tolist() == [3, 3, 3] and lazytpu.metrics.counter("cut") == cuts + 2


def test_memory_is_counted(device):
    x = torch.zeros(1 << 18, device=device)
    small = torch.zeros(4, device=device)
    lazytpu.wait()
    held = torch.tpu.memory_allocated()
    assert held >= x.nbytes + small.nbytes == (1 << 20) + 16
    assert torch.accelerator.memory_allocated() == torch.tpu.memory_allocated() == torch.tpu.memory_reserved()
    assert torch.accelerator.max_memory_allocated() >= torch.tpu.memory_allocated()
    free, total = torch.tpu.mem_get_info()
    assert total - free == torch.tpu.memory_allocated() and torch.accelerator.get_memory_info() == (free, total)
    torch.tpu.empty_cache()
    torch.accelerator.empty_cache()
    torch.tpu.reset_peak_memory_stats()
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    del x
    small.add_(1)
    lazytpu.wait()  # the results of the last graph live until then
    assert torch.tpu.memory_allocated() == held - (1 << 20)


def test_random_state(device):
    torch.manual_seed(3)
    assert torch.tpu.initial_seed() == 3
    first = torch.rand(3, device=device)
    state = torch.tpu.get_rng_state()
    second = torch.rand(3, device=device)
    torch.tpu.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=device), second) and not torch.equal(first, second)
    torch.tpu.manual_seed_all(3)
    assert torch.equal(torch.rand(3, device=device), first)
    states = torch.tpu.get_rng_state_all()
    with torch.random.fork_rng(device_type="tpu"):
        inside = torch.rand(3, device=device)
    assert torch.equal(torch.rand(3, device=device), inside) and torch.equal(inside, second)
    torch.tpu.set_rng_state_all(states)
    assert torch.equal(torch.rand(3, device=device), second)
    assert torch.tpu.seed() == torch.tpu.initial_seed() != 3


def test_streams_and_events(device):
    stream = torch.tpu.Stream()
    assert stream == torch.tpu.current_stream() == torch.tpu.default_stream()
    start, end = torch.tpu.Event(enable_timing=True), torch.tpu.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="must be recorded"):
        start.elapsed_time(end)
    start.record()
    with torch.tpu.stream(stream) as entered:
        x = torch.ones(8, device=device) * 2
    entered.wait_stream(torch.tpu.current_stream())
    end.record()
    entered.wait_event(end)
    end.wait()
    cuts = lazytpu.metrics.counter("cut")
    assert start.elapsed_time(end) > 0 and end.query() and x.sum().item() == 16
    assert lazytpu.metrics.counter("cut") == cuts + 1  # the sum alone: the event ran the rest
    y, cuts = torch.ones(2, device=device) + 1, lazytpu.metrics.counter("cut")
    event = stream.record_event()
    assert lazytpu.metrics.counter("cut") == cuts  # without timing, an event only notes the moment
    torch.accelerator.current_stream().wait_event(event)  # which takes the device of an event from C++
    assert isinstance(event, torch.Event) and event.device.type == "tpu"
    event.synchronize()
    assert lazytpu.metrics.counter("cut") == cuts + 1 and y.tolist() == [2.0, 2.0]
    stream.synchronize()
    with pytest.raises(RuntimeError, match="enable_timing"):
        torch.tpu.Event().elapsed_time(end)


# --- torch.accelerator --------------------------------------------------------------------------------------


def test_accelerator_is_this_device():
    assert torch.accelerator.is_available() and torch.accelerator.current_accelerator() == torch.device("tpu")
    assert torch.accelerator.device_count() == 1 and torch.accelerator.current_device_index() == 0
    torch.accelerator.set_device_index(0)
    with torch.accelerator.device_index(0):
        assert torch.accelerator.current_device_index() == 0
    assert torch.bfloat16 in torch.accelerator.get_device_capability()["supported_dtypes"]
    assert torch.ones(2).to(torch.accelerator.current_accelerator()).is_tpu
    assert torch.device(0) == torch.device("tpu:0")


# --- autocast -----------------------------------------------------------------------------------------------


def matrices(device, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.rand(3, 3, device=device, dtype=dtype), torch.rand(3, 3, device=device, dtype=dtype)


LOWER = {
    "matmul": lambda a, b: a @ b,
    "linear": torch.nn.functional.linear,
    "conv2d": lambda a, b: torch.nn.functional.conv2d(a[None, None], b[None, None]),
    "conv_transpose2d": lambda a, b: torch.nn.functional.conv_transpose2d(a[None, None], b[None, None]),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "addmm": lambda a, b: torch.addmm(a, a, b),
    "baddbmm": lambda a, b: torch.baddbmm(a[None], a[None], b[None]),
    "attention": lambda a, b: torch.nn.functional.scaled_dot_product_attention(a[None], b[None], b[None]),
}
FULL = {
    "exp": lambda a, b: a.exp(),
    "pow": lambda a, b: a**2,
    "pow_tensor": torch.pow,
    "softmax": lambda a, b: a.softmax(-1),
    "sum": lambda a, b: a.sum(),
    "sum_dim": lambda a, b: a.sum(0),
    "cumsum": lambda a, b: a.cumsum(0),
    "norm": lambda a, b: a.norm(),
    "norm_dim": lambda a, b: a.norm(dim=1),
    "vector_norm": lambda a, b: torch.linalg.vector_norm(a),
    "layer_norm": lambda a, b: torch.nn.functional.layer_norm(a, (3,)),
    "mse_loss": torch.nn.functional.mse_loss,
    "nll_loss": lambda a, b: torch.nn.functional.nll_loss(a, torch.arange(3, device=a.device)),
    "log": lambda a, b: a.log(),
    "cosine_similarity": torch.nn.functional.cosine_similarity,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", LOWER)
def test_autocast_lowers(device, op, dtype):
    with torch.autocast("tpu", dtype=dtype):
        assert LOWER[op](*matrices(device)).dtype == dtype
        assert LOWER[op](*matrices(device, torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("op", FULL)
def test_autocast_keeps_range(device, op):
    low = matrices(device, torch.bfloat16)
    with torch.autocast("tpu", dtype=torch.bfloat16):
        out = FULL[op](*low)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.cpu(), FULL[op](*(m.cpu().float() for m in low)))


def test_autocast_widest_and_named_dtypes(device):
    a, b = matrices(device)
    low = a.bfloat16()
    with torch.autocast("tpu"):
        assert torch.dot(low[0], b[0]).dtype == torch.float32
        assert torch.dot(low[0], low[1]).dtype == torch.bfloat16
        assert torch.addcmul(low, low, b).dtype == torch.float32
        assert low.sum(dtype=torch.float16).dtype == torch.float16
        assert low.softmax(0, torch.float64).dtype == torch.float64
        assert (low + 1).dtype == torch.bfloat16 and (low + b).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            torch.nn.functional.binary_cross_entropy(a, b)
        with torch.autocast("tpu", enabled=False):
            assert (a @ b).dtype == torch.float32
    assert (a @ b).dtype == torch.float32
    with torch.tpu.amp.autocast(dtype=torch.float16):
        assert (a @ b).dtype == torch.float16


def test_autocast_trains_as_on_the_cpu():
    def train(kind):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        x, y = torch.randn(16, 4).to(kind), torch.randn(16, 1).to(kind)
        net.to(kind)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses = []
        for _ in range(5):
            with torch.autocast(kind, dtype=torch.bfloat16):
                out = net(x)
                loss = torch.nn.functional.mse_loss(out, y)
            assert out.dtype == torch.bfloat16 and loss.dtype == torch.float32
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert net[0].weight.grad.dtype == torch.float32
        return losses

    expected = train("cpu")
    assert train("tpu") == pytest.approx(expected, rel=2e-2)
    assert expected[-1] < expected[0]


def test_autocast_names_ops_that_exist():
    names = [*autocast.LOWER_PRECISION, *autocast.FLOAT32, *autocast.FLOAT32_RESULT, *autocast.WIDEST]
    names += [*autocast.FLOAT32_NORM, *autocast.FLOAT32_NORM.values()]
    assert len(set(names)) == len(names)
    assert [n for n in names if not torch._C._dispatch_has_kernel(f"aten::{n}")] == []


def test_custom_function_under_autocast(device):
    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="tpu", cast_inputs=torch.float32)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="tpu")
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 2 * x

    x = torch.tensor([3.0], device=device, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("tpu"):
        y = Square.apply(x)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad.tolist() == [6.0]


@pytest.mark.parametrize(
    "make", [lambda: torch.amp.GradScaler("tpu", init_scale=8.0), lambda: torch.tpu.amp.GradScaler(init_scale=8.0)]
)
def test_grad_scaler(device, make):
    scaler, w = make(), torch.nn.Parameter(torch.tensor([2.0], device=device))
    optimizer = torch.optim.SGD([w], lr=0.5)
    for factor, after in ((1.0, 1.5), (float("inf"), 1.5), (1.0, 1.0)):
        optimizer.zero_grad()
        scaler.scale((w * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert w.tolist() == [after]
    assert scaler.get_scale() == 4.0  # halved once, by the infinite gradient


# --- what an import checks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "version"), [("torch", "2.9.1+cu128"), ("torch", "3.0.0"), ("jax", "0.4.35"), ("jax", "1.0.0")]
)
def test_version_outside_the_range(package, version):
    with pytest.raises(VersionError) as caught:
        versions.check_version(package, version)
    text = str(caught.value)
    assert f"{package} {version} is not supported" in text and f"pip install '{package}>=" in text
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize(("package", "version"), [("torch", "2.10.0"), ("torch", "2.14.0a0+git123"), ("jax", "0.10.2")])
def test_version_inside_the_range(package, version):
    versions.check_version(package, version)


def test_import_checks_versions_first():
    done = run_code("import torch; torch.__version__ = '2.4.0'; del torch._C._acc; import lazytpu")
    assert done.returncode != 0
    assert "VersionError: torch 2.4.0 is not supported" in done.stderr


def test_import_checks_private_names():
    done = run_code("import torch; del torch._C._acc.create_empty_tensor; import lazytpu")
    assert "VersionError: torch 2" in done.stderr and "has no torch._C._acc.create_empty_tensor" in done.stderr


def test_private_names_are_listed():
    """Every private name of torch in the package is among those that the import checks."""
    named = re.compile(r"\btorch((?:\.\w+)*\._\w+(?:\.\w+)*)")
    known = versions.PRIVATE_TORCH + versions.PRIVATE_WHEN_USED
    missing = set()
    for path in (ROOT / "lazytpu").rglob("*.py"):
        for line in path.read_text().splitlines():
            for match in named.findall(line.partition("#")[0]):
                name = match[1:]
                if (
                    "__" not in name
                    and not name.startswith("ops.aten._")
                    and not any(name == k or name.startswith(k + ".") or k.startswith(name + ".") for k in known)
                ):
                    missing.add(f"{name} ({path.name})")
    assert missing == set()


def test_supported_versions_are_those_of_the_package():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lowest = dict(
        re.fullmatch(r"(torch|jax)>=([\d.]+).*", d).groups() for d in dependencies if re.match(r"(torch|jax)>", d)
    )
    assert lowest == {name: f"{first[0]}.{first[1]}" for name, (first, _) in versions.SUPPORTED.items()}


@pytest.mark.parametrize("other", ["npu", "tpu"])
def test_another_backend_has_the_slot(other):
    done = run_code(
        f"import torch; torch.utils.rename_privateuse1_backend({other!r})\n"
        f"torch._register_device_module({other!r}, type(torch)('x')); import lazytpu"
    )
    assert f"VersionError: torch's slot for devices, PrivateUse1, is taken by another backend, {other!r}" in done.stderr
    assert "  fix   import lazytpu in a process that does not import" in done.stderr


@pytest.mark.parametrize("name", ["xla", "lazy_thing"])
def test_the_device_can_have_another_name(name):
    done = run_code(
        f"""
        import io, torch, lazytpu
        x = torch.ones(2, device={name!r}, requires_grad=True)
        (x * 3).sum().backward()
        print(x.grad, lazytpu.device(), torch.accelerator.current_accelerator())
        net = torch.nn.Linear(2, 1).to({name!r})
        f = io.BytesIO(); torch.save(net.state_dict(), f); f.seek(0)
        print(torch.load(f)["weight"].device)
        with torch.autocast({name!r}):
            print(net(x).dtype)
        print(torch.get_device_module({name!r}).device_count())
        """,
        LAZYTPU_DEVICE_NAME=name,
    )
    assert done.stdout.splitlines() == [
        f"tensor([3., 3.], device='{name}:0') {name}:0 {name}",
        f"{name}:0",
        "torch.bfloat16",
        "1",
    ], done.stderr


def test_import_time():
    """The processor time that the import adds to those of torch and jax; the best of three, as others compute here.

    Half a second, or half of what torch and jax take themselves on a slow machine.
    """
    code = """
        import time
        began = time.process_time()
        import torch, jax, jax.numpy
        start = time.process_time()
        import lazytpu
        print(time.process_time() - start, start - began)
    """
    times = []
    for _ in range(3):
        ours, theirs = map(float, run_python("-c", textwrap.dedent(code), PYTHONDONTWRITEBYTECODE="").stdout.split())
        times.append((ours, theirs))
        if ours < max(0.5, 0.5 * theirs):
            return
    pytest.fail(f"the import took {times} s")
