"""``run-package``: run a packaged program on inputs from files; ``inspect`` shows a package with `show_package`."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np
import typer
from numpy.typing import NDArray
from torch.utils._pytree import tree_flatten, tree_unflatten

from lazytpu.cli import tables
from lazytpu.dtypes import to_numpy
from lazytpu.errors import ArtifactError
from lazytpu.export.package import Package, describe, load_package
from lazytpu.export.signature import ArraySpec, as_dtype, load_spec
from lazytpu.observe.metrics_tables import table

SUFFIX = ".ltz"
Array: TypeAlias = NDArray[np.generic]
_savez: Callable[..., None] = np.savez  # its own type takes no dictionary of arrays


def run_package(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `lazytpu.export.package` wrote.")],
    inputs: Annotated[
        list[Path] | None,
        typer.Option("-i", "--input", metavar="X.npy", help="An input; repeat for each, in order."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="Y.npz", help="Write the outputs there, by name.")
    ] = None,
) -> None:
    """Run a packaged program on arrays from `.npy` files, and print or write what it returns.

    Types that numpy lacks (bfloat16) are read from, and written as, float32.
    """
    try:
        package = load_package(file)
        results = _run(package, [_read(path) for path in inputs or []])
    except (ArtifactError, ImportError, OSError, TypeError, ValueError) as error:
        typer.echo(f"run-package: {error}", err=True)
        raise typer.Exit(1) from None
    if output is not None:
        _savez(output, **results)
    for name, array in results.items():
        typer.echo(f"{name}: {package.output(name).describe()}")
        if output is None:
            typer.echo(np.array2string(array, threshold=20))


def _read(path: Path) -> Array:
    array = np.load(path, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} holds several arrays; pass one .npy file for each input")
    return array


def _run(package: Package, arrays: list[Array]) -> dict[str, Array]:
    """Return the outputs by name."""
    specs = package.signature.arrays
    if len(arrays) != len(specs):
        wanted = ", ".join(f"{x.name}: {x.describe()}" for x in specs)
        raise ValueError(f"the program takes {len(specs)} inputs ({wanted}), but {len(arrays)} were passed")
    given = iter(_as_type(x, spec) for x, spec in zip(arrays, specs, strict=True))
    leaves = [next(given) if isinstance(x, ArraySpec) else x["constant"] for x in package.signature.inputs]
    args, kwargs = tree_unflatten(leaves, load_spec(package.signature.in_spec))
    found = [x for x in tree_flatten(package(*args, **kwargs))[0] if hasattr(x, "dtype") or isinstance(x, int)]
    return {name: _plain(x) for name, x in zip(package.output_names, found, strict=False)}


def _as_type(array: Array, spec: ArraySpec) -> Array:
    wanted = to_numpy(as_dtype(spec.dtype))
    return array.astype(wanted) if wanted.kind == "V" and array.dtype == np.float32 else array


def _plain(x: object) -> Array:
    array = np.asarray(x)
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def is_package(path: Path) -> bool:
    """Return whether a file looks like a package."""
    return path.suffix == SUFFIX or zipfile.is_zipfile(path)


def show_package(path: Path) -> None:
    """Print what a package contains, after checking that nothing was changed."""
    try:
        found = describe(path)
    except (ArtifactError, ImportError, OSError) as error:
        typer.echo(f"inspect: {error}", err=True)
        raise typer.Exit(1) from None
    out = tables.console()
    sizes = {"file": found["bytes"], "weights": found["weight_bytes"], "executable": found["executable_bytes"]}
    rows = {
        "bytes": {name: f"{n:,}" for name, n in sizes.items()},
        "inputs": found["inputs"],
        "outputs": found["outputs"],
        "weights": found["weights"],
        "program": {
            "StableHLO for": ", ".join(found["platforms"]),
            "executable for": ", ".join(filter(None, found["executable_for"])) or "(none)",
            "runs here without compiling": "yes" if found["runs_here_without_compiling"] else "no",
            "uses random numbers": "yes" if found["random"] else "no",
        },
        "versions": found["versions"],
        "metadata": found["metadata"],
    }
    for section, values in rows.items():
        if values:
            out.print(table([section, ""], [[n, str(v)] for n, v in values.items()], left=2))
