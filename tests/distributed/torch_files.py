"""Run torch's own test files of torch.distributed on the CPU with Gloo and on the device, with torch's own harness.

    python -m tests.distributed.torch_files DIR                      # DIR: test/distributed of a checkout of pytorch
    python -m tests.distributed.torch_files DIR --only test_parallelize_api --test test_linear

The files are not part of this project.  Their harness starts a process a rank and asks how many devices there are; here
the CPU, or the device, has four, or eight where a test wants them.  Where files name CUDA, they name the CPU, or the
device, here.  A row is printed for each file: how many tests passed, failed and were skipped on either, and the names
of those that pass on the CPU alone.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

RANKS, MOST = 4, 8
FILES = (
    *(f"_composable/fsdp/test_fully_shard_{name}" for name in ("training", "init", "state_dict", "clip_grad_norm_")),
    "_composable/fsdp/test_fully_shard_mixed_precision",
    *(f"tensor/test_{name}" for name in ("dtensor", "redistribute", "tensor_ops", "random_ops")),
    *(f"tensor/parallel/test_{name}" for name in ("tp_examples", "tp_style", "parallelize_api")),
    *(f"checkpoint/test_{name}" for name in ("fsdp_model_state", "state_dict")),
)
_LIMIT_S, _TEST_LIMIT_S = 3000, 280
_LINE = "OUTCOME "
_OUTCOMES = {0: "passed", 3: "skipped", 4: "failed"}  # by exit code
_forked: list[dict[str, Any]] = []  # what modules want to be called at forks


def prepare(kind: str, ranks: int = RANKS) -> str:
    """Have torch's harness use so many devices of a kind; return its name."""
    import torch
    import torch.distributed as dist

    if kind == "device":
        register, os.register_at_fork = os.register_at_fork, lambda **calls: _forked.append(calls)
        importlib.import_module("lazytpu")
        os.register_at_fork = register
    from torch.testing._internal import common_cuda, common_distributed, common_fsdp, common_utils
    from torch.testing._internal.distributed._tensor import common_dtensor

    def always(_: int, **__: object) -> Callable[[Any], Any]:
        return lambda test: test

    common_distributed.skip_if_lt_x_gpu = common_dtensor.skip_if_lt_x_gpu = always
    common_fsdp.DEVICE_COUNT = common_dtensor.NUM_DEVICES = ranks
    torch.accelerator.device_count = lambda: ranks
    common_utils.TEST_CUDA = common_cuda.TEST_CUDA = True  # for tests that name CUDA
    name = "cpu"
    if kind == "cpu":
        torch.cpu.device_count, torch.cpu.current_device = lambda: ranks, lambda: 0
    else:
        name = torch.accelerator.current_accelerator().type
        getattr(torch, name).device_count = lambda: ranks
        backend = f"cpu:gloo,{name}:{dist.Backend.default_device_backend_map[name]}"
        common_dtensor.DTensorTestBase.backend = property(lambda _: backend)
        common_fsdp.DISTRIBUTED_BACKEND = backend
    common_fsdp.DEVICE_TYPE = common_dtensor.DEVICE_TYPE = name
    common_dtensor.DEVICE_COUNT = MOST
    for case in (common_distributed.MultiProcessTestCase, common_fsdp.FSDPTest):
        case._spawn_processes = _fork  # what takes long to import is imported once
        _tell_rank(case)
    return name


def _fork(test: Any) -> None:
    test._start_processes(multiprocessing.get_context("fork").Process)


def _tell_rank(case: Any) -> None:
    """Let a process of the harness know its rank, as a launcher does."""
    run = vars(case)["_run"].__func__

    def told(cls: Any, rank: int, test: str, *args: Any, **kwargs: Any) -> Any:
        for calls in _forked:  # this fork is a start to them
            os.register_at_fork(**calls)
        if "lazytpu" in sys.modules:
            sys.modules["lazytpu.torch_backend.fork"]._home_process = os.getpid()
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(cls(test).world_size))
        faulthandler.dump_traceback_later(_TEST_LIMIT_S, exit=True)
        return run(cls, rank, test, *args, **kwargs)

    case._run = classmethod(told)


