"""Try what goes wrong between processes: ``python -m tests.world.faults [--only WORD] [--times N] [--markdown]``.

Each fault happens to real processes.  What has to hold: every process that is left ends in time, with the message or
the numbers that are expected, and without a stack of C++.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import Running
from tests.support.worlds import start_world

PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
import lazytpu
from lazytpu import spmd
from lazytpu.runtime import compiler, world

how = sys.argv[1]
if how == "other version" and os.environ["RANK"] == "1":
    import jax
    jax.__version__ = "0.0.1"
one_mesh = how.startswith("mesh")
if not one_mesh:
    dist.init_process_group()
device, rank = lazytpu.device(), int(os.environ["RANK"])

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def step(x, how=""):
    first = rank == 1
    y = x * 2
    if how == "other ops" and first:
        y = torch.cat([y, y])[:4]
    dist.all_reduce(y)
    if how == "read" and not first:
        print("sum", y.sum().item())
    if how == "kill in a compilation" and first:
        compiler.lower = die
        y = y + 1
    z = y / 4
    if how == "other collective" and first:
        dist.broadcast(z, 1)
    elif how == "other size":
        dist.all_reduce(z[: 4 - rank])
    elif how == "other order":
        for x in (z, z.double()) if first else (z.double(), z):
            dist.all_reduce(x)
    else:
        dist.all_reduce(z)
    if first and how in ("sleep", "SIGTERM", "Ctrl-C"):
        time.sleep(1000)
    if first and how == "kill between steps":
        die()
    if first and how == "stop between steps":
        stop()
    if first and how == "raise":
        raise ValueError("no data")
    if first and how == "leave":
        sys.exit()
    if how.endswith("in a collective"):
        big = torch.zeros(1 << 25, device=device)
        dist.all_reduce(big)
        lazytpu.mark_step()
        dist.all_reduce(big)
        lazytpu.mark_step()
        if first:
            die() if how.startswith("kill") else stop()
        big.sum().item()
    lazytpu.mark_step()
    if first and how == "kill in a checkpoint":
        class Dying:
            def __reduce__(self):
                die()
        torch.save({"x": z, "y": Dying()}, sys.argv[2])
    return z

if one_mesh:
    mesh = spmd.Mesh((2,), ("data",))
    x = torch.arange(8.0) + (rank if how == "mesh, other data" else 0)
    x = spmd.mark_sharding(x.to(device), mesh, ("data",))
    y = x * (3 if how == "mesh, other numbers" and rank else 2)
    if how == "mesh, other ops" and rank:
        y = y.abs()
    if how == "mesh, other seed":
        torch.manual_seed(rank)
        y = y + torch.rand(8, device=device)
    print("total", y.sum().item())
    if how == "mesh, full disk":
        import resource
        big = spmd.mark_sharding(torch.zeros(1 << 17).to(device), mesh, ("data",))
        if rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        spmd.checkpoint.save({"big": big}, sys.argv[2])
else:
    x = torch.ones(4, device=device) * (rank + 1)
    step(x).tolist()
    print("ready", flush=True)
    print("numbers", step(x, how).tolist())
    step(x).tolist()
    print("done")
"""
DIED = "rank 1 ended without finishing; rank 0 cannot go on alone"
DIFFERENT = "ranks exchange different things"
NUMBERS = "numbers [3.0, 3.0, 3.0, 3.0]"
KILLED, TERMINATED, INTERRUPTED = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT


@dataclass(frozen=True)
class Fault:
    """What happens, and what is expected.

    Attributes:
        ends: exit codes of the two ranks; None for one that is killed afterwards, as nothing else can end it.
        says: what both, or the first alone, say.
        both: whether both say it.
        sent: signal for rank 0, once it waits.
    """

    ends: tuple[int, int | None]
    says: str
    both: bool = False
    sent: int = 0


