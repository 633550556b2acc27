"""Say what to use for a name of another package that is missing here; ``names.toml`` has the names."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib import resources
from typing import NoReturn

_TABLES: dict[str, dict[str, str]] = tomllib.loads(
    (resources.files(__package__) / "names.toml").read_text(encoding="utf-8")
)
DIFFERENT = _TABLES.pop("different")
"""Full name to what is not as in the original."""

ANYWHERE = _TABLES.pop("anywhere")
"""Names of functions that are missing, in whatever module, to what to use."""

MISSING = {f"{package}.{name}": use for package, table in _TABLES.items() for name, use in table.items()}
"""Full name to what to use; a name stands for all names below it."""


def advice_for(name: str) -> str:
    """Return what to use for a missing name, found by its longest known beginning; empty where nothing is known."""
    parts = name.split(".")
    found = (MISSING.get(".".join(parts[:n])) for n in range(len(parts), 0, -1))
    use = next(filter(None, found), "") or ANYWHERE.get(parts[-1], "")
    return use if not use or use.startswith("not needed: ") else f"use instead: {use}"


def message(name: str) -> str:
    """Return the error text for a missing module or name."""
    package = name.partition(".")[0]
    return f"lazytpu's shim for {package} has no {name}; {advice_for(name) or f'see the migration guide of {package}'}"


def missing_from(module: str) -> Callable[[str], NoReturn]:
    """Return a module's ``__getattr__``: a missing name with a counterpart raises an ImportError that says which."""
    shown = module.removeprefix("lazytpu.compat.")

    def __getattr__(name: str) -> NoReturn:
        full = f"{shown}.{name}"
        if full in MISSING or name in ANYWHERE:
            raise ImportError(message(full), name=name)
        raise AttributeError(message(full))

    return __getattr__
