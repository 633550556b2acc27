"""Read a script for another system and say, name by name, what becomes of it here.  Nothing of the script runs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from lazytpu.compat import names
from lazytpu.compat.finder import PACKAGES
from lazytpu.torch_backend import torch_module

WORKS, DIFFERS, LACKS = "works", "differs", "lacks"

_FOREIGN = {
    "torch.cuda": "the device of this process is lazytpu.device(); torch.accelerator has most of these for any device",
    "torch.distributed": "works with backend lazytpu, which init_process_group() chooses: one process a device",
}
_METHODS = {
    "cuda": "use instead: .to(lazytpu.device())",
    "experimental_get_compiler_ir": "use instead: python -m lazytpu run --dump DIR, or lazytpu.hlo_text",
}
_TENSORFLOW = dict.fromkeys(("tensorflow", "keras", "tensorflow.keras"), "use instead: torch, with import lazytpu")
_REST_OF_TENSORFLOW = "use instead: the function of the same name in torch, if there is one"


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """What becomes of one name on one line.

    Attributes:
        line: counts from 1.
        name: in full, such as ``torch_xla.core.xla_model.mark_step``.
        verdict: ``works``, ``differs`` or ``lacks``.
        advice: what is different, or what to use instead; empty where it works.
    """

    line: int
    name: str
    verdict: str
    advice: str = ""


def check_script(script: Path) -> list[Finding]:
    """Return the findings for a script, in the order of its lines.

    Raises:
        OSError: it cannot be read.
        SyntaxError: it is not Python.
    """
    return check_source(script.read_text(), str(script))


def check_source(source: str, file: str = "<script>") -> list[Finding]:
    """Return the findings for the text of a script."""
    nodes = list(ast.walk(ast.parse(source, file)))
    found = [finding for name, line in _uses(nodes) for finding in _judged(name, line)]
    found += [
        Finding(node.lineno, f".{node.func.attr}()", LACKS, _METHODS[node.func.attr])
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS
    ]
    return sorted(set(found))


def _uses(nodes: list[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield the full name and the line of what is imported and used; follows ``m = xm`` and ``self.m = xm``."""
    known: dict[str, str] = {}  # the script's name for something to its full name
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                known[alias.asname or top] = alias.name if alias.asname else top
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if alias.name == "*":
                    known |= {name: f"{node.module}.{name}" for name in _star(node.module)}
                    yield node.module, node.lineno
                else:
                    known[alias.asname or alias.name] = full = f"{node.module}.{alias.name}"
                    yield full, node.lineno
    assigned = [
        (ast.unparse(target), node.value)
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, (ast.Name, ast.Attribute))
    ]
    while new := {to: full for to, value in assigned if to not in known and (full := _full_name(value, known))}:
        known |= new
    longer = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load) and id(node) not in longer:
            if full_name := _full_name(node, known):
                yield full_name, node.lineno


def _full_name(node: ast.expr, known: dict[str, str]) -> str:
    """Return the full name of an expression; empty for what is not imported."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return ""
    text = ast.unparse(node)
    if text in known or isinstance(node, ast.Name):
        return known.get(text, "")
    base = _full_name(node.value, known)
    return base and f"{base}.{node.attr}"


def _star(module: str) -> list[str]:
    """Return the names that ``from module import *`` brings in, with those that the shim lacks."""
    prefix = f"{module}."
    lacks = [*names.ANYWHERE, *[name.removeprefix(prefix) for name in names.MISSING if name.startswith(prefix)]]
    if module.partition(".")[0] not in PACKAGES or not _exists(f"lazytpu.compat.{module}"):
        return lacks
    loaded = importlib.import_module(f"lazytpu.compat.{module}")
    return [*getattr(loaded, "__all__", [n for n in vars(loaded) if not n.startswith("_")]), *lacks]


def _judged(name: str, line: int) -> Iterator[Finding]:
    """Yield the finding for one name, if it is of another system."""
    package = name.partition(".")[0]
    if package in PACKAGES:
        yield Finding(line, name, *verdict_of(name))
    elif name.startswith(("torch.tpu.", "torch.mlu.")):
        _, module, attribute, *_ = name.split(".")
        if hasattr(torch_module, attribute):
            yield Finding(line, name, WORKS)
        else:
            yield Finding(line, name, LACKS, f"see the reference of torch.{module}")
    elif package in ("tensorflow", "keras"):
        full = name if package == "tensorflow" else f"tensorflow.{name}"
        yield Finding(line, name, LACKS, _TENSORFLOW.get(name) or names.advice_for(full) or _REST_OF_TENSORFLOW)
    for prefix, advice in _FOREIGN.items():
        if name == prefix or name.startswith(f"{prefix}."):
            yield Finding(line, name, LACKS, advice)


def verdict_of(name: str) -> tuple[str, str]:
    """Return what becomes of a name of one of the packages: the verdict and the advice."""
    parts, n = name.split("."), name.count(".") + 1
    while not _exists(f"lazytpu.compat.{'.'.join(parts[:n])}"):
        n -= 1
    module, attribute = ".".join(parts[:n]), ".".join(parts[n : n + 1])  # the rest is the object's own affair
    try:
        getattr(importlib.import_module(f"lazytpu.compat.{module}"), attribute or "__name__")
    except (ImportError, AttributeError):
        return LACKS, names.advice_for(name)
    full = f"{module}.{attribute}" if attribute else name
    return (DIFFERS, names.DIFFERENT[full]) if full in names.DIFFERENT else (WORKS, "")


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent is no package
        return False


def names_of(package: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, verdict, what it does, advice) for each public name of a shim and each known missing one.

    Args:
        package: one with a shim, or ``tensorflow``, of which everything is missing.
    """
    if package in PACKAGES:
        folder = Path(str(importlib.import_module(f"lazytpu.compat.{package}").__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            for name, value in sorted(vars(importlib.import_module(f"lazytpu.compat.{module}")).items()):
                if not name.startswith("_") and _is_of(value, package, name):
                    first_line = (getattr(value, "__doc__", None) or "").strip().partition("\n")[0]
                    verdict, advice = verdict_of(f"{module}.{name}")
                    yield f"{module}.{name}", verdict, first_line, advice
    for name in names.MISSING:
        if name.startswith(f"{package}."):
            yield name, LACKS, "", names.advice_for(name)


def _is_of(value: object, package: str, name: str) -> bool:
    """Return whether a name of a module is part of its interface, and not something it imports to work with."""
    if isinstance(value, ModuleType) or value is torch:
        return False
    ours = (getattr(value, "__module__", None) or "").startswith(f"lazytpu.compat.{package}")
    return ours and callable(value) or name.startswith("REDUCE_") or name == "aot_backend"
