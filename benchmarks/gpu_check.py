#!/usr/bin/env python
"""What to run on a machine with a GPU:  python -m benchmarks.gpu_check [--json OUT] [--seconds 420]

Runs, within the given time: the tiny tests; a sample of torch's operator database against CPU eager; and the
training step of a few models on the device (recorded, and through `lazytpu.compile`) beside CUDA eager; and, in a
world of one process, training with DDP, FSDP2 and tensor parallelism beside the CPU with Gloo.  Prints a table and
writes the same as JSON.  Needs a jax with CUDA; the CUDA column needs a torch with CUDA, and is left
out without one.  Works on the CPU too, for a try.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import torch

import lazytpu
from benchmarks.models import LARGE
from benchmarks.page import RESULTS, ROOT
from benchmarks.torch_step import backend, time_model

COLUMNS = {"recorded": "lazytpu", "compiled": "lazytpu-compile", "cuda eager": "cuda"}
WAYS = ("ddp", "fsdp", "tp")
_RUN_S = 0.3
OPS = (
    "add,mul,div,exp,log,sum,mean,amax,argmax,cumsum,sort,topk,gather,scatter_add,index_put,where,matmul,bmm,addmm,"
    "linalg.qr,linalg.cholesky,fft.fft,nn.functional.conv2d,nn.functional.max_pool2d,nn.functional.layer_norm,"
    "nn.functional.batch_norm,softmax,log_softmax,nn.functional.cross_entropy,nn.functional.embedding,"
    "nn.functional.gelu,nn.functional.interpolate"
)


def step_ms(name: str, column: str) -> tuple[float, float]:
    """Median milliseconds of a training step, and the loss of the first one."""
    found = time_model(name, backend(COLUMNS[column]), run_s=_RUN_S)
    return found.step_ms, found.first_loss


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


def world_of_one(how: str, device: str) -> list[float]:
    """Return the first and the last loss of the example that torchrun starts in one process."""
    script = ROOT / "examples/train_gpt_torchrun.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(script)]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*command, "--how", how, "--device", device],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"loss ([0-9.]+) to ([0-9.]+)", done.stdout)
    return [float(x) for x in found.groups()] if found else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu_check.json")
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
    for name in LARGE:
        row = report["models"][name] = {}
        for column in COLUMNS:
            if time.monotonic() - start > options.seconds:
                break
            if column == "cuda eager" and not torch.cuda.is_available():
                continue
            ms, loss = step_ms(name, column)
            row[column] = {"step_ms": round(ms, 3), "first_loss": round(loss, 5)}
            print(f"{name:14s} {column:10s} {ms:9.3f} ms  first loss {loss:.5f}", flush=True)
    report["operators"] = operators(options.seconds - (time.monotonic() - start))
    report["world of one"] = worlds = {}
    for how in WAYS:
        worlds[how] = [world_of_one(how, device) for device in (lazytpu.device().type, "cpu")]
        print(f"world of one, {how}: losses {worlds[how][0]}, on the CPU {worlds[how][1]}", flush=True)
    wrong = [how for how, (here, there) in worlds.items() if len(here) < 2 or math.dist(here, there) > 1e-3]
    failed = {name: what for name, what in report["operators"].items() if what != "pass"}
    print(
        f"{len(report['operators'])} operators: {len(report['operators']) - len(failed)} passed, {len(failed)} failed"
    )
    for name, what in failed.items():
        print(f"  {name}: {what}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(bool(failed or wrong) or tiny.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
