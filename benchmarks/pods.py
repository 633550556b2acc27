"""What a training step of a language model needs on a TPU pod, from programs compiled without one.

    python -m benchmarks.pods run --out pods.jsonl           # needs libtpu; minutes a line, some hours for all
    python -m benchmarks.pods run --out pods.jsonl --only 8b-fsdp-v5p-8
    python -m benchmarks.pods run --out pods.jsonl --only 8b-fsdp-v6e-256-kernel   # attention by a Pallas kernel
    python -m benchmarks.scaling_page pods.jsonl             # docs/explanation/scaling.md, its data and plots

Layers are equal, so each model is compiled with two small numbers of them (`DEPTHS`): half the difference is one layer,
and the figures of the whole model are those of the small one and one layer for each that it lacks.  XLA compiles in
haste, a quarter of the time, and without windowed products, so that collectives can be told by their names.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import torch
import torch.nn.functional as F
from jax.experimental.pallas.ops.tpu import flash_attention
from torch import nn

import lazytpu
from lazytpu import spmd
from lazytpu.lowering.support.shardings import mesh_of
from lazytpu.spmd.mesh import as_mesh

DEPTHS = (2, 4)
WHOLE = "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"
TOPOLOGIES = {
    "v5p": {8: "2x2x2", 64: "4x4x4", 256: "4x8x8", 512: "8x8x8", 1024: "8x8x16", 4096: "16x16x16"},
    "v6e": {8: "2x4", 64: "8x8", 256: "16x16"},
    "v5e": {8: "2x4", 64: "8x8", 256: "16x16"},
    "h100": {8: "8", 128: "16x8"},
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

    Attributes:
        layers, width, hidden, heads, groups: ``groups`` of heads share keys and values.
        vocabulary: of tokens.
        length: of a sequence; each chip has ``sequences`` of them.
        sequences: on each chip.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    groups: int
    vocabulary: int
    length: int
    sequences: int

    @property
    def of_layer(self) -> int:
        """Parameters of a layer, without norms."""
        kept = 2 * self.width * self.width * (1 + self.groups / self.heads)
        return int(kept) + 3 * self.width * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters, without norms."""
        return self.layers * self.of_layer + 2 * self.vocabulary * self.width


SHAPES = {
    "125m": Shape(12, 768, 2048, 12, 12, 32768, 2048, 4),
    "8b": Shape(32, 4096, 14336, 32, 8, 128256, 8192, 2),
    "70b": Shape(80, 8192, 28672, 64, 8, 32000, 4096, 2),
}


def by_kernel(mesh: spmd.Mesh, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute causal attention by jax's flash attention, a Pallas kernel that keeps scores on the chip."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
    found: torch.Tensor = lazytpu.call_jax(_kernel_over(mesh), q, keys, values)
    return found


@cache
def _kernel_over(mesh: spmd.Mesh) -> Callable[..., jax.Array]:
    def of_chip(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        n = min(512, q.shape[2])
        sizes = flash_attention.BlockSizes(n, n, n, 1, n, n, n, n, n, n, n)
        with jax.default_matmul_precision("default"):  # products of bfloat16 have no other
            scale = q.shape[-1] ** -0.5
            return flash_attention.flash_attention(q, k, v, causal=True, sm_scale=scale, block_sizes=sizes)

    spec = jax.sharding.PartitionSpec(mesh.axis_names)
    return jax.shard_map(of_chip, mesh=mesh_of(as_mesh(mesh)), in_specs=(spec,) * 3, out_specs=spec, check_vma=False)


class Layer(nn.Module):
    """Attention and a gated feed-forward net, each behind a norm."""

    def __init__(self, shape: Shape, kernel: spmd.Mesh | None) -> None:
        super().__init__()
        self.kernel = kernel
        d, kv = shape.width, shape.width * shape.groups // shape.heads
        self.size = shape.width // shape.heads
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q, self.k, self.v = (nn.Linear(d, n, bias=False) for n in (d, kv, kv))
        self.out = nn.Linear(d, d, bias=False)
        self.gate, self.up = (nn.Linear(d, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.kernel is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            y = by_kernel(self.kernel, q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """A language model whose layers are one loop."""

    def __init__(self, shape: Shape, depth: int, kernel: spmd.Mesh | None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList([Layer(shape, kernel) for _ in range(depth)])
        self.norm, self.head = nn.RMSNorm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = lazytpu.scan_layers(self.layers, self.tokens(x), checkpoint=True)
        return self.head(self.norm(h))


def program(shape: Shape, depth: int, how: str) -> Callable[[], Callable[[], None]]:
    """Return what is planned: a model in bfloat16, trained by AdamW with ``dp``, ``fsdp`` or ``fsdp-kernel``."""

    def make() -> Callable[[], None]:
        mesh = spmd.Mesh((-1,), ("data",))
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(lazytpu.device()):
            model = Model(shape, depth, mesh if how.endswith("kernel") else None)
        torch.set_default_dtype(torch.float32)
        if how.startswith("fsdp"):
            spmd.fully_shard(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        size = (mesh.size * shape.sequences, shape.length)

        def step() -> None:
            x, y = (torch.zeros(size, dtype=torch.int64, device=lazytpu.device()) for _ in range(2))
            spmd.mark_sharding(x, mesh, ("data",))
            spmd.mark_sharding(y, mesh, ("data",))
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def cases() -> Iterator[tuple[str, str, str, str, int]]:
    """Yield name, model, how, kind of chip and number of chips of what is compiled, what matters most first."""
    wanted = [(model, "fsdp", "v5p", chips) for chips in (8, 4096, 256, 64, 1024) for model in SHAPES]
    published = [("70b", "fsdp", "v5p", 512), ("8b", "fsdp", "v6e", 256), ("70b", "fsdp", "v5e", 256)]
    wanted[6:6] = [*published, ("125m", "dp", "v5p", 8), ("8b", "fsdp", "h100", 8), ("8b", "fsdp", "h100", 128)]
    wanted[9:9] = [("8b", "fsdp-kernel", "v6e", 256)]
    for model, how, kind, chips in wanted:
        name, _, kernel = how.partition("-")
        yield "-".join(filter(None, (model, name, kind, str(chips), kernel))), model, how, kind, chips


def run(options: argparse.Namespace) -> None:
    """Compile what is not in the file yet, one line for each case and depth."""
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {WHOLE}"
    for effort in ("jax_exec_time_optimization_effort", "jax_memory_fitting_effort"):
        jax.config.update(effort, -1.0)
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(line["case"], line["depth"]) for line in lines}
    chosen = set(filter(None, options.only.split(",")))
    for name, model, how, kind, chips in cases():
        for depth in DEPTHS:
            if (name, depth) in done or (chosen and name not in chosen):
                continue
            plan = spmd.plan(program(SHAPES[model], depth, how), f"{kind}:{TOPOLOGIES[kind][chips]}", steps=2)
            with options.out.open("a") as file:
                file.write(json.dumps({"case": name, "depth": depth, **plan.as_json()}) + "\n")
            print(name, depth, f"{plan.programs[0].compiled.compile_s:.0f} s", flush=True)
            if options.hlo:
                Path(options.hlo).write_text(plan.programs[0].compiled.text)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--only", default="")
    runs.add_argument("--hlo", default="")
    options = parser.parse_args(arguments)
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
