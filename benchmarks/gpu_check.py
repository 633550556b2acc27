#!/usr/bin/env python
"""What to run on a machine with a GPU:  PYTHONPATH=. python benchmarks/gpu_check.py [--json OUT] [--seconds 420]

Runs, within the given time: the tiny tests; a sample of torch's operator database against CPU eager; and the
training step of a few models on the device (recorded, and through `lazytpu.compile`) beside CUDA eager.  Prints
a table and writes the same as JSON.  Needs a jax with CUDA; the CUDA column needs a torch with CUDA, and is left
out without one.  Works on the CPU too, for a try.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import torch
import torch.nn.functional as F
from torch import nn

import lazytpu

ROOT = Path(__file__).parents[1]
OPS = (
    "add,mul,div,exp,log,sum,mean,amax,argmax,cumsum,sort,topk,gather,scatter_add,index_put,where,matmul,bmm,addmm,"
    "linalg.qr,linalg.cholesky,fft.fft,nn.functional.conv2d,nn.functional.max_pool2d,nn.functional.layer_norm,"
    "nn.functional.batch_norm,softmax,log_softmax,nn.functional.cross_entropy,nn.functional.embedding,"
    "nn.functional.gelu,nn.functional.interpolate"
)


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).split(d, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(x)


def convolutional() -> nn.Module:
    def layer(i: int, o: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]

    return nn.Sequential(
        *layer(3, 64, 2),
        *layer(64, 128, 2),
        *layer(128, 256, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 10)), (256, 1024)),
    "convolutional": (convolutional, (64, 3, 64, 64)),
    "transformer": (
        lambda: nn.Sequential(*[Block(512, 8) for _ in range(6)], nn.Flatten(), nn.Linear(512 * 128, 10)),
        (16, 128, 512),
    ),
}


def step_ms(name: str, device: torch.device, compiled: bool) -> tuple[float, float]:
    """Median milliseconds of a training step, and the loss after the last one."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    net = make().to(device)
    x, y = torch.randn(shape).to(device), torch.randint(0, 10, shape[:1]).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    lazy = device.type != "cuda"

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = lazytpu.compile(step) if compiled else step
    times = []
    for i in range(35):
        start = time.perf_counter()
        loss = run(x, y)
        if lazy and not compiled:
            lazytpu.mark_step()
        if lazy:
            lazytpu.wait()
        else:
            torch.cuda.synchronize()
        if i >= 5:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3, float(loss)


def operators(seconds: float) -> dict[str, str]:
    """Name to ``pass`` or the error, for the first samples of each operator, gradients included."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.utils._pytree import tree_flatten, tree_map

    device, wanted, found = lazytpu.device(), set(OPS.split(",")), {}
    end = time.monotonic() + seconds

    def move(x: Any) -> Any:
        return x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    for op in op_db:
        if op.name not in wanted or op.variant_test_name or time.monotonic() > end:
            continue
        try:
            for _, sample in zip(range(3), op.sample_inputs("cpu", torch.float32, requires_grad=True), strict=False):
                args = (sample.input, *sample.args)
                want, got = op(*args, **sample.kwargs), op(*tree_map(move, args), **tree_map(move, sample.kwargs))
                for a, b in zip(tree_flatten(got)[0], tree_flatten(want)[0], strict=True):
                    if isinstance(b, torch.Tensor):
                        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-3, atol=1e-3, equal_nan=True)
            found[op.name] = "pass"
        except Exception as error:  # the check goes on with the next operator
            found[op.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "gpu_check.json")
    parser.add_argument("--seconds", type=float, default=420)
    options = parser.parse_args()
    start = time.monotonic()
    tiny = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/test_tiny.py"], cwd=ROOT, check=False)
    report: dict[str, Any] = {
        "device": str(jax.devices()[0].device_kind),
        "versions": {"torch": torch.__version__, "jax": jax.__version__, "lazytpu": lazytpu.__version__},
        "tiny_tests": "pass" if tiny.returncode == 0 else "fail",
        "models": {},
    }
    for name in MODELS:
        columns = {"recorded": (lazytpu.device(), False), "compiled": (lazytpu.device(), True)}
        if torch.cuda.is_available():
            columns["cuda eager"] = (torch.device("cuda"), False)
        row = report["models"][name] = {}
        for column, (device, compiled) in columns.items():
            if time.monotonic() - start > options.seconds:
                break
            ms, loss = step_ms(name, device, compiled)
            row[column] = {"step_ms": round(ms, 3), "loss": round(loss, 5)}
            print(f"{name:14s} {column:10s} {ms:9.3f} ms  loss {loss:.5f}", flush=True)
    report["operators"] = operators(options.seconds - (time.monotonic() - start))
    failed = {name: what for name, what in report["operators"].items() if what != "pass"}
    print(
        f"{len(report['operators'])} operators: {len(report['operators']) - len(failed)} passed, {len(failed)} failed"
    )
    for name, what in failed.items():
        print(f"  {name}: {what}")
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(bool(failed) or tiny.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
