"""Compile torch's operator database for TPUs and GPUs, and models for TPUs, without one: ``python -m tests.sweep_tpu``.

    python -m tests.sweep_tpu models --out tpu.jsonl          # needs libtpu: pip install 'lazytpu[tpu]'
    python -m tests.sweep_tpu ops --out ops.jsonl --compile   # minutes; --shard 0/4 for a part
    python -m tests.sweep_tpu ops --out gpu.jsonl --compile --topology h100:1  # needs jax's plugin for CUDA
    python -m tests.sweep_tpu page tpu.jsonl ops.jsonl gpu.jsonl  # write docs/reference/tpu.md and its data

Programs are recorded without contents, as a plan does it (`lazytpu.spmd.plan`).  What the file of results has already
is not done again; what ended the process twice is noted as such.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import lazytpu
from lazytpu import spmd
from lazytpu.ir.graph import Graph
from lazytpu.lowering.target import Topology, compiling_for
from lazytpu.observe.metrics_tables import size
from lazytpu.runtime import compiler, described
from lazytpu.runtime.ahead import compile_ahead
from lazytpu.spmd.plan import recorded

DOCS = Path(__file__).parents[1] / "docs"
DATA, PAGE = DOCS / "_data/tpu.json", DOCS / "reference/tpu.md"
TOPOLOGY = "v5e:2x4"  # of the models
KINDS = {TOPOLOGY: "TPU", "h100:1": "GPU"}  # of the operators
MODELS = ("mlp", "deepmlp", "cnn", "resnet18", "gpt")
SPREAD = [(name, how) for name in ("gpt", "resnet18") for how in ("DP", "FSDP", "TP")]
_CUSTOM = re.compile(r"stablehlo\.custom_call @([\w.]+)")
_OF_SHARDINGS = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}
Result = dict[str, Any]
ENDED = "unknown: the process that compiled it crashed or timed out, twice"


# --- models -----------------------------------------------------------------------------------------------


def model(name: str, how: str, folder: Path) -> Callable[[], Callable[[], None]]:
    """Return a program that trains one of the models of a folder with a ``models.py``."""
    sys.path.insert(0, str(folder))
    models = importlib.import_module("models")

    def program() -> Callable[[], None]:
        mesh = spmd.Mesh((2, 4), ("data", "model"))
        found = models.make(name)
        fields = ("net", "x", "target", "optimizer")
        made, x, target, kind = found if isinstance(found, tuple) else [getattr(found, field) for field in fields]
        made.to(lazytpu.device())
        if how == "FSDP":
            mesh = spmd.Mesh((8,), ("data",))
            spmd.fully_shard(made, mesh)
        elif how == "DP":
            mesh = spmd.Mesh((8,), ("data",))
        elif how == "TP":
            split_layers(made, mesh)
        optimizer = models.optimizer(kind, made.parameters())
        x, target = x.repeat(2, *[1] * (x.dim() - 1)), target.repeat(2)

        def step() -> None:
            a, b = x.to(lazytpu.device()), target.to(lazytpu.device())
            if how:
                spmd.mark_sharding(a, mesh, ("data",))
                spmd.mark_sharding(b, mesh, ("data",))
            optimizer.zero_grad()
            F.cross_entropy(made(a), b).backward()
            optimizer.step()

        return step

    return program


def split_layers(module: nn.Module, mesh: spmd.Mesh) -> None:
    """Split each pair of layers: the first by its results, the second by what it takes."""
    first = True
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and min(layer.weight.shape[:2]) >= 64:
            spec = ("model",) if first else (None, "model")
            spmd.mark_sharding(layer.weight, mesh, spec)
            first = not first


def of_models(done: set[str], options: argparse.Namespace) -> Iterator[Result]:
    """Compile the models, on one chip and on a mesh."""
    for name, how in [*[(name, "") for name in MODELS], *SPREAD]:
        title = f"{name} {how}".strip()
        if title not in done:
            yield {"started": title}
            plan = spmd.plan(model(name, how, options.models), TOPOLOGY)
            calls = custom_calls(plan.programs[0].compiled.text)
            yield {"model": title, **plan.as_json(), "custom_calls": calls, "haste": options.haste}


def custom_calls(text: str) -> list[str]:
    """Return the targets of custom calls in optimized HLO."""
    return sorted(set(re.findall(r'custom_call_target="([\w.$]+)"', text)))


# --- operators --------------------------------------------------------------------------------------------


def of_ops(done: set[str], options: argparse.Namespace) -> Iterator[Result]:
    """Lower each operator of the database, and compile its first sample."""
    from tests.support.op_checks import ENTRIES, full_name  # seconds to import

    shard, shards = map(int, options.shard.split("/"))
    chosen = set(filter(None, options.ops.split(",")))
    target = described.topology(options.topology)
    found = [op for op in ENTRIES if torch.float32 in op.dtypes and (not chosen or op.name in chosen)]
    for op in found[shard::shards]:
        name = full_name(op)
        if name not in done:
            yield {"started": name}
            yield {"op": name, "topology": target.name, **of_op(op, target, options)}


def of_op(op: Any, target: Topology, options: argparse.Namespace) -> Result:
    """Return what became of the samples of an operator."""
    start, failures = time.monotonic(), []
    calls: set[str] = set()
    count, compiled = 0, ""
    torch.manual_seed(0)
    every = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    full = (s for s in every if all(x.numel() for x in tree_leaves(s.input) if isinstance(x, torch.Tensor)))
    for sample in islice(full, options.samples):
        count += 1
        try:
            graphs = graphs_of(op, sample, target)
            with compiling_for(target):
                for graph in graphs:
                    calls |= set(_CUSTOM.findall(compiler.lower(graph).as_text())) - _OF_SHARDINGS
            if options.compile and not compiled:
                for graph in graphs:
                    compile_ahead(graph, target)
                compiled = "yes"
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
    found = {"samples": count, "failed": len(failures), "why": failures[0][:400] if failures else ""}
    return {**found, "calls": sorted(calls), "compiled": compiled, "seconds": round(time.monotonic() - start, 1)}


def graphs_of(op: Any, sample: Any, target: Topology) -> list[Graph]:
    """Return the graphs that a sample and its gradient run."""
    found: list[Graph] = []

    def program() -> None:
        moved = tree_map(_to_device, (sample.input, sample.args, sample.kwargs))
        result = op(moved[0], *moved[1], **moved[2])
        leaves, inputs = tensors_with_gradient(result), tensors_with_gradient(moved)
        grads: tuple[torch.Tensor | None, ...] = ()
        if leaves and inputs:
            ones = [torch.ones_like(x) for x in leaves]
            with suppress(RuntimeError):  # of zeros, which not every gradient can be taken of
                grads = torch.autograd.grad(leaves, inputs, ones, allow_unused=True)
        lazytpu.mark_step()
        found.extend(described.ran)
        del grads, result

    recorded(program, target, 1)
    return found


def tensors_with_gradient(tree: object) -> list[torch.Tensor]:
    """Return the tensors in a tree that need a gradient."""
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.requires_grad]


def _to_device(x: object) -> object:
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach().to(lazytpu.device()).requires_grad_(x.requires_grad)


# --- the page ---------------------------------------------------------------------------------------------

HEAD = """\
# What compiles for TPUs and GPUs