def here(file: Path, kind: str, only: str, ranks: int) -> None:
    """Run a file's tests in this process and those that it starts; print a line of JSON for each."""
    name = prepare(kind, ranks)
    sys.path.insert(0, str(file.parent))
    suite = unittest.defaultTestLoader.loadTestsFromModule(_named(file, name))
    tests = [t for t in _flat(suite) if only in t.id() and not type(t).__name__.startswith("_")]
    for test in tests:
        child = multiprocessing.get_context("fork").Process(target=_run, args=(test,))
        child.start()  # what a test leaves in its process is not there for the next
        child.join()
        outcome = _OUTCOMES.get(child.exitcode, "failed")
        print(f"{_LINE}{json.dumps(['.'.join(test.id().split('.')[-2:]), outcome])}", flush=True)


def _run(test: unittest.TestCase) -> None:
    """Run one test; end this process with what became of it."""
    if "lazytpu" in sys.modules:
        sys.modules["lazytpu.torch_backend.fork"]._home_process = os.getpid()
    found = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite([test]))
    failed = bool(found.failures or found.errors or found.unexpectedSuccesses)
    sys.stdout.flush()
    sys.stderr.flush()
    outcome = "failed" if failed else "skipped" if found.skipped else "passed"
    os._exit(next(code for code, name in _OUTCOMES.items() if name == outcome))


def _named(file: Path, device: str) -> ModuleType:
    """Return a file's module, in which a device has the place of CUDA."""
    import torch

    module = sys.modules[file.stem] = ModuleType(file.stem)
    module.__file__ = str(file)
    program = re.sub(r'(?<!== ")\bcuda\b' if device == "cpu" else r"\bcuda\b", device, file.read_text())
    kind, torch.accelerator.current_accelerator = torch.accelerator.current_accelerator, lambda: torch.device(device)
    exec(compile(program, str(file), "exec"), vars(module))
    torch.accelerator.current_accelerator = kind
    return module


def _flat(suite: Any) -> list[Any]:
    return [t for part in suite for t in _flat(part)] if isinstance(suite, unittest.TestSuite) else [suite]


def outcomes(file: Path, kind: str, only: str, ranks: int, log: Path | None) -> dict[str, str]:
    """Run a file's tests in a process of their own; return what became of each."""
    root = str(Path(__file__).parents[2])
    settings = {"OMP_NUM_THREADS": "1", "LAZYTPU_DISK_CACHE": "0", "JAX_PLATFORMS": "cpu"}
    settings |= {"XLA_FLAGS": "--xla_backend_optimization_level=0", "PYTHONPATH": root, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "tests.distributed.torch_files", str(file), "--here", kind, "--test", only]
    command += ["--ranks", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        log = log or Path(folder) / "log"
        with log.open("w") as file_of_log, contextlib.suppress(subprocess.TimeoutExpired):
            both = {"stdout": file_of_log, "stderr": subprocess.STDOUT}
            subprocess.run(command, env={**os.environ, **settings}, cwd=root, timeout=_LIMIT_S, check=False, **both)
        said = log.read_text(errors="replace")
    return dict(json.loads(found) for found in re.findall(f"{_LINE}(.*)", said))


def row(name: str, on_cpu: dict[str, str], on_device: dict[str, str]) -> str:
    """Return a row of the docs' table."""

    def counted(found: dict[str, str]) -> str:
        return ", ".join(str([*found.values()].count(kind)) for kind in ("passed", "failed", "skipped"))

    differ = sorted(t for t, result in on_cpu.items() if result == "passed" and on_device.get(t) != "passed")
    return f"| `{name}` | {counted(on_cpu)} | {counted(on_device)} | {', '.join(f'`{t}`' for t in differ)} |"


def main() -> int:
    """Run what was asked for; return how many tests pass on the CPU and not on the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="files with this word in their names")
    parser.add_argument("--test", default="", help="tests with this word in their names")
    parser.add_argument("--ranks", type=int, default=RANKS, help="devices that there are")
    parser.add_argument("--logs", type=Path, help="a folder for what the runs print")
    parser.add_argument("--here", choices=("cpu", "device"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        here(options.folder, options.here, options.test, options.ranks)
        return 0
    wrong = 0
    for name in FILES:
        file = options.folder / f"{name}.py"
        if options.only not in name or not file.exists():
            continue
        logs = {kind: options.logs / f"{file.stem}.{kind}" if options.logs else None for kind in ("cpu", "device")}
        found = [outcomes(file, kind, options.test, options.ranks, logs[kind]) for kind in ("cpu", "device")]
        print(row(name, *found), flush=True)
        wrong += sum(result == "passed" and found[1].get(t) != "passed" for t, result in found[0].items())
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
