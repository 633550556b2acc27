"""Matrix products followed by reductions, beside numpy: where YNNPACK gave wrong values, or ended the process.

    python -m tests.sweep_products                   # all; tells of the first wrong ones
    python -m tests.sweep_products --part 3/50       # a fiftieth of them
    python -m tests.sweep_products --plain           # jax alone, with XLA's own options
    python -m tests.sweep_products --plain --fusions LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT

A child process runs the programs, and is replaced when one of them ends it.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import numpy as np

POINTS = [1 << 14, (1 << 15) - 1, 1 << 15, (1 << 15) + 1, 40_000, (1 << 16) - 1, 1 << 16, (1 << 16) + 3, 1 << 17]
REDUCTIONS = ("sum", "amax", "argmax", "norm", "mean", "amin", "prod")
_TOLERANCE = {"float32": 2e-4, "float64": 1e-10}

Case = tuple[Any, ...]


def products() -> Iterator[Case]:
    """Products [rows, inner] @ [inner, points] or transposed, reduced over either dimension."""
    sizes = itertools.product(range(1, 9), range(1, 10), POINTS)
    for (rows, inner, points), dtype, order in itertools.product(sizes, _TOLERANCE, ("ab", "ba")):
        for dim, reduction in enumerate((REDUCTIONS[(rows + inner + points) % 7], REDUCTIONS[(rows * inner) % 7])):
            yield "product", dtype, (rows, inner, points), order, dim, reduction


def elementwise() -> Iterator[Case]:
    """Products of equal elements, of rank 1 to 8, reduced over each dimension and over pairs of them."""
    shapes = [(2, 2, 8, 8, 8, 2, 3, 2)[8 - rank :] for rank in range(1, 9)]
    shapes += [
        (3, 1, 2, 2, 8, 8, 8),
        (40_000, 3),
        (3, 40_000),
        (1, 3, 40_000),
        (3, 1, 33_000, 2),
        (2, 3, 4, 5, 6, 7, 8),
    ]
    for shape, dtype in itertools.product(shapes, _TOLERANCE):
        dims: list[Any] = [*range(len(shape)), *itertools.combinations(range(len(shape)), 2)]
        for i, dim in enumerate(dims):
            yield "elementwise", dtype, shape, "ab", dim, REDUCTIONS[i % 7] if isinstance(dim, int) else "sum"


def batched() -> Iterator[Case]:
    """Batches of products, of rank 3 to 8, reduced over each dimension."""
    for rank, dtype in itertools.product(range(3, 9), _TOLERANCE):
        for dim, reduction in itertools.product(range(rank), ("sum", "amax", "norm")):
            yield "batched", dtype, (*[2] * (rank - 3), 3, 4, 5, 9_000), "ab", dim, reduction


def operands(case: Case) -> list[np.ndarray[Any, Any]]:
    """Random arrays for a case."""
    kind, dtype, sizes, order = case[:4]
    random = np.random.default_rng(hash(sizes) & 0xFFFF)
    if kind == "elementwise":
        shapes = [sizes, sizes]
    elif kind == "product":
        rows, inner, points = sizes
        shapes = [(rows, inner), (points, inner)]
    else:
        *batch, rows, inner, points = sizes
        shapes = [(*batch, rows, inner), (*batch, inner, points)]
    return [random.uniform(0.5, 1.5, shape).astype(dtype) for shape in shapes]


def compute(case: Case, a: Any, b: Any, reduce: Callable[[Any, str, Any], Any]) -> Any:
    """The result of a case, for arrays of any library."""
    kind, _, _, order, dim, reduction = case
    if kind == "elementwise":
        product = a * b
    elif kind == "batched":
        product = a @ b
    else:
        product = a @ b.T if order == "ab" else b @ a.T
    return reduce(product, reduction, dim)


def _numpy_reduce(x: Any, reduction: str, dim: Any) -> Any:
    return np.linalg.norm(x, axis=dim) if reduction == "norm" else getattr(np, reduction)(x, axis=dim)


def _torch_reduce(x: Any, reduction: str, dim: Any) -> Any:
    return getattr(x, reduction)(dim=dim)


def _jax_reduce(x: Any, reduction: str, dim: Any) -> Any:
    import jax.numpy as jnp

    return jnp.sqrt((x * x).sum(dim)) if reduction == "norm" else getattr(jnp, reduction)(x, axis=dim)


def _ours(case: Case) -> np.ndarray[Any, Any]:
    import torch

    import lazytpu

    a, b = (torch.from_numpy(x).to(lazytpu.device()) for x in operands(case))
    result: np.ndarray[Any, Any] = compute(case, a, b, _torch_reduce).cpu().numpy()
    return result


def _plain(case: Case, fusions: str | None = None) -> np.ndarray[Any, Any]:
    import jax

    options = {} if fusions is None else {"xla_cpu_experimental_ynn_fusion_type": fusions}
    with jax.enable_x64(True):
        run = jax.jit(lambda a, b: compute(case, a, b, _jax_reduce), compiler_options=options)
        return np.asarray(run(*operands(case)))


def difference(case: Case, run: Callable[[Case], np.ndarray[Any, Any]]) -> str:
    """How the result of a case differs from numpy's; empty where it does not."""
    got, wanted = run(case), compute(case, *operands(case), _numpy_reduce)
    if case[5] == "argmax":  # several places where largest ones are equal but for rounding
        product = compute(case, *operands(case), lambda x, *_: x)
        got, wanted = (np.take_along_axis(product, np.expand_dims(x, case[4]), case[4]) for x in (got, wanted))
    limit = _TOLERANCE[case[1]]
    wrong = ~np.isclose(got, wanted, rtol=limit, atol=limit)
    return f"{wrong.sum()} of {wrong.size} values are wrong" if wrong.any() else ""


def _serve(connection: Connection, run: Callable[[Case], np.ndarray[Any, Any]]) -> None:
    while True:
        connection.send(difference(connection.recv(), run))


class Child:
    """A process that tries cases, replaced when it ends."""

    def __init__(self, run: Callable[[Case], np.ndarray[Any, Any]]) -> None:
        self.run = run
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, self.run), daemon=True)
        self.process.start()
        other.close()

    def difference(self, case: Case) -> str:
        self.connection.send(case)
        try:
            return str(self.connection.recv())
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            self.start()
            return f"the process ended with {code}"


def main() -> int:
    """Tries the cases; 1 if some are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", default="0/1", help="which part of the cases, of how many")
    parser.add_argument("--plain", action="store_true", help="jax alone, with XLA's own options")
    parser.add_argument("--fusions", help="with --plain: what XLA may hand to YNNPACK, separated by commas")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    cases = [*elementwise(), *batched(), *products()]
    Random(0).shuffle(cases)  # else a part would have the same dtypes and dimensions all over
    cases = cases[part::parts]
    child, wrong = Child(partial(_plain, fusions=options.fusions) if options.plain else _ours), 0
    for case in cases:
        found = child.difference(case)
        wrong += bool(found)
        if found:
            print(*case, found, flush=True)
    print(f"{len(cases)} cases, {wrong} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
