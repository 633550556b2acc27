"""Numbers that Python computes from the settings of optimizers: traced in recorded calls, computed again for replays.

In a recorded call the floats in ``param_groups`` are of a class that notes what is computed from them and what they are
compared with.  A number that the recorded step got as an input is then known by the expressions that had its value: in
two calls with different settings only the right ones have it in both.  A replay after a scheduler computes the numbers
from the expressions, without the function's Python.  Whatever is in doubt is recorded again: a setting that was never
seen to change, expressions that no longer agree, a comparison that would end otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from struct import pack
from typing import NamedTuple, SupportsIndex, TypeAlias

import torch


class Setting(NamedTuple):
    """A float in the groups of the optimizers: which optimizer and group, its name, and its position in a tuple."""

    optimizer: int
    group: int
    name: str
    position: int = -1


class Constant(NamedTuple):
    """A number in an expression that is no setting; ``text`` tells zeros of unlike sign apart."""

    text: str
    value: float


class Computed(NamedTuple):
    """What an operator gives for one or two expressions."""

    operator: str
    operands: tuple[Expression, ...]


Expression: TypeAlias = Setting | Constant | Computed
_UNARY: dict[str, Callable[..., float]] = {"__neg__": operator.neg, "__pos__": operator.pos, "__abs__": operator.abs}
_BINARY: dict[str, Callable[..., float]] = {
    "__add__": operator.add,
    "__sub__": operator.sub,
    "__mul__": operator.mul,
    "__truediv__": operator.truediv,
    "__pow__": operator.pow,
}
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
# What else may decide something: a setting of which it is asked is not followed.
_ESCAPES: tuple[str, ...] = (
    "__int__",
    "__trunc__",
    "__round__",
    "__floor__",
    "__ceil__",
    "__str__",
    "__format__",
    "__repr__",
)
_ESCAPES += ("__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__divmod__", "__rdivmod__", "is_integer", "hex")


@dataclass(slots=True)
class Log:
    """What a recorded call did with the settings.

    Attributes:
        settings: their values.
        values: expressions and their values.
        conditions: comparisons, and truth by itself, and how they ended.
        escaped: settings that were asked for something which is not noted.
    """

    settings: dict[Setting, float] = field(default_factory=dict)
    values: dict[Expression, float] = field(default_factory=dict)
    conditions: dict[Computed, bool] = field(default_factory=dict)
    escaped: set[Setting] = field(default_factory=set)

    def by_value(self) -> dict[bytes, set[Expression]]:
        """Return the expressions by the bits of their values."""
        found: dict[bytes, set[Expression]] = {}
        for expression, value in self.values.items():
            found.setdefault(pack("d", value), set()).add(expression)
        return found


class Traced(float):
    """A setting, or what was computed from some, that notes what is done with it."""

    __slots__ = ("expression", "log")
    expression: Expression
    log: Log

    def __hash__(self) -> int:
        self.log.escaped |= {*settings_in(self.expression)}
        return float.__hash__(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Make copies plain floats."""
        return float, (float.__pos__(self),)


def _traced(log: Log, expression: Expression, value: float) -> Traced:
    log.values[expression] = value
    made = Traced(value)
    made.log, made.expression = log, expression
    return made


def _expression_of(x: float) -> Expression:
    return x.expression if isinstance(x, Traced) else Constant(repr(x), x)


def _computing(name: str, shown: str, *, swapped: bool = False) -> Callable[..., object]:
    plain = getattr(float, name)

    def call(self: Traced, *others: float) -> object:
        result = plain(self, *others)
        if type(result) is not float:  # not implemented, or a complex number
            return result
        operands = (self.expression, *map(_expression_of, others))
        return _traced(self.log, Computed(shown, operands[::-1] if swapped else operands), result)

    return call


def _deciding(name: str) -> Callable[..., object]:
    plain = getattr(float, name)

    def call(self: Traced, *others: float) -> object:
        result = plain(self, *others)
        if type(result) is bool:
            self.log.conditions[Computed(name, (self.expression, *map(_expression_of, others)))] = result
        return result

    return call


def _escaping(name: str) -> Callable[..., object]:
    plain = getattr(float, name)

    def call(self: Traced, *others: object) -> object:
        self.log.escaped |= {*settings_in(self.expression)}
        return plain(self, *others)

    return call


for _name in _UNARY:
    setattr(Traced, _name, _computing(_name, _name))
for _name in _BINARY:
    setattr(Traced, _name, _computing(_name, _name))
    _reflected = f"__r{_name[2:]}"
    setattr(Traced, _reflected, _computing(_reflected, _name, swapped=True))