The project is developed on machines without a TPU or a GPU, but XLA's compilers for them run on any machine. This page
shows what they do with models and with the operators of torch's database. `python -m tests.sweep_tpu` runs the
compilers and writes the page ([how to run the sweeps](../how-to/run-the-sweeps.md)). It shows that programs compile,
and what they need; it does not show that they compute the right numbers, or how fast.
"""


def page(files: Sequence[Path]) -> None:
    """Write the results of some files to the data and the page; what they lack stays as it was."""
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    record = json.loads(DATA.read_text())
    record["versions"] = {name: metadata.version(name) for name in ("torch", "jax", "libtpu", "jax-cuda12-plugin")}
    record["models"] |= {line["model"]: _model_row(line) for line in lines if "model" in line}
    for line in lines:
        if "op" in line:
            record["ops"][line["topology"]][line["op"]] = _op_row(line)
    record["ops"] = {topology: dict(sorted(record["ops"][topology].items())) for topology in KINDS}
    DATA.write_text(json.dumps(record, indent=0) + "\n")
    PAGE.write_text(page_of(record))


def _model_row(line: Result) -> Result:
    if "why" in line:
        return {"why": line["why"]}
    scattered = [row for row in line["collectives"] if row["kind"] == "reduce-scatter"]
    if line["model"].endswith("FSDP") and not scattered:
        raise ValueError(f"{line['model']} sums no gradient by reduce-scatter, only by {line['collectives']}")
    sent = [f"{row['count']} {row['kind']} over {row['axis']}, {size(row['bytes'])}" for row in line["collectives"][:3]]
    kept = ("ops", "fits", "flops", "custom_calls", "haste")
    return {key: line[key] for key in kept if key in line} | {
        "needed": line["memory"]["needed"],
        "sent": sent,
        "scattered": sum(row["bytes"] for row in scattered),
    }


def _op_row(line: Result) -> Result:
    kept = {key: line[key] for key in ("samples", "failed", "compiled") if line[key]}
    return kept | {key: line[key] for key in ("why", "calls") if line[key]}


def page_of(record: Result) -> str:
    """Return the page."""
    models, versions = record["models"], record["versions"]
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    rows = [
        (
            name + ", in haste" * m.get("haste", False),
            "+".join(map(str, m["ops"])),
            size(m["needed"]),
            f"{m['flops']:.3g}",
            "; ".join(m["sent"]) or "nothing",
        )
        for name, m in models.items()
        if "why" not in m
    ]
    rows += [(name, m["why"], "", "", "") for name, m in models.items() if "why" in m]
    parts = [
        HEAD,
        f"Seen with {made}.\n",
        f"## Models\n\nA training step for {record['topology']}, of the models of `benchmarks/models.py`: on one chip, "
        "and on eight with the batch (DP), the parameters (FSDP) or the layers (TP) split.\n",
        _table(("model", "ops", "memory on a chip", "FLOPs of products on a chip", "chips send"), rows),
        "Where parameters are split, XLA sums gradients by reduce-scatter, or by an all-reduce of which each chip "
        f"keeps its part, which it runs as one: {_scattered(models)}. On CPUs it makes an all-reduce of them.\n",
        *[text for topology, rows in record["ops"].items() for text in _operators(topology, rows)],
        GPUS,
    ]
    return "\n".join(filter(None, parts))


def _scattered(models: Result) -> str:
    found = {name: m.get("scattered", 0) for name, m in models.items() if name.endswith("FSDP")}
    return ", ".join(f"{size(count)} in a step of {name.removesuffix(' FSDP')}" for name, count in found.items())


def _operators(topology: str, ops: Result) -> Iterator[str]:
    """Yield what the page says of the operators on a topology."""
    failed = {name: row for name, row in ops.items() if row.get("failed")}
    calls: dict[str, list[str]] = {}
    for name, row in ops.items():
        for call in row.get("calls", ()):
            calls.setdefault(call, []).append(f"`{name}`")
    compiled = sum(bool(row.get("compiled")) for row in ops.values())
    yield f"## Operators on a {KINDS[topology]}\n"
    yield (
        f"For {topology}, {compiled:,} of {len(ops):,} entries of torch's database that have samples in float32 "
        "compile, forward and with their gradient; up to three more samples of each lower. What stands in neither of "
        f"these tables does so without a custom call.{' These do not, or not with all samples:' if failed else ''}\n"
    )
    yield _table(
        ("entry", "samples that fail", "why"),
        [
            (f"`{name}`", f"{row['failed']} of {row.get('samples', '?')}", _short(row["why"]))
            for name, row in failed.items()
        ],
    )
    yield (
        "These are not made of XLA's own operations alone, but call a routine that the platform has, or that XLA's "
        "compiler expands:\n"
    )
    yield _table(("custom call", "entries"), [(f"`{call}`", ", ".join(names)) for call, names in sorted(calls.items())])


GPUS = """\
`tensor_split` reads how many parts it is to make, and a plan reads zeros. The eigenvalues of general matrices ask the
cuSOLVER of the machine for its version, and TPUs have none of them.

