"""The package is layers: imports point one way, jax stays in its place, files stay short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "lazytpu"

# A module imports from its own layer and from those above it in this list.  `*` stands for any name.
LAYERS = {
    "words": (
        "cache config dtypes errors executing.pages metrics random recording recording.schema "
        "reporting reporting.ledger reporting.logs reporting.metrics_* reporting.regions "
        "torch_api torch_api.after_import torch_api.copying torch_api.interrupts torch_api.printing torch_api.versions"
    ),
    "ir": "ir ir.*",
    "lowering": "lowering lowering.*",
    "runtime": (
        "executing executing.bounds executing.compiling executing.executable executing.mappings executing.platforms "
        "executing.prefetch executing.runtime executing.serialized executing.warmup "
        "reporting.events reporting.placement"
    ),
    "storage": "storage tensor",
    "recording": "recording.*",
    "step": "executing.eager reporting.origin step",
    "kernels": "kernels kernels.* reporting.pace torch_api.fork torch_api.modules torch_api.saving",
    "device": "device torch_api.*",
    "front": (
        "debug debug.* dynamo dynamo.* export export.* interop interop.* jit loader profiler quantization "
        "quantization.* replaying replaying.* scanning scanning.* spmd spmd.*"
    ),
    "package": "lazytpu",
    "stand-ins": "compat compat.*",
    "commands": "cli cli.* __main__",
}

# Where jax may be imported: lowering, what runs programs, the table of dtypes, the check of its version.
JAX = (
    "lowering lowering.* executing.platforms executing.runtime executing.compiling executing.serialized "
    "executing.warmup dtypes torch_api.versions export export.* interop interop.* profiler spmd spmd.*"
)

MAX_LINES = 400


@dataclass(frozen=True)
class Import:
    """One import statement.

    Attributes:
        target: what is imported, a module of this package without the leading ``lazytpu.`` or another's full name.
        ours: whether it is a module of this package.
        inside: the function it stands in, empty at the top of a module.
    """

    target: str
    ours: bool
    inside: str


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "lazytpu"


MODULES = {module_name(path): path for path in ROOT.rglob("*.py")}


def imports_of(source: str, package: str) -> Iterator[Import]:
    """The imports of a module in ``package``, those under ``if TYPE_CHECKING`` left out."""

    def visit(node: ast.AST, inside: str) -> Iterator[Import]:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside = node.name
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield named(alias.name, inside)
        elif isinstance(node, ast.ImportFrom):
            start = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                full = f"{start}.{alias.name}"
                yield named(full if full.removeprefix("lazytpu.") in MODULES else start, inside)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    def named(full: str, inside: str) -> Import:
        ours = full == "lazytpu" or full.startswith("lazytpu.")
        return Import(full.removeprefix("lazytpu.") if ours else full, ours, inside)

    yield from visit(ast.parse(source), "")


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).parent.parts)


IMPORTS = {name: list(imports_of(path.read_text(), package_of(path))) for name, path in MODULES.items()}


def matches(module: str, patterns: str) -> bool:
    return any(fnmatch(module, pattern) for pattern in patterns.split())


def layer_of(module: str) -> int | None:
    """The position of a module's layer."""
    return next((i for i, patterns in enumerate(LAYERS.values()) if matches(module, patterns)), None)


def wrong_way(module: str, imports: list[Import]) -> list[str]:
    """Imports from a layer below."""
    layer = layer_of(module)
    assert layer is not None
    return [f"{module} imports {i.target}" for i in imports if i.ours and (layer_of(i.target) or 0) > layer]


def test_every_module_has_a_layer():
    assert [name for name in sorted(MODULES) if layer_of(name) is None] == []


@pytest.mark.parametrize("module", sorted(name for name in MODULES if layer_of(name) is not None))
def test_imports_point_one_way(module):
    assert wrong_way(module, IMPORTS[module]) == []


def test_no_cycle():
    graph = {name: {i.target for i in found if i.ours} for name, found in IMPORTS.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which shows the cycle


def test_no_import_of_ours_hides_in_a_function():
    hidden = [
        f"{name}.{i.inside} imports {i.target}" for name, found in IMPORTS.items() for i in found if i.ours and i.inside
    ]
    assert hidden == []


def test_jax_stays_in_its_place():
    users = {name for name, found in IMPORTS.items() for i in found if i.target.partition(".")[0] in ("jax", "jaxlib")}
    assert sorted(name for name in users if not matches(name, JAX)) == []
    assert "executing.runtime" in users


def test_files_are_short():
    lengths = {name: path.read_text().count("\n") for name, path in MODULES.items()}
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_the_checks_notice():
    top = "import lazytpu.device\nfrom lazytpu.runtime import runtime\n"
    found = list(imports_of(top + "def f():\n    from lazytpu.step import cut\n    import jax\n", "lazytpu"))
    assert [(i.target, i.ours, i.inside) for i in found] == [
        ("device", True, ""),
        ("executing.runtime", True, ""),
        ("step", True, "f"),
        ("jax", False, "f"),
    ]
    assert wrong_way("ir.graph", found) == [f"ir.graph imports {t}" for t in ("device", "executing.runtime", "step")]
    assert wrong_way("device", found) == []
