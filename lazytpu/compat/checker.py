"""Reads a script of another system and tells, name by name, what becomes of it here.  Nothing of the script runs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lazytpu.compat import lacking, tensorflow_names
from lazytpu.compat.finder import PACKAGES
from lazytpu.compat.script_names import ScriptNames
from lazytpu.torch_backend import torch_module

WORKS, DIFFERS, LACKS = "works", "differs", "lacks"

DIFFERENT = {
    "torch_xla.distributed.xla_multiprocessing.spawn": "the function runs once, in this process; nprocs is None or 1",
    "torch_xla.launch": "the function runs once, in this process",
    "torch_xla.core.xla_model.optimization_barrier_": "ends the step instead",
    "torch_xla.core.xla_model.get_rng_state": "an integer that also counts the ops that drew numbers",
    "torch_xla.utils.serialization.save": "one file instead of a file and a folder; torch.load reads it",
    "torch_xla.debug.metrics.clear_counters": "sets metrics to zero, too",
    "torch_xla.debug.metrics.clear_metrics": "sets counters to zero, too",
    "torch_xla.experimental.eager_mode": "each op runs at once, for finding errors; slow",
    "torch_mlu.core.mlu_model.set_core_number": "XLA decides how many cores are used",
    "torch_mlu.core.mlu_model.set_core_version": "compiled for the device that is there",
    "torch_mlu.core.mlu_model.set_cnml_enabled": "nothing to switch: XLA does inference and training",
    "torch_mlu.core.mlu_model.set_input_format": "tensors are taken as they are",
    "torch_mlu.core.mlu_quantize.quantize_dynamic_mlu": "modules of lazytpu.quantization; scales are symmetric",
    "torch_mlu.core.mlu_quantize.adaptive_quantize": "rounds weights and inputs; the range of inputs is an average",
}
"""Full name to what is not as in the original."""

_FOREIGN = {
    "torch.cuda": "the device of this process is lazytpu.device(); torch.accelerator has most of these for any device",
    "torch.distributed": "one process and one device; init_process_group has nothing to connect",
}
_METHODS = {
    "cuda": ".to(lazytpu.device())",
    "experimental_get_compiler_ir": "python -m lazytpu run --dump DIR, or lazytpu.hlo_text",
}


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
    """The findings for a script, in the order of its lines.

    Raises:
        OSError: it cannot be read.
        SyntaxError: it is not Python.
    """
    return check_source(script.read_text(), str(script))


def check_source(source: str, file: str = "<script>") -> list[Finding]:
    """The findings for the text of a script."""
    tree = ast.parse(source, file)
    found = [finding for name, line in ScriptNames(tree, _star).uses() for finding in _judged(name, line)]
    found += [
        Finding(node.lineno, f".{node.func.attr}()", LACKS, f"use instead: {_METHODS[node.func.attr]}")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS
    ]
    return sorted(set(found))


def _star(module: str) -> list[str]:
    """What ``from module import *`` brings in, with what the stand-in lacks of it."""
    prefix = f"{module}."
    lacks = [name.removeprefix(prefix) for name in lacking.INSTEAD if name.startswith(prefix) or "." not in name]
    if module.partition(".")[0] not in PACKAGES or _spec_of(f"lazytpu.compat.{module}") is None:
        return lacks
    loaded = importlib.import_module(f"lazytpu.compat.{module}")
    return [*getattr(loaded, "__all__", [n for n in vars(loaded) if not n.startswith("_")]), *lacks]


def _judged(name: str, line: int) -> Iterator[Finding]:
    """The finding for one name, if it is of another system."""
    package = name.partition(".")[0]
    if package in PACKAGES:
        yield Finding(line, name, *verdict_of(name))
    elif name.startswith(("torch.tpu.", "torch.mlu.")):
        attribute = name.split(".")[2]
        if not hasattr(torch_module, attribute):
            yield Finding(line, name, LACKS, f"see the reference of torch.{name.split('.')[1]}")
        else:
            yield Finding(line, name, WORKS)
    elif package in ("tensorflow", "keras"):
        yield Finding(line, name, LACKS, f"use instead: {tensorflow_names.instead_of(name)}")
    for prefix, advice in _FOREIGN.items():
        if name == prefix or name.startswith(f"{prefix}."):
            yield Finding(line, name, LACKS, advice)


def verdict_of(name: str) -> tuple[str, str]:
    """What becomes of a name of one of the packages: the verdict and the advice."""
    module, attributes = f"lazytpu.compat.{name}", list[str]()
    while _spec_of(module) is None:
        module, _, attribute = module.rpartition(".")
        attributes.insert(0, attribute)
    at = importlib.import_module(module)
    for attribute in attributes[:1]:  # what it holds in turn is the object's own affair
        try:
            getattr(at, attribute)
        except ImportError as error:
            return LACKS, str(error).partition("; ")[2]
        except AttributeError:
            known = lacking.INSTEAD.get(name)
            return LACKS, f"use instead: {known}" if known else ""
    if attributes:
        name = f"{module.removeprefix('lazytpu.compat.')}.{attributes[0]}"
    return (DIFFERS, DIFFERENT[name]) if name in DIFFERENT else (WORKS, "")


def _spec_of(module: str) -> object:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:  # a parent is no package
        return None


def names_of(package: str) -> Iterator[tuple[str, str, str, str]]:
    """(name, verdict, what it does, advice) for each public name of a stand-in and each that is known to be lacking.

    Args:
        package: one of those with a stand-in, or ``tensorflow``, of which all is lacking.
    """
    if package == "tensorflow":
        yield from ((name, LACKS, "", use) for name, use in tensorflow_names.INSTEAD.items())
        return
    root = importlib.import_module(f"lazytpu.compat.{package}")
    folder = Path(str(root.__file__)).parent
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        loaded = importlib.import_module(f"lazytpu.compat.{module}")
        for name, value in sorted(vars(loaded).items()):
            full = f"{module}.{name}"
            if name.startswith("_") or not _is_of(value, package, name):
                continue
            verdict, advice = verdict_of(full)
            yield full, verdict, (getattr(value, "__doc__", None) or "").strip().partition("\n")[0], advice
    yield from ((name, LACKS, "", use) for name, use in lacking.INSTEAD.items() if name.startswith(f"{package}."))


def _is_of(value: object, package: str, name: str) -> bool:
    """Whether a module's name is part of its interface, not something it imported to work with."""
    if isinstance(value, type(ast)) or value is torch:
        return False
    where = getattr(value, "__module__", None)
    ours = where is not None and where.startswith(f"lazytpu.compat.{package}")
    return ours and callable(value) or name.startswith("REDUCE_") or name == "aot_backend"