jax's plugin for CUDA compiles for the H100 that is not there ([how](../how-to/plan-for-a-tpu-pod.md#plan-for-gpus)).
`tests/lowering/test_described.py` compiles for both what rules choose by platform, and fails where a rule that asks for
the platform is not among it. What rules compute there is checked on a GPU
([set up a GPU](../how-to/set-up-a-gpu-or-tpu.md)).
"""


def _short(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:160]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    found = [heads, ("---",) * len(heads), *rows]
    return "".join("| " + " | ".join(row) + " |\n" for row in found) if rows else ""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("models", "ops"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--models", type=Path, default=Path("benchmarks"), help="folder of models.py")
        command.add_argument("--samples", type=int, default=4)
        command.add_argument("--shard", default="0/1")
        command.add_argument("--ops", default="")
        command.add_argument("--topology", default=TOPOLOGY, help="of the operators: v5e:2x4 or h100:1")
        command.add_argument("--haste", action="store_true", help="let XLA compile in a quarter of the time")
        command.add_argument("--compile", action="store_true")
    commands.add_parser("page").add_argument("files", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    if options.command == "page":
        page(options.files)
        return 0
    warnings.simplefilter("ignore")
    if options.haste:
        jax.config.update("jax_exec_time_optimization_effort", -1.0)
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {line.get("op") or line.get("model") for line in lines}
    last = lines[-1].get("started") if lines else None
    with options.out.open("a") as out:
        if last and sum(line.get("started") == last for line in lines) > 1:
            kind = "op" if options.command == "ops" else "model"
            died = {"topology": options.topology, "samples": 0, "failed": 1, "why": ENDED, "calls": [], "compiled": ""}
            out.write(json.dumps({kind: last, **died}) + "\n")
            done.add(last)
        for result in (of_models if options.command == "models" else of_ops)(done, options):
            out.write(json.dumps(result) + "\n")
            out.flush()
            print(json.dumps(result)[:200], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
