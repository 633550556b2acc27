"""What a plan says of a step: memory, collectives, FLOPs and the least time, of one chip."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

import jax

from lazytpu.debug import hlo
from lazytpu.debug.chips import Chip, chip_of
from lazytpu.debug.collectives import Collective, collectives_of, groups_over
from lazytpu.debug.folder import JsonObject
from lazytpu.debug.hlo_costs import Product, kernels, memory_bytes, products
from lazytpu.debug.on_mesh import REASONS
from lazytpu.debug.roofline import Roofline, link_seconds, links_of, roofline
from lazytpu.ir.sharding import Mesh
from lazytpu.lowering.target import Topology
from lazytpu.observe.metrics_tables import size
from lazytpu.runtime.ahead import Compiled, Memory


@dataclass(frozen=True)
class Program:
    """One program of a step, compiled for a topology.

    Attributes:
        compiled: what XLA made of it.
        topology: what for.
    """

    compiled: Compiled
    topology: Topology

    @property
    def mesh(self) -> Mesh:
        """The mesh; one device where nothing is marked."""
        return self.compiled.graph.mesh or Mesh((1,), ("device",), (self.topology.devices[0].id,))

    @cached_property
    def _module(self) -> hlo.Module:
        return hlo.parse(self.compiled.text)

    @cached_property
    def collectives(self) -> list[Collective]:
        """What it sends."""
        return collectives_of(self._module, self.mesh, self.compiled.graph)

    @cached_property
    def products(self) -> list[Product]:
        """The products and convolutions that one chip computes."""
        return list(products(self._module))

    @cached_property
    def kernels(self) -> int:
        """How many Pallas kernels it starts; their FLOPs are in none of the figures."""
        return kernels(self._module)

    @cached_property
    def moved_bytes(self) -> int:
        """Bytes that one chip reads from and writes to its memory."""
        return memory_bytes(self._module)

    def links(self, chip: Chip) -> dict[str, int]:
        """Return for each axis of the mesh how many links of a chip its rings can use."""
        places = {d.id: _place_of(d, chip) for d in self.topology.devices}
        extents = [len(set(side)) for side in zip(*places.values(), strict=True)]
        mesh = self.mesh
        found = {}
        for position, name in enumerate(mesh.axis_names):
            group = next(iter(groups_over(mesh.shape, [position])))
            found[name] = links_of([places[mesh.devices[i]] for i in group], extents, chip)
        return found


def _place_of(device: jax.Device, chip: Chip) -> tuple[int, ...]:
    """Return where a device is: in the grid of chips; behind a switch its host and its number."""
    return (device.process_index, device.id) if chip.switched else tuple(getattr(device, "coords", (device.id,)))


@dataclass(frozen=True)
class Plan:
    """What a step would need and do on a topology; made by `lazytpu.spmd.plan`, ``print`` shows it.

    Attributes:
        topology: its name.
        programs: that the step runs.
        reads: lines that read a tensor, which in a plan are zeros, and how often.
    """

    topology: Topology
    programs: tuple[Program, ...]
    reads: Mapping[str, int]

    @property
    def kind(self) -> str:
        """The kind of the chips, as jax names it."""
        return str(self.topology.devices[0].device_kind)

    @property
    def chip(self) -> Chip | None:
        """Published figures of the chip, None where there are none here."""
        return chip_of(self.kind)

    @property
    def memory(self) -> Memory:
        """Bytes on one chip, of the program that needs most."""
        return max((p.compiled.memory for p in self.programs), key=lambda m: m.needed)

    @property
    def limit_bytes(self) -> int:
        """Memory of a chip; 0 where it is not known."""
        limit = max(p.compiled.memory.limit for p in self.programs)
        return limit or (int(self.chip.hbm_bytes) if self.chip else 0)

    @property
    def fits(self) -> bool:
        """Whether XLA finds room for each program in the memory of a chip; it does not look at that of GPUs."""
        too_large = self.topology.platform == "gpu" and 0 < self.limit_bytes < self.memory.needed
        return all(p.compiled.fits for p in self.programs) and not too_large

    @property
    def collectives(self) -> list[Collective]:
        """What is sent in a step."""
        return [c for p in self.programs for c in p.collectives]

    @property
    def unasked(self) -> list[Collective]:
        """Collectives that move an intermediate result which nobody has marked."""
        return [c for c in self.collectives if not c.reason and c.group > 1]

    @property
    def flops(self) -> int:
        """FLOPs of products and convolutions that one chip computes in a step."""
        return sum(product.flops * product.runs for p in self.programs for product in p.products)

    @property
    def roofline(self) -> Roofline | None:
        """The least time of a step; None without figures of the chip, or where a program does not fit."""
        chip = self.chip
        if chip is None or not all(p.compiled.text for p in self.programs):
            return None
        parts = [roofline(p.products, p.moved_bytes, p.collectives, chip, p.links(chip)) for p in self.programs]
        return Roofline(sum(p.compute_s for p in parts), sum(p.memory_s for p in parts), sum(p.links_s for p in parts))

    def by_kind(self) -> list[JsonObject]:
        """Return a row for each kind of collective, axis and reason: how many run in a step, and their bytes."""
        chip = self.chip
        rows: dict[tuple[str, str, int, str], JsonObject] = {}
        for program in self.programs:
            links = program.links(chip) if chip else {}
            for one in program.collectives:
                if one.group < 2:
                    continue
                row = rows.setdefault(
                    (one.kind, one.axis, one.group, one.reason),
                    {"kind": one.kind, "axis": one.axis, "devices": one.group, "reason": one.reason}
                    | {"count": 0, "bytes": 0, "seconds": 0.0},
                )
                row["count"] += one.runs
                row["bytes"] += one.total_bytes
                row["seconds"] += link_seconds(one, chip, links) if chip else 0.0
        return sorted(rows.values(), key=lambda row: -row["bytes"])

    def as_json(self) -> JsonObject:
        """Return all of it as JSON can hold it."""
        line = self.roofline
        return {
            "topology": self.topology.name,
            "chips": len(self.topology.devices),
            "kind": self.kind,
            "mesh": [p.mesh.axes for p in self.programs],
            "ops": [len(p.compiled.graph.nodes) for p in self.programs],
            "memory": asdict(self.memory) | {"limit": self.limit_bytes},
            "fits": self.fits,
            "flops": self.flops,
            "kernels": sum(p.kernels for p in self.programs),
            "moved_bytes": sum(p.moved_bytes for p in self.programs),
            "collectives": self.by_kind(),
            "roofline": None if line is None else asdict(line),
            "compile_s": sum(p.compiled.compile_s for p in self.programs),
            "reads": dict(self.reads),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        first = self.programs[0]
        ops = " + ".join(str(len(p.compiled.graph.nodes)) for p in self.programs)
        yield f"a step of {ops} ops on {self.topology.name}: {len(self.topology.devices)} x {self.kind}, mesh " + (
            first.mesh.describe() if first.compiled.graph.mesh else "of one device: nothing is marked"
        )
        yield from self._memory_lines()
        if all(p.compiled.text for p in self.programs):
            started = sum(p.kernels for p in self.programs)
            uncounted = f", and what {started} Pallas kernels compute, which is not counted" if started else ""
            yield f"computes  {self.flops:.3g} FLOPs of products on each chip{uncounted}"
            yield from self._collective_lines()
        line = self.roofline
        if line is not None:
            parts = ", ".join(
                f"{name} {_time(s)}"
                for name, s in (("compute", line.compute_s), ("memory", line.memory_s), ("links", line.links_s))
            )
            yield f"time      at least {_time(line.least_s)}, bound by {line.bound} ({parts}; one after the other "
            yield f"          {_time(line.apart_s)})"
        elif self.fits:
            yield f"time      unknown: there are no figures of {self.kind} here"
        for place, count in self.reads.items():
            yield f"read      {count} x at {place}, which got zeros: a plan computes nothing"

    def _memory_lines(self) -> Iterator[str]:
        memory, limit = self.memory, self.limit_bytes
        share = f", {100 * memory.needed / limit:.1f} % of {size(limit)}" if limit else ""
        yield f"memory    {size(memory.needed)} on each chip{share}: {'fits' if self.fits else 'does not fit'}"
        if memory.arguments or memory.temporaries:
            new = memory.outputs - memory.aliased
            yield (
                f"          arguments {size(memory.arguments)}, results beside them {size(new)}, "
                f"temporaries {size(memory.temporaries)}, code {size(memory.code)}"
            )

    def _collective_lines(self) -> Iterator[str]:
        rows = self.by_kind()
        if not rows:
            yield "sends     nothing"
            return
        for i, row in enumerate(rows):
            seconds = f", {_time(row['seconds'])}" if self.chip else ""
            yield (
                f"{'sends' if not i else '':<10}{row['count']} x {row['kind']} over {row['axis']} "
                f"({row['devices']} chips), {size(row['bytes'])}{seconds}: {REASONS[row['reason']]}"
            )
        places = Counter[str]()
        for one in self.unasked:
            places[f"{one.kind} over {one.axis}, {size(one.total_bytes)}, for {one.op or '?'} at {one.at or '?'}"] += 1
        for i, (text, count) in enumerate(places.most_common(10)):
            yield f"{'unasked' if not i else '':<10}{count} x {text}"


def _time(seconds: float) -> str:
    """Return a time with its unit: ``1.23 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError(seconds)
