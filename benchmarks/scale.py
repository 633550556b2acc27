"""What splitting a program over devices gives and costs, on virtual devices of one CPU:  python -m benchmarks.scale

    python -m benchmarks.scale                       # all of it, 12 minutes; writes benchmarks/results/scale.json
    python -m benchmarks.scale --only bytes,cost     # some parts; the others stay as they were measured before

``gpt``, ``transformer``, ``resnet18-f64``  losses of 20 steps by five recipes on 8 devices, beside one device
``bytes``    what a device holds, and what the devices send in a step
``cost``     a step on 2 devices beside one device on the same cores, in turn
``compile``  the program for 8 devices beside that for one, in turn
``saving``   steps while a checkpoint is written in the background, beside steps alone, in turn

Each part runs in a process of its own.  A row of the table is what was measured and the most it may be.  The table goes
to docs/explanation/performance-tables.md.

resnet18 trains in float64 on 8 images of 32 x 32: in float32 any other order of summation, on one device too, gives
other losses after a few steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import models
from benchmarks.growth.study import Verdict
from benchmarks.page import RESULTS, ROOT, TABLES, machine, markdown_table, on_machine, save, write_part

FILE = RESULTS / "scale.json"
STEPS = 20


class Translator(nn.Module):
    """``nn.Transformer`` with dropout, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 64)
        self.net = nn.Transformer(64, 4, 1, 1, 128, 0.1, batch_first=True)
        self.head = nn.Linear(64, 500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        return self.head(self.net(h, h)).flatten(0, 1)


def workload(name: str) -> models.Workload:
    """Return a model and a batch of 16 or 8 examples."""
    if name == "transformer":
        torch.manual_seed(0)
        tokens = torch.randint(500, (16, 24))
        return models.Workload(Translator(), tokens, tokens.flatten(), "adamw")
    if name == "resnet18-f64":
        torch.manual_seed(0)
        images, classes = torch.randn(8, 3, 32, 32).double(), torch.randint(10, (8,))
        return models.Workload(models.ResNet18().double(), images, classes, "sgd")
    made = models.make(name)
    if name != "gpt":
        return made
    return models.Workload(made.net, made.x.repeat(2, 1), made.target.repeat(2), made.optimizer)


def _layers(name: str) -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    layers, first, second = (
        ("net.*.layers.*", "linear1", "linear2") if name == "transformer" else ("blocks.*", "up", "down")
    )
    return {f"{layers}.{first}": ColwiseParallel(), f"{layers}.{second}": RowwiseParallel()}


def _split_layers(name: str, net: nn.Module, mesh: Any, axis: str) -> None:
    from lazytpu import spmd

    if not isinstance(net, models.ResNet18):
        spmd.parallelize(net, mesh, _layers(name), axis=axis)
        return
    for layer in net.modules():  # by output channels, then by input channels
        if isinstance(layer, models.Residual):
            spmd.mark_sharding(layer.conv1.weight, mesh, (axis,))
            spmd.mark_sharding(layer.conv2.weight, mesh, (None, axis))


def spread(name: str, how: str, net: nn.Module, devices: int) -> tuple[Any, tuple[str, ...]]:
    """Split a model; return the mesh, and how its batches are split."""
    from lazytpu import spmd

    if how == "one":
        return None, ()
    if how in ("DP", "FSDP"):
        mesh = spmd.Mesh((devices,), ("data",))
        if how == "FSDP":
            spmd.fully_shard(net, mesh)
        return mesh, ("data",)
    if how == "TP":
        mesh = spmd.Mesh((devices,), ("model",))
        _split_layers(name, net, mesh, "model")
        return mesh, ()
    mesh = spmd.Mesh((2, devices // 2), ("data", "model"))
    _split_layers(name, net, mesh, "model")
    if how == "FSDP x TP":
        spmd.fully_shard(net, mesh, axis="data")
    return mesh, ("data",)


class Training:
    """A model that trains as a recipe says.

    Args:
        name: of the model.
        how: the recipe; ``one`` for one device.
        devices: of the mesh.
    """

    def __init__(self, name: str, how: str, devices: int) -> None:
        import lazytpu

        made = workload(name)
        torch.manual_seed(1)
        self.net = made.net.to(lazytpu.device())
        mesh, spec = spread(name, how, self.net, devices)
        self.optimizer = models.optimizer(made.optimizer, self.net.parameters())
        self.x, self.target = made.x.to(lazytpu.device()), made.target.to(lazytpu.device())
        if mesh is not None:
            lazytpu.spmd.mark_sharding(self.x, mesh, spec)
            lazytpu.spmd.mark_sharding(self.target, mesh, spec)

    def step(self) -> torch.Tensor:
        """Train on the batch; return the loss."""
        import lazytpu

        loss = F.cross_entropy(self.net(self.x), self.target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        lazytpu.mark_step()
        return loss.detach()


def numbers(name: str, limit: float) -> Iterator[Verdict]:
    """Yield how far losses of 20 steps are from those of one device, relatively."""
    want = [loss.item() for loss in _losses(name, "one")]
    for how in ("DP", "FSDP", "TP", "DP x TP", "FSDP x TP"):
        got = [loss.item() for loss in _losses(name, how)]
        yield Verdict(f"{name} by {how}: relative difference", max(_distance(got, want)), limit)


def _losses(name: str, how: str) -> list[torch.Tensor]:
    training = Training(name, how, 8)
    return [training.step() for _ in range(STEPS)]


def _distance(got: Sequence[float], want: Sequence[float]) -> list[float]:
    return [abs(a - b) / abs(b) for a, b in zip(got, want, strict=True)]


def held_and_sent() -> Iterator[Verdict]:
    """Yield what is held by the device that holds most, and what the devices send in a step."""
    for name in ("gpt", "transformer"):
        training = _trained(name, "FSDP")
        if name == "gpt":
            yield from _sent(name, "FSDP", training)
        loss = F.cross_entropy(training.net(training.x), training.target)
        loss.backward()
        parameters = list(training.net.parameters())
        states = [x for s in training.optimizer.state.values() for x in s.values() if torch.is_tensor(x) and x.dim()]
        kinds = {"parameters": parameters, "gradients": [p.grad for p in parameters], "optimizer state": states}
        for kind, tensors in kinds.items():
            yield Verdict(f"{name} by FSDP: {kind} on a device, of the whole", _part(tensors), 1 / 8 * 1.05)
    for name in ("gpt", "resnet18"):
        yield from _sent(name, "DP", _trained(name, "DP"))


def _trained(name: str, how: str) -> Training:
    from lazytpu.runtime import executables

    executables.forget_executables()  # or its program may be older than the last one that was compiled
    training = Training(name, how, 8)
    for _ in range(3):
        training.step()
    return training


def _part(tensors: Sequence[Any]) -> float:
    import lazytpu

    held: dict[str, int] = {}
    for x in tensors:
        for shard in lazytpu.spmd.local_shards(x.detach()):
            held[str(shard.device)] = held.get(str(shard.device), 0) + shard.data.nbytes
    return max(held.values()) / sum(x.nbytes for x in tensors)


def _sent(name: str, how: str, training: Training) -> Iterator[Verdict]:
    from lazytpu.debug import hlo
    from lazytpu.debug.collectives import collectives_of
    from lazytpu.debug.graph_text import optimized_hlo_of
    from lazytpu.diagnosis import events

    event = events.compilations[-1]
    found = collectives_of(hlo.parse(optimized_hlo_of(event.executable.compiled)), event.graph.mesh, event.graph)
    whole = sum(p.nbytes for p in training.net.parameters())
    sums = [c for c in found if c.kind in ("all-reduce", "reduce-scatter")]
    gathers = [c for c in found if c.kind == "all-gather"]
    others = [c for c in found if c not in sums and c not in gathers]
    of_them = f"{name} by {how}:"
    if how == "FSDP":
        gathered = sum(c.total_bytes for c in gathers) / whole
        yield Verdict(f"{of_them} gathered bytes over those of the parameters", gathered, 2)
    else:
        yield Verdict(f"{of_them} gathers of results", sum(c.runs for c in gathers), 0)
    if name == "gpt":
        summed = sum(c.total_bytes for c in sums) / whole
        yield Verdict(f"{of_them} summed bytes over those of the parameters", summed, 1.001)
    if how == "FSDP":
        rest = sum(c.total_bytes for c in others) / whole
        yield Verdict(f"{of_them} other bytes over those of the parameters", rest, 0.01)
    else:
        yield Verdict(f"{of_them} other collectives", sum(c.runs for c in others), 0)


def cost(rounds: int = 12, steps: int = 4) -> Iterator[Verdict]:
    """Yield what the fastest step costs on two devices, over the fastest on one, on the same cores."""
    import lazytpu

    limits = {"DP": 1.10, "FSDP": 1.15}
    trainings = {how: Training("gpt", how, 2) for how in ("one", *limits)}
    took: dict[str, list[tuple[float, float]]] = {how: [] for how in trainings}
    for training in trainings.values():
        for _ in range(4):
            training.step()
    lazytpu.wait()
    for _ in range(rounds):
        for how, training in trainings.items():
            for _ in range(steps):
                start, before = time.perf_counter(), time.thread_time()
                training.step()
                host = time.thread_time() - before
                lazytpu.wait()
                took[how].append((time.perf_counter() - start, host))
    least = {how: [min(column) for column in zip(*times, strict=True)] for how, times in took.items()}
    for how, limit in limits.items():
        step, host = (these / those for these, those in zip(least[how], least["one"], strict=True))
        yield Verdict(f"gpt by {how} on 2 devices: time of a step, over one device", step, limit)
        yield Verdict(f"gpt by {how} on 2 devices: time of the main thread, over one device", host, 1.05)


def _median_ratio(these: Sequence[float], those: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def saving(rounds: int = 7, steps: int = 20) -> Iterator[Verdict]:
    """Yield what steps cost while a checkpoint of 88 MB is written in the background, over steps alone."""
    import lazytpu
    from lazytpu.spmd import checkpoint

    training = Training("gpt", "FSDP", 2)
    for _ in range(4):
        training.step()
    state = {"model": training.net.state_dict(), "optimizer": training.optimizer.state_dict()}
    took: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.async_save(state, Path(folder, "first")).result()  # imports
        for turn in range(rounds):
            for saves in took:
                lazytpu.wait()
                start = time.perf_counter()
                running = checkpoint.async_save(state, Path(folder, str(turn))) if saves else None
                for _ in range(steps):
                    training.step()
                lazytpu.wait()
                took[saves].append(time.perf_counter() - start)
                if running is not None:
                    running.result()
                    shutil.rmtree(Path(folder, str(turn)))
    what = f"gpt by FSDP on 2 devices: {steps} steps while a checkpoint is written, over {steps} alone"
    yield Verdict(what, _median_ratio(took[True], took[False]), 1.05)


def compile_times(rounds: int = 2) -> Iterator[Verdict]:
    """Yield what compiling takes for eight devices, over one; the least time of each."""
    took: dict[str, list[float]] = {"one": [], "DP": [], "FSDP": []}
    for _ in range(rounds):
        for how, found in took.items():
            found.append(_compile_s(how))
    for how in ("DP", "FSDP"):
        ratio = min(took[how]) / min(took["one"])
        yield Verdict(f"gpt by {how} on 8 devices: time to compile, over one device", ratio, 1.3)


def _compile_s(how: str) -> float:
    """Return the processor time of compiling the steps of a training, all threads together."""
    import lazytpu
    from lazytpu.runtime import compiler, executables

    executables.forget_executables()
    training = Training("gpt", how, 8)
    lazytpu.mark_step()
    lazytpu.wait()
    spent = 0.0
    compile_ = compiler.compile_graph

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal spent
        before = time.process_time()
        try:
            return compile_(*args, **kwargs)
        finally:
            spent += time.process_time() - before

    compiler.compile_graph = timed
    try:
        for _ in range(3):
            training.step()
    finally:
        compiler.compile_graph = compile_
    return spent


PARTS: dict[str, tuple[int, Callable[[], Iterator[Verdict]]]] = {
    "gpt": (8, partial(numbers, "gpt", 1e-5)),
    "transformer": (8, partial(numbers, "transformer", 1e-5)),
    "resnet18-f64": (8, partial(numbers, "resnet18-f64", 1e-4)),
    "bytes": (8, held_and_sent),
    "cost": (2, cost),
    "compile": (8, compile_times),
    "saving": (2, saving),
}


def measured(part: str) -> Iterator[Verdict]:
    """Measure a part in a process that has the devices it needs; yield rows as they come."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={PARTS[part][0]}"
    settings = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "LAZYTPU_DISK_CACHE": "0", "LAZYTPU_COMPILE_AFTER": "1"}
    command = [sys.executable, "-m", "benchmarks.scale", "--here", part]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        command, env={**os.environ, **settings, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            yield Verdict(**json.loads(line))
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command)


def _rows(known: Mapping[str, Any]) -> list[Verdict]:
    return [Verdict(**row) for part in PARTS for row in known.get(part, [])]


def markdown(known: Mapping[str, Any]) -> str:
    """Return results as a table in Markdown, and what they were measured on."""
    lines = [[r.what, f"{r.limit:.3g}", f"{r.found:.3g}", "yes" if r.holds else "no"] for r in _rows(known)]
    return f"{on_machine(known['machine'])}\n\n{markdown_table(['what', 'at most', 'measured', 'met'], lines)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, joined by commas")
    parser.add_argument("--json", type=Path, default=FILE)
    parser.add_argument("--here", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.here:
        for row in PARTS[options.here][1]():
            print(json.dumps(asdict(row)), flush=True)
        return 0
    known = json.loads(options.json.read_text()) if options.json.exists() else {}
    for part in options.only.split(","):
        known[part], known["machine"] = [], machine()
        for row in measured(part):
            known[part].append(asdict(row))
            save(options.json, known)
    rows = _rows(known)
    print(markdown(known))
    if options.json == FILE:
        write_part(TABLES, "scale", markdown(known))
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