for _name in (*_COMPARISONS, "__bool__"):
    setattr(Traced, _name, _deciding(_name))
for _name in _ESCAPES:
    setattr(Traced, _name, _escaping(_name))


def settings_in(expression: Expression) -> Iterator[Setting]:
    """Yield the settings in an expression."""
    if isinstance(expression, Setting):
        yield expression
    elif isinstance(expression, Computed):
        for each in expression.operands:
            yield from settings_in(each)


def settings_of(optimizers: Sequence[torch.optim.Optimizer]) -> dict[Setting, float]:
    """Return the floats in the groups of optimizers."""
    found: dict[Setting, float] = {}
    for o, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if type(value) is float:
                    found[Setting(o, g, name)] = value
                elif type(value) is tuple:
                    found |= {Setting(o, g, name, i): x for i, x in enumerate(value) if type(x) is float}
    return found


@contextmanager
def tracing(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Log]:
    """Trace what is computed from the settings of optimizers inside."""
    log = Log(settings_of(optimizers))
    replaced: list[tuple[dict[str, object], str, object, object]] = []
    for o, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for name, value in list(group.items()):
                made: object = value
                if type(value) is float:
                    made = _traced(log, Setting(o, g, name), value)
                elif type(value) is tuple:
                    made = tuple(
                        [
                            _traced(log, Setting(o, g, name, i), x) if type(x) is float else x
                            for i, x in enumerate(value)
                        ]
                    )
                if made is not value:
                    group[name] = made
                    replaced.append((group, name, value, made))
    try:
        yield log
    finally:
        for group, name, value, made in replaced:
            now = group.get(name)
            if now is made:
                group[name] = value
            elif isinstance(now, Traced):  # computed from it by a scheduler inside
                group[name] = float.__pos__(now)
            elif type(now) is tuple:
                group[name] = tuple([float.__pos__(x) if isinstance(x, Traced) else x for x in now])


@dataclass(slots=True)
class Followed:
    """How the floats of a recorded step follow from the settings, as far as its calls have shown.

    Attributes:
        expressions: for each float those that had its value in every call; ``constant`` has its value where it was
            the same in every call.
        conditions: comparisons that have to end as they did.
        seen: settings that have changed between calls.
    """

    expressions: list[set[Expression]]
    constant: list[float | None]
    conditions: dict[Computed, bool]
    seen: frozenset[Setting]

    def unexplained(self) -> list[int]:
        """Return the positions of floats that change and follow from nothing that is known."""
        pairs = zip(self.expressions, self.constant, strict=True)
        return [i for i, (found, constant) in enumerate(pairs) if constant is None and not found]

    def floats(self, settings: dict[Setting, float]) -> list[float] | None:
        """Return the floats for other settings; None where that is in doubt."""
        known: dict[Expression, float] = {}
        try:
            for condition, ended in self.conditions.items():
                values = [_value(x, settings, known) for x in condition.operands]
                if getattr(float, condition.operator)(*map(float, values)) is not ended:
                    return None
            found = []
            for expressions, constant in zip(self.expressions, self.constant, strict=True):
                values = [_value(x, settings, known) for x in expressions]
                values += [] if constant is None else [constant]
                if len({pack("d", x) for x in values}) != 1:
                    return None
                found.append(values[0])
        except (ArithmeticError, KeyError, TypeError):
            return None
        return found


def _value(expression: Expression, settings: dict[Setting, float], known: dict[Expression, float]) -> float:
    if isinstance(expression, Setting):
        return settings[expression]
    if isinstance(expression, Constant):
        return expression.value
    value = known.get(expression)
    if value is None:
        operands = [_value(x, settings, known) for x in expression.operands]
        function = (_UNARY if len(operands) == 1 else _BINARY)[expression.operator]
        value = known[expression] = function(*operands)
    return value


def first_followed(log: Log, floats: Sequence[float]) -> Followed:
    """Return what one call shows."""
    found = log.by_value()
    return Followed([found.get(pack("d", x), set()) for x in floats], [*floats], dict(log.conditions), frozenset())


def followed(before: Followed, old: Log, new: Log, floats: Sequence[float]) -> Followed:
    """Return what is known after one more call, whose floats are ``floats``."""
    found = new.by_value()
    expressions = [x & found.get(pack("d", y), set()) for x, y in zip(before.expressions, floats, strict=True)]
    constant = [
        x if x is not None and pack("d", x) == pack("d", y) else None
        for x, y in zip(before.constant, floats, strict=True)
    ]
    changed = {s for s, x in new.settings.items() if old.settings.get(s) != x} - old.escaped - new.escaped
    return Followed(expressions, constant, new.conditions, before.seen | changed)
