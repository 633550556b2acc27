"""Settings: one object, every field also an environment variable ``LAZYTPU_<NAME>``."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any

from lazytpu.observers import notify


def _setting(default: Any, doc: str, choices: tuple[Any, ...] = (), several: bool = False) -> Any:
    """Return a field; with ``several``, its value is any of the choices, with commas between them."""
    return field(default=default, metadata={"doc": doc, "choices": choices, "several": several})


@dataclass(slots=True)
class Config:
    """All settings.  Assign to a field to change it; a value of the wrong type raises.

    The environment is read once, at import.
    """

    device_name: str = _setting("tpu", "what torch calls the device; only read at import")
    fallback: str = _setting(
        "cpu", "what an op without a lowering does: run on the CPU with a warning, or raise", ("cpu", "error")
    )
    matmul_precision: str = _setting("highest", "precision of matrix products of f32", ("highest", "high", "default"))
    lowerings: str = _setting(
        "auto",
        "which of several lowerings to use; auto chooses by platform and shape",
        ("auto", "own_convolution", "xla_convolution", "blocked_attention", "whole_attention", "unrolled"),
        several=True,
    )
    compile_after: int = _setting(
        2, "on CPUs, the time a graph comes when it is compiled; before that it is interpreted; 1 compiles always"
    )
    compile_in_background: bool = _setting(
        False, "interpret until a thread has compiled the graph; the last digits depend on when that is"
    )
    max_graph_ops: int = _setting(50_000, "ops of a graph; past them it is cut without a mark_step")
    cut_loops: bool = _setting(
        True, "end a step where an optimizer steps for the second time without a mark_step, and at its later steps"
    )
    max_tree_nodes: int = _setting(500_000, "nodes of the trace tree; past them it is forgotten")
    max_executables: int = _setting(1_000, "compiled graphs kept in memory; the least recently used go first")
    max_compiles: int = _setting(0, "limit of compiled graphs; exceeding it raises with the cause; 0 means unlimited")
    max_compiles_action: str = _setting("error", "what exceeding max_compiles does", ("error", "warn"))
    donate: bool = _setting(True, "let the outputs of a step reuse the memory of the inputs that it overwrites")
    check_bounds: bool = _setting(
        False, "raise at the next read when an index was out of range or a value refused; off, reads are clamped"
    )
    eager: bool = _setting(False, "for debugging: run each op at once, so that errors are raised at their line; slow")
    verify: str = _setting(
        "", "first: run each program once beside torch's CPU kernels, raise where they differ; slow", ("", "first")
    )
    dump: str = _setting("", "folder for the IR, StableHLO and HLO of every compiled graph")
    log: str = _setting(
        "warning",
        "level of the log, and topics that are logged whatever the level",
        (
            "debug",
            "info",
            "warning",
            "error",
            "compile",
            "made_dynamic",
            "fallback",
            "cut",
            "step",
            "placement",
            "world",
        ),
        several=True,
    )
    disk_cache: bool = _setting(True, "keep compiled graphs on disk, for the next process")
    disk_cache_dir: str = _setting("", "folder of the disk cache; by default lazytpu in the user's cache folder")
    disk_cache_bytes: int = _setting(2 << 30, "size of the disk cache; the least recently used programs go first")
    reuse_pages: bool = _setting(
        True, "on CPUs, keep memory of temporaries for the next step (glibc's malloc); only read before the first step"
    )
    world: bool = _setting(
        True, "connect the processes that a launcher started together; off, each of them is alone; only read at import"
    )
    collective_timeout: int = _setting(300, "seconds that a process waits for the others of its world; then it raises")
    metrics: bool = _setting(False, "also measure how long recording takes and the device works in each step")
    metrics_file: str = _setting("", "file to which each step adds a line of JSON; turns metrics on")

    def __setattr__(self, name: str, value: Any) -> None:
        spec = _FIELDS.get(name)
        if spec is None:
            raise AttributeError(f"lazytpu.config has no field {name!r}; its fields are {', '.join(_FIELDS)}")
        if type(value) is not type(spec.default):
            raise TypeError(f"lazytpu.config.{name} must be of type {type(spec.default).__name__}, not {value!r}")
        choices = spec.metadata["choices"]
        given = [part.strip() for part in str(value).split(",")] if spec.metadata["several"] else [value]
        if choices and not set(given) <= set(choices):
            raise ValueError(f"lazytpu.config.{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
        if self is globals().get("config") and value != getattr(self, name):
            notify("setting_changing", name, value)
        object.__setattr__(self, name, value)


_FIELDS = {f.name: f for f in fields(Config)}


def _from_environment() -> Config:
    made = Config()
    for name, spec in _FIELDS.items():
        text = os.environ.get(f"LAZYTPU_{name.upper()}")
        if text is not None:
            setattr(made, name, _parse(text, type(spec.default), f"LAZYTPU_{name.upper()}"))
    return made


def _parse(text: str, kind: type, variable: str) -> Any:
    if kind is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("", "0", "false", "no", "off"):
            return False
        raise ValueError(f"{variable} must be 0 or 1, not {text!r}")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{variable} must be of type {kind.__name__}, not {text!r}") from None


config = _from_environment()