FAULTS = {
    "none": Fault((0, 0), NUMBERS, both=True),
    "read": Fault((0, 0), NUMBERS, both=True),
    "other ops": Fault((0, 0), NUMBERS, both=True),
    "other collective": Fault((1, 1), DIFFERENT, both=True),
    "other size": Fault((1, 1), DIFFERENT, both=True),
    "other order": Fault((1, 1), DIFFERENT, both=True),
    "other version": Fault((1, 1), "ranks run different versions", both=True),
    "mesh, other data": Fault((1, 1), "other contents on rank 1 than on rank 0", both=True),
    "mesh, other ops": Fault((1, 1), "ranks record different programs for one mesh", both=True),
    "mesh, other numbers": Fault((1, 1), "ranks give different numbers to one program", both=True),
    "mesh, other seed": Fault((1, 1), "ranks give different numbers to one program", both=True),
    "mesh, full disk": Fault((1, 1), "rank 1 could not save the checkpoint"),
    "sleep": Fault((1, None), "rank 1 is at train.py:45"),
    "stop between steps": Fault((1, None), "rank 1 does not answer"),
    "stop in a collective": Fault((1, None), "rank 1 does not answer"),
    "kill between steps": Fault((1, KILLED), DIED),
    "kill in a compilation": Fault((1, KILLED), DIED),
    "kill in a collective": Fault((1, KILLED), DIED),
    "kill in a checkpoint": Fault((1, KILLED), DIED),
    "raise": Fault((1, 1), DIED),
    "leave": Fault((1, 0), "rank 1 ended before rank 0 did"),
    "SIGTERM": Fault((TERMINATED, None), "ready", sent=signal.SIGTERM),
    "Ctrl-C": Fault((INTERRUPTED, None), "KeyboardInterrupt", sent=signal.SIGINT),
}
_LIMIT_S = 90.0
_UGLY = ("Check failure stack trace", "terminate called", "Fatal Python error", "Segmentation fault")


def tried(name: str, folder: Path) -> tuple[str, float]:
    """Let a fault happen; return what is wrong with what became of it, empty for nothing, and the seconds it took."""
    fault = FAULTS[name]
    script = folder / "train.py"
    script.write_text(PROGRAM)
    code = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    settings = {"LAZYTPU_COLLECTIVE_TIMEOUT": "30" if fault.ends[1] is not None or fault.sent else "8"}
    settings |= {"LAZYTPU_DISK_CACHE": "0", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    began = time.monotonic()
    first, second = start_world(code, 2, script, name, folder / "x.pt", **settings)
    problems = []
    if fault.sent:
        _await(lambda: "ready" in _printed(first))
        time.sleep(3)
        os.kill(first.pid, fault.sent)
        sent = time.monotonic()
    alone: list[float] = []  # since when rank 0 is

    def has_ended() -> bool:
        if not alone and not _is_running(second):
            alone.append(time.monotonic())
        return not _is_running(first)

    if not _await(has_ended):
        problems.append("rank 0 does not end")
        os.kill(first.pid, signal.SIGKILL)
    elif fault.sent and time.monotonic() - sent > 5:
        problems.append("rank 0 takes more than 5 s to end")
    elif alone and time.monotonic() - alone[0] > 10:
        problems.append("rank 0 takes more than 10 s to end after rank 1")
    if fault.ends[1] is None:
        os.kill(second.pid, signal.SIGKILL)
    elif not _await(lambda: not _is_running(second)):
        problems.append("rank 1 does not end")
        os.kill(second.pid, signal.SIGKILL)
    for rank, (running, end) in enumerate(zip((first, second), fault.ends, strict=True)):
        done = running.wait()
        text = done.stdout + done.stderr
        if end is not None and done.returncode != end:
            problems.append(f"rank {rank} ends with {done.returncode}, not {end}: {text[-400:]}")
        if (rank == 0 or fault.both) and fault.says not in text:
            problems.append(f"rank {rank} does not say {fault.says!r}: {text[-400:]}")
        problems += [f"rank {rank}: {ugly}" for ugly in _UGLY if ugly in text]
    return "; ".join(problems), time.monotonic() - began


def _await(come: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _LIMIT_S
    while not come():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _printed(running: Running) -> str:
    out = Path(running.streams.name, "stdout")
    return out.read_text() if out.exists() else ""


def _is_running(running: Running) -> bool:
    """Return whether a process has not ended; one that has is a zombie until the server is asked for it."""
    try:
        state = Path(f"/proc/{running.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def main() -> None:
    """Try all faults and print what became of them; the exit code is the number of those that went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults with this word in their names")
    parser.add_argument("--times", type=int, default=1, help="how often each")
    parser.add_argument("--markdown", action="store_true", help="print a table for the docs")
    asked = parser.parse_args()
    wrong = 0
    for name in [name for name in FAULTS if asked.only in name]:
        seconds = []
        for _ in range(asked.times):
            with tempfile.TemporaryDirectory() as folder:
                problem, took = tried(name, Path(folder))
            seconds.append(took)
            if problem:
                wrong += 1
                print(f"WRONG {name}: {problem}", flush=True)
        says = FAULTS[name].says.replace("|", "\\|")
        row = f"| {name} | {says} | {max(seconds):.0f} s |" if asked.markdown else f"{name}: {max(seconds):.1f} s"
        print(row, flush=True)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
