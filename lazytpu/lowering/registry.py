"""The one table of lowering rules.

A rule turns one aten overload into jax operations::

    @lowers(aten.cumsum.default)
    def cumsum(out, x, dim, *, dtype=None):
        return jnp.cumsum(x, axis=dim, dtype=out.dtype)

``out`` is the type torch predicted for the result: a ``jax.ShapeDtypeStruct``, or a tuple of them for
several results (a list for ``Tensor[]``, ``None`` for a result torch leaves undefined).  The other
arguments are those of the aten schema: tensors are jax arrays (logical shape; strides do not exist
here), ``Scalar`` arguments are Python numbers or 0-d arrays of f64, i64, bool or c128 whose values are
not known while lowering, everything else is the Python value of the attribute.  Arguments that equal
the schema's default are not passed.  A rule of a random op is also given ``rng``, the 0-d
``uint64`` pair ``(seed, counter)`` as an array of shape [2].

Every result is checked against ``out`` (shape and dtype), so a rule cannot get a type wrong unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

import jax
import torch

from lazytpu.config import config
from lazytpu.ir.op_schema import Arg
from lazytpu.lowering.target import described
from lazytpu.observers import notify

Args: TypeAlias = tuple[Arg, ...]
Kwargs: TypeAlias = dict[str, Arg]
Results: TypeAlias = Arg
"""What a rule returns: an array, or a tuple or list of them as ``out`` has types."""
Rule: TypeAlias = Callable[..., Results]
_R = TypeVar("_R", bound=Rule)

Target = torch._ops.OpOverload | torch._ops.HigherOrderOperator | str

_RULES: dict[Target, Rule] = {}
_DYNAMIC: dict[Target, frozenset[str]] = {}
_STRIDED: set[Target] = set()
_platform: list[tuple[str, bool]] = []


def lowers(*ops: Target, dynamic: str = "", strided: bool = False) -> Callable[[_R], _R]:
    """Register a rule for ``ops``.

    Args:
        ops: the overloads that the rule lowers; by name (``"torchvision.roi_align.default"``) where they belong to a
            library that need not be there.
        dynamic: names, separated by spaces, of ``float`` and ``int`` arguments that the rule also
            accepts as 0-d arrays (f64, i64).  A number seen to change at such an argument becomes an
            input of the graph instead of a reason to compile again.
        strided: the rule is also given ``contiguous``, whether its first argument is row-major; for the few
            ops whose results torch reads differently then.

    Raises:
        ValueError: an overload has a rule already.
    """

    def register(rule: _R) -> _R:
        for op in ops:
            if op in _RULES:
                raise ValueError(f"{op} has two lowering rules: {_RULES[op].__qualname__} and {rule.__qualname__}")
            _RULES[op] = rule
            if dynamic:
                _DYNAMIC[op] = frozenset(dynamic.split())
            if strided:
                _STRIDED.add(op)
            notify("rule_registered", op)
        return rule

    return register


def lowers_each(table: dict[torch._ops.OpOverload, Rule]) -> None:
    """Register a table ``overload -> rule``, for families whose rules are one expression each."""
    for op, rule in table.items():
        lowers(op)(rule)


def rule_of(op: Target) -> Rule | None:
    """Return the rule of an overload, or None."""
    return _RULES.get(op) or _RULES.get(str(op))


def dynamic_arguments(op: torch._ops.OpOverload) -> Iterable[str]:
    """Return the names of the numbers of ``op`` that its rule accepts as arrays."""
    return _DYNAMIC.get(op) or _DYNAMIC.get(str(op)) or ()


def is_strided(op: torch._ops.OpOverload) -> bool:
    """Return whether the rule of ``op`` is given ``contiguous``."""
    return op in _STRIDED or str(op) in _STRIDED


def lowered_ops() -> Iterator[torch._ops.OpOverload]:
    """Iterate over every overload that has a rule, but for those known by name only."""
    return (op for op in _RULES if isinstance(op, torch._ops.OpOverload))


@contextmanager
def lowering_for(platform: str, on_mesh: bool = False) -> Iterator[None]:
    """Let rules called inside choose their form.

    Args:
        platform: ``cpu``, ``gpu`` or ``tpu``.
        on_mesh: the graph lies on several devices, between which XLA will partition it.
    """
    _platform.append((platform, on_mesh))
    try:
        yield
    finally:
        _platform.pop()


def forced(*lowerings: str) -> str:
    """Return the one of several lowerings that ``config.lowerings`` asks for; empty where the rule is to choose."""
    asked = config.lowerings
    return next((name for name in lowerings if name in asked), "") if asked != "auto" else ""


def target_platform() -> str:
    """Return the platform that the calling rule is being lowered for."""
    if _platform:
        return _platform[-1][0]
    topology = described()
    if topology is not None:
        return topology.platform
    name = jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


def on_one_cpu() -> bool:
    """Return whether the calling rule is being lowered for a CPU alone, and not for several that share the work.

    What our lowerings for CPUs gain by taking the elements of a batch in turn, a partitioned batch would lose twice.
    """
    return target_platform() == "cpu" and not on_mesh()


def on_mesh() -> bool:
    """Return whether the calling rule is being lowered for several devices that share the work."""
    return bool(_platform) and _platform[-1][1]
