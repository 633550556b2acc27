"""Tests that run in several processes, connected by ``torch.distributed``.

A test file marks its functions with `on_ranks`; in the process of the suite each of them waits for what became of it in
other processes, one set of them for all such functions of the folder::

    @on_ranks(2)
    def test_a_sum() -> None:
        matched(lambda device: sums(torch.ones(2, device=device)))

The group has Gloo for CPU tensors and ours for those of the device, so `matched` can run the same function on both.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.support import elsewhere, xla_flags
from tests.support.elsewhere import Test
from tests.support.lists import listed
from tests.support.processes import start_code

_HERE = "LAZYTPU_TEST_RANKS"
_LIMIT_S = 120
_ALL = "all"
_ENDED = "it hung, or ended the process"


def on_ranks(n: int, alone: bool = False) -> Callable[[Test], Test]:
    """Run a test in each of ``n`` processes.

    Args:
        n: how many.
        alone: in processes of its own.
    """

    def mark(test: Test) -> Test:
        file = Path(test.__code__.co_filename)
        slow = [f"{file.parent.name}/{file.name}::{test.__name__}"] in listed("slow.txt")  # these run together, apart
        group = f"{n}{test.__name__ if alone else '-slow' if slow else ''}"

        def failure_of(file: Path, name: str) -> str:
            results = _results(file.parent, n, group)
            return results[name] if name in results else results[_ALL]

        return elsewhere.marked(test, group, _HERE in os.environ, failure_of)

    return mark


def matched(run: Callable[[torch.device], Any], atol: float = 1e-5, rtol: float = 1e-5) -> Any:
    """Run a function on the CPU and on the device and compare what it returns, tensor by tensor.

    Returns:
        What the device gave.
    """
    lazytpu = importlib.import_module("lazytpu")
    want, got = run(torch.device("cpu")), run(lazytpu.device())
    wants, gots = tree_leaves(want), tree_leaves(got)
    assert len(wants) == len(gots), (want, got)
    for w, g in zip(wants, gots, strict=True):
        if isinstance(w, torch.Tensor):
            g, w = [getattr(x, "_local_tensor", x).detach() for x in (g, w)]
            assert g.device.type == lazytpu.device().type, f"a result is on {g.device}"
            assert g.shape == w.shape, (g.shape, w.shape)
            torch.testing.assert_close(g.cpu(), w, atol=atol, rtol=rtol)
        else:
            assert g == w, (g, w)
    return got


@functools.cache
def _results(place: Path, n: int, group: str) -> dict[str, str]:
    """Return how each test of a group ended: what was raised on which ranks, empty for success."""
    return elsewhere.outcomes(
        place, f"ranks-{group}", "@on_ranks(", lambda modules, kept: _run_all(modules, n, group, kept)
    )


def _run_all(modules: list[str], n: int, group: str, kept: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    code = f"from tests.support import ranks as r; r.run({modules!r}, {group!r}, {str(kept)!r})"
    shared = {_HERE: str(n), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "LAZYTPU_DISK_CACHE": "0", "JAX_PLATFORMS": "cpu"}
    shared |= {"LAZYTPU_COMPILE_AFTER": "2"}
    shared |= {"XLA_FLAGS": xla_flags.QUICK, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    running = [start_code(code, **shared, RANK=str(r), LOCAL_RANK=str(r)) for r in range(n)]
    ended = [r.wait() for r in running]
    parts = [Path(f"{kept}.{r}") for r in range(n)]
    if not all(part.exists() for part in parts):
        kept.write_text(json.dumps({_ALL: "\n".join(f"[{r}] {e.stderr[-4000:]}" for r, e in enumerate(ended))}))
        return
    results = [json.loads(part.read_text()) for part in parts]
    for result, done in zip(results, ended, strict=True):
        result.update({name: f"{text}\n{done.stderr[-4000:]}" for name, text in result.items() if text == _ENDED})
    joined = {}
    for name in results[0]:
        failures = [f"on rank {r}:\n{result.get(name)}" for r, result in enumerate(results) if result.get(name) != ""]
        joined[name] = "\n".join(failures)
    kept.write_text(json.dumps(joined))


def run(modules: list[str], group: str, into: str) -> None:
    """Run the tests of a group, in one of the processes, and write how they ended; stop at the first that hangs."""
    sys.path.insert(0, os.getcwd())
    lazytpu = importlib.import_module("lazytpu")
    dist = importlib.import_module("torch.distributed")
    dist.init_process_group(f"cpu:gloo,{lazytpu.config.device_name}:lazytpu")
    for module in modules:
        importlib.import_module(module)
    file = Path(f"{into}.{os.environ['RANK']}")
    tests = elsewhere.found[group]
    results: dict[str, str] = dict.fromkeys(tests, "a test before it hung, or ended the process")
    for name, test in tests.items():
        results[name] = _ENDED
        file.write_text(json.dumps(results))
        faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
        results[name] = elsewhere.outcome_of(test)
        file.write_text(json.dumps(results))
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, results[name])
        faulthandler.cancel_dump_traceback_later()
    file.write_text(json.dumps(results))
    dist.destroy_process_group()
