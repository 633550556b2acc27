"""Write docs/explanation/scaling.md, its data and its plots from what `benchmarks.pods` compiled."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.page import ROOT, markdown_table, save, write_part
from benchmarks.pods import DEPTHS, SHAPES, Shape
from lazytpu.debug.chips import Chip, chip_of
from lazytpu.observe.metrics_tables import size

PAGE, FIGURES = ROOT / "docs/explanation/scaling.md", ROOT / "docs/_static"
DATA = ROOT / "benchmarks/results/pods.json"
MODELS = {"125m": "125 M", "8b": "8 B", "70b": "70 B"}
_MAXTEXT = "[MaxText](https://maxtext.readthedocs.io/en/latest/reference/models/tiering.html)"
_PYTORCH_XLA = "[PyTorch/XLA](https://pytorch.org/blog/high-performance-llama-2/)"
PUBLISHED = (  # case, what was measured, by whom, its MFU in %
    ("70b-fsdp-v5p-512", "Llama 2 70B on 512 v5p", _MAXTEXT, 65.4),
    ("8b-fsdp-v6e-256-kernel", "Llama 3.1 8B on 256 v6e", _MAXTEXT, 45.46),
    ("70b-fsdp-v5e-256", "Llama 2 70B, here on 256 v5e", _PYTORCH_XLA, 53.0),
)
TORCHTITAN = (6667, 6514)  # tokens a second and GPU, on 8 and on 128
GIGA = 1e9
KERNEL_PRODUCTS = (
    11  # of jax's flash attention: 2 forward, computed twice, and 4 + 3 in the two kernels of its gradient
)


@dataclass(frozen=True)
class Case:
    """A model on a number of chips.

    Attributes:
        name: ``8b-fsdp-v5p-64``.
        low, high: plans with the two numbers of layers, as `lazytpu.spmd.plan` writes them.
    """

    name: str
    low: Mapping[str, Any]
    high: Mapping[str, Any]

    @property
    def model(self) -> str:
        """The model's name."""
        return self.name.split("-")[0]

    @property
    def shape(self) -> Shape:
        """The model's sizes."""
        return SHAPES[self.model]

    @property
    def chips(self) -> int:
        """How many chips."""
        return int(self.low["chips"])

    @property
    def chip(self) -> Chip:
        """The kind of chip."""
        found = chip_of(self.low["kind"])
        assert found is not None
        return found

    def whole(self, low: float, high: float) -> float:
        """Return a figure of the whole model, from those of its two depths."""
        return low + (high - low) / (DEPTHS[1] - DEPTHS[0]) * (self.shape.layers - DEPTHS[0])

    def time_s(self, part: str) -> float:
        """Return the least seconds of ``compute``, ``memory`` or ``links``; to compute those of kernels, too."""
        found = self.whole(self.low["roofline"][f"{part}_s"], self.high["roofline"][f"{part}_s"])
        return found + self.kernel_flops / self.chip.flops if part == "compute" else found

    @property
    def kernel_flops(self) -> float:
        """FLOPs of attention by a kernel, which skips the blocks that are masked; a plan cannot count them."""
        if not self.name.endswith("-kernel"):
            return 0.0
        shape = self.shape
        return KERNEL_PRODUCTS * shape.layers * self.tokens * shape.length * shape.width

    @property
    def least_s(self) -> float:
        """Return the least seconds of a step."""
        return max(map(self.time_s, ("compute", "memory", "links")))

    @property
    def apart_s(self) -> float:
        """Seconds of a step where nothing overlaps."""
        return sum(map(self.time_s, ("compute", "memory", "links")))

    @property
    def memory(self) -> float:
        """Bytes on a chip."""
        return self.whole(self.low["memory"]["needed"], self.high["memory"]["needed"])

    @property
    def tokens(self) -> int:
        """Tokens of a step on one chip."""
        return self.shape.sequences * self.shape.length

    def utilization(self, seconds: float) -> float:
        """Return the share of the peak that the FLOPs of the model alone are in so many seconds, in %."""
        return 100 * self.tokens * flops_of_token(self.shape) / (seconds * self.chip.flops)

    def bytes_of_layer(self, *kinds: str) -> float:
        """Return the bytes of collectives that one layer adds to a step."""
        low, high = (sum(c["bytes"] for c in x["collectives"] if c["kind"] in kinds) for x in (self.low, self.high))
        return (high - low) / (DEPTHS[1] - DEPTHS[0])


def flops_of_token(shape: Shape) -> float:
    """Return the FLOPs of training on a token, nothing computed twice: 6 a weight, and of attention what causes see."""
    weights = shape.layers * shape.of_layer + shape.vocabulary * shape.width
    return 6.0 * weights + 6.0 * shape.layers * shape.length * shape.width


def formula(case: Case) -> float:
    """Return the bytes that one layer sends by FSDP.

    Weights in bfloat16 are gathered forward and backward, on TPUs those of q, k and v once more; gradients are summed
    in float32, with those of two norms.  A weight none of whose sides has a part for each chip is on every chip whole.
    """
    shape = case.shape
    d, kv = shape.width, shape.width * shape.groups // shape.heads
    again = 3 if case.chip.switched == 0 else 2
    weights = [(d, d, again), (kv, d, again), (kv, d, again), (d, d, 2), *[(shape.hidden, d, 2)] * 3]
    gathers = sum(2.0 * a * b * times for a, b, times in weights if max(a, b) >= case.chips and "-dp-" not in case.name)
    return gathers + 4.0 * (shape.of_layer + 2 * d)


def read(files: Iterable[Path]) -> list[Case]:
    """Return the cases of some files of lines."""
    return cases_of([json.loads(line) for file in files for line in file.read_text().splitlines()])


