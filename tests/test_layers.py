"""Folders are layers: a folder of `lazytpu/` imports only itself and the folders below it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "lazytpu"

# The folders, lowest first.
LAYERS = [
    "foundation",  # the modules beside the folders: config, dtypes, errors, observers, random, versions
    "observe",
    "ir",
    "location",
    "passes",
    "lowering",
    "diagnosis",
    "runtime",
    "tensors",
    "tracing",
    "torch_backend",
    "dispatch",
    "distributed",
    "debug",
    "frontends",
    "export",
    "quantization",
    "spmd",
    "lazytpu",  # __init__.py: the public names
    "compat",
    "cli",
]

# The folders that use jax; of the foundation, only the check of its version.
JAX = {"versions", "lowering", "runtime", "frontends", "export", "debug"}

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
    """Return the name of a module below `lazytpu`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "lazytpu"


MODULES = {module_name(path): path for path in ROOT.rglob("*.py")}


def folder_of(module: str) -> str:
    """Return the folder that a module lies in."""
    head = module.partition(".")[0]
    if head in ("lazytpu", "__main__"):
        return "lazytpu" if head == "lazytpu" else "cli"
    return head if (ROOT / head).is_dir() else "foundation"


def imports_of(source: str, package: str) -> Iterator[Import]:
    """Yield the imports of a module in ``package``, those under ``if TYPE_CHECKING`` left out."""

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
    """Return the package that relative imports of a file start from."""
    return ".".join(path.relative_to(ROOT.parent).parent.parts)


IMPORTS = {name: list(imports_of(path.read_text(), package_of(path))) for name, path in MODULES.items()}


def upward(folder: str, imports: list[Import]) -> list[str]:
    """Return what is imported from a folder above ``folder``."""
    return [i.target for i in imports if i.ours and LAYERS.index(folder_of(i.target)) > LAYERS.index(folder)]


def test_every_folder_has_a_layer() -> None:
    assert sorted({folder_of(name) for name in MODULES}) == sorted(LAYERS)


@pytest.mark.parametrize("folder", LAYERS)
def test_folder_imports_only_folders_below(folder: str) -> None:
    found = {name: upward(folder, imports) for name, imports in IMPORTS.items() if folder_of(name) == folder}
    assert {name: targets for name, targets in found.items() if targets} == {}


def test_modules_form_no_cycle() -> None:
    graph = {name: {i.target for i in found if i.ours} for name, found in IMPORTS.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which shows the cycle


def test_no_import_of_ours_hides_in_a_function() -> None:
    hidden = [
        f"{name}.{i.inside} imports {i.target}" for name, found in IMPORTS.items() for i in found if i.ours and i.inside
    ]
    assert hidden == []


def test_jax_stays_in_its_folders() -> None:
    users = {name for name, found in IMPORTS.items() for i in found if i.target.partition(".")[0] in ("jax", "jaxlib")}
    assert sorted(name for name in users if name.partition(".")[0] not in JAX) == []


def test_files_are_short() -> None:
    lengths = {name: path.read_text().count("\n") for name, path in MODULES.items()}
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_the_checks_notice() -> None:
    top = "import lazytpu.dispatch.general\nfrom lazytpu.runtime import client\n"
    found = list(imports_of(top + "def f():\n    from lazytpu.tracing.step import cut\n    import jax\n", "lazytpu"))
    assert [(i.target, i.ours, i.inside) for i in found] == [
        ("dispatch.general", True, ""),
        ("runtime.client", True, ""),
        ("tracing.step", True, "f"),
        ("jax", False, "f"),
    ]
    assert upward("ir", found) == ["dispatch.general", "runtime.client", "tracing.step"]
    assert upward("dispatch", found) == []


def test_rules_are_registered_from_their_folder() -> None:
    """The package of rules imports its own modules only; `call_jax`, whose rule is elsewhere, imports that."""
    registering = {
        name for name, path in MODULES.items() if re.search(r"^(@lowers|lowers_each\()", path.read_text(), re.MULTILINE)
    }
    assert {name for name in registering if not name.startswith("lowering.rules.")} == {"frontends.jax.traced"}
    assert len(registering) > 40


def test_support_of_lowering_does_not_import_rules() -> None:
    support = {name: found for name, found in IMPORTS.items() if name.startswith("lowering.support")}
    assert [name for name, found in support.items() for i in found if i.target.startswith("lowering.rules")] == []