def saved() -> list[Case]:
    """Return the cases that the page shows."""
    return cases_of(json.loads(DATA.read_text())["plans"])


def cases_of(lines: Iterable[Mapping[str, Any]]) -> list[Case]:
    """Return the cases of which both depths were compiled."""
    found = {(line["case"], line["depth"]): line for line in lines}
    names = dict.fromkeys(name for name, _ in found)
    return [Case(n, found[n, DEPTHS[0]], found[n, DEPTHS[1]]) for n in names if all((n, d) in found for d in DEPTHS)]


def scaling_rows(cases: Sequence[Case]) -> Iterator[list[str]]:
    """Yield rows of the main table."""
    for case in sorted(cases, key=lambda c: ([*SHAPES].index(c.model), c.chips)):
        times = [case.time_s(part) for part in ("compute", "memory", "links")]
        yield [
            MODELS[case.model],
            f"{case.chips:,}",
            f"{case.chips * case.tokens:,}",
            f"{size(round(case.memory))}{'' if case.memory <= case.low['memory']['limit'] else ', too much'}",
            *[f"{1000 * s:,.0f}" if s >= 0.1 else f"{1000 * s:.3g}" for s in times],
            ("compute", "memory", "links")[times.index(max(times))],
            f"{case.utilization(case.least_s):.0f} to {case.utilization(case.apart_s):.0f} %",
        ]


def sent(case: Case) -> float:
    """Return the bytes that one layer sends to gather and to sum."""
    return case.bytes_of_layer("all-gather", "all-reduce", "reduce-scatter")


def byte_rows(cases: Sequence[Case]) -> Iterator[list[str]]:
    """Yield rows of what a layer sends beside the formula."""
    for case in cases:
        gathers, sums = case.bytes_of_layer("all-gather"), case.bytes_of_layer("all-reduce", "reduce-scatter")
        wanted = formula(case)
        cells = [f"{x / 1e6:,.1f}" for x in (gathers, sums, wanted)]
        yield [f"`{case.name}`", *cells, f"{100 * (sent(case) / wanted - 1):+.2f} %"]


def published_rows(cases: Sequence[Case]) -> Iterator[list[str]]:
    """Yield rows of what was published beside what the roofline allows."""
    known = {case.name: case for case in cases}
    for name, what, who, mfu in PUBLISHED:
        if name in known:
            case = known[name]
            without = max(case.time_s("compute"), case.time_s("links"))
            bounds = [f"{case.utilization(seconds):.0f} %" for seconds in (without, case.least_s)]
            yield [what, who, f"{mfu} %", *bounds]


def efficiency(few: Case, many: Case) -> tuple[float, float]:
    """Return how much of its speed a chip keeps, in %: where everything overlaps, and where nothing does."""
    return 100 * few.least_s / many.least_s, 100 * few.apart_s / many.apart_s


def draw(cases: Sequence[Case], folder: Path) -> None:
    """Draw utilization and memory by the number of chips."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "lazytpu", "svg.fonttype": "none", "font.size": 9, "axes.grid": True})
    from matplotlib import pyplot

    plots = {
        "utilization": ("MFU that the roofline allows, %", lambda c: c.utilization(c.least_s)),
        "memory": ("GB on a chip", lambda c: c.memory / GIGA),
    }
    for name, (label, value) in plots.items():
        figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
        for model, title in MODELS.items():
            points = sorted((c.chips, value(c)) for c in cases if c.name.startswith(f"{model}-fsdp-v5p-"))
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.2, label=title)
        axes.set_xscale("log", base=2)
        axes.set_xticks([8, 64, 256, 1024, 4096], ["8", "64", "256", "1,024", "4,096"])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set(xlabel="v5p chips", ylabel=label)
        axes.legend(frameon=False)
        figure.savefig(folder / f"scaling-{name}.svg", metadata={"Date": None})
        pyplot.close(figure)


def write(files: Sequence[Path]) -> None:
    """Write data, plots and the parts of the page that are figures."""
    cases = read(files)
    record = {
        "versions": {name: metadata.version(name) for name in ("torch", "jax", "libtpu")},
        "plans": [
            {"case": c.name, "depth": d, **x} for c in cases for d, x in zip(DEPTHS, (c.low, c.high), strict=True)
        ],
    }
    save(DATA, record)
    pods = [c for c in cases if "-fsdp-v5p-" in c.name]
    heads = ["model", "chips", "tokens a step", "memory on a chip"]
    heads += ["compute, ms", "memory, ms", "links, ms", "bound by", "MFU at most"]
    write_part(PAGE, "table", markdown_table(heads, [*scaling_rows(pods)]))
    heads = ["case", "all-gather, MB", "all-reduce, reduce-scatter, MB", "formula, MB", "difference"]
    write_part(PAGE, "bytes", markdown_table(heads, [*byte_rows(cases)]))
    heads = ["measured", "by", "published MFU", "roofline of computing and links", "and of memory"]
    write_part(PAGE, "published", markdown_table(heads, [*published_rows(cases)]))
    known = {case.name: case for case in cases}
    few, many = (known.get(f"8b-fsdp-h100-{n}") for n in (8, 128))
    if few and many:
        over, apart = efficiency(few, many)
        text = (
            f"A GPU of 128 keeps {over:.1f} % of its speed among 8 where all overlaps and {apart:.1f} % where nothing "
        )
        text += f"does; torchtitan measured {100 * TORCHTITAN[1] / TORCHTITAN[0]:.1f} %."
        write_part(PAGE, "torchtitan", text)
    draw(cases, FIGURES)


if __name__ == "__main__":
    write([Path(name) for name in sys.argv[1:]])
