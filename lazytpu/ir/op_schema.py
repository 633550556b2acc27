"""What the aten schemas say about each op, worked out once at import.

An `Op` is what a node of the IR refers to.  Its identity is its hash, so keys of the trace tree that
contain it are looked up without running Python code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

OpOverload = torch._ops.OpOverload
aten = torch.ops.aten
Arg: TypeAlias = Any
"""What an op is given for an argument of its schema: a tensor or what stands for one, a number, a dtype, a list.

The schema says which, at run time only; so who reads one knows its op, and nothing checks it here.
"""

NO_COMPUTATION = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.default,
    aten._assert_async.msg,
    aten._linalg_check_errors.default,
    aten._functional_assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
"""Checks in a traced graph: those of torch's tracers hold once it is traced, and those of values are left out."""


class _Absent:
    """Marks an argument that was not given, that is, has its schema's default."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()

# Scalars that decide shapes or which formula is used, or that torch checks, so they are attributes and not inputs.
_ATTRIBUTE_SCALARS = {
    "aten::pow.Tensor_Scalar": {"exponent"},
    "aten::_foreach_pow.Scalar": {"exponent"},
    "aten::_foreach_pow.ScalarList": {"exponent"},
    "aten::linalg_vector_norm": {"ord"},
    "aten::_foreach_norm.Scalar": {"ord"},
    "aten::norm": {"p"},
    "aten::renorm": {"p", "maxnorm"},
    "aten::dist": {"p"},
    "aten::arange": {"start", "end", "step"},
    "aten::range": {"start", "end", "step"},
    "aten::multi_margin_loss": {"p"},
    "aten::multi_margin_loss_backward": {"p"},
    "aten::histc": {"min", "max"},
    "aten::softshrink": {"lambd"},
    "aten::threshold_backward": {"threshold"},  # 0 in every relu: as a constant it leaves equal layers equal
    "aten::celu": {"alpha"},
}

# Layout of arguments that say nothing about the computation on this one device.
_IGNORED = {"Device", "Layout", "Stream"}


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a schema.

    ``kind`` is one of ``tensor``, ``tensors``, ``number``, ``numbers`` (inputs of the graph),
    ``attr``, ``list``, ``float``, ``floats``, ``scalar`` (values in the key), ``generator`` or ``ignored``.
    """

    name: str
    kind: str
    kwarg_only: bool
    default: Arg
    written: bool


@dataclass(eq=False, slots=True)
class Op:
    """One aten overload.

    Attributes:
        overload: what torch calls it; ``recorded`` is the functional overload that the IR shows.
        name: ``aten.add.Tensor`` of the recorded overload.
        returns: number of results, or None for a list whose length the call decides.
        random: draws random numbers.
        order: for each argument of ``recorded`` its position in ``overload``'s schema, None where the two
            schemas list the same; ``defaults`` are values of ``overload``'s that ``recorded`` does not have.
    """

    overload: OpOverload
    recorded: OpOverload
    name: str
    arguments: tuple[Argument, ...]
    returns: int | None
    random: bool
    positions: dict[str, int] = field(default_factory=dict)
    order: tuple[int, ...] | None = None
    defaults: dict[int, Arg] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.name

    @property
    def is_view(self) -> bool:
        """Whether the result shares the memory of an operand."""
        return bool(getattr(self.recorded, "is_view", False))  # loops and conditions have no such attribute

    def bind(self, args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> list[Arg]:
        """Return the arguments in the order of the schema, `ABSENT` where not given."""
        if self.order is None:
            bound = [*args, *[ABSENT] * (len(self.arguments) - len(args))]
        else:
            bound = [args[i] if i < len(args) else ABSENT for i in self.order]
        for name, value in kwargs.items():
            if name in self.positions:
                bound[self.positions[name]] = value
        for position, value in self.defaults.items():
            if bound[position] is ABSENT:
                bound[position] = value
        return bound

    def call_form(self, bound: Iterable[Arg]) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
        """Return the positional and keyword arguments that call ``recorded``, those that are `ABSENT` left out."""
        positional: list[Arg] = []
        keywords: dict[str, Arg] = {}
        gap = False
        for argument, x in zip(self.arguments, bound, strict=False):
            if x is ABSENT:
                gap = gap or not argument.kwarg_only
            elif argument.kwarg_only or gap:
                keywords[argument.name] = x
            else:
                positional.append(x)
        return tuple(positional), keywords


def display_name(overload: OpOverload) -> str:
    """``aten.relu`` for ``aten.relu.default``, ``aten.add.Tensor`` for the rest."""
    return str(overload).removesuffix(".default")


_ops: dict[tuple[OpOverload, OpOverload], Op] = {}


def op_of(overload: OpOverload, recorded: OpOverload | None = None) -> Op:
    """Return the `Op` of an overload; ``recorded`` is its functional variant where it writes to an argument."""
    recorded = recorded or overload
    op = _ops.get((overload, recorded))
    if op is None:
        schema = recorded._schema
        scalars = _ATTRIBUTE_SCALARS.get(recorded.name(), _ATTRIBUTE_SCALARS.get(schema.name, set()))
        arguments = tuple(_argument(a, scalars) for a in schema.arguments)
        lists = any(str(r.type).startswith("List") for r in schema.returns)
        op = _ops[overload, recorded] = Op(
            overload,
            recorded,
            display_name(recorded),
            arguments,
            None if lists else len(schema.returns),
            torch.Tag.nondeterministic_seeded in recorded.tags,
            {a.name: i for i, a in enumerate(arguments)},
        )
        if recorded is not overload:
            _match_schemas(op)
    return op


def _match_schemas(op: Op) -> None:
    """Note where the schema of an in-place op differs from that of its functional variant."""
    theirs = {a.name: (i, a) for i, a in enumerate(op.overload._schema.arguments)}
    ours = op.recorded._schema.arguments
    if any(a.name not in theirs or theirs[a.name][0] != i for i, a in enumerate(ours)):
        op.order = tuple(theirs[a.name][0] if a.name in theirs else len(theirs) for a in ours)
    for i, argument in enumerate(ours):
        source = theirs.get(argument.name)
        if source is not None and source[1].has_default_value() and not argument.has_default_value():
            op.defaults[i] = source[1].default_value


def _argument(a: Any, attribute_scalars: set[str]) -> Argument:
    written = a.alias_info is not None and a.alias_info.is_write
    kind = _kind(str(a.real_type), a.name, attribute_scalars)
    return Argument(a.name, kind, a.kwarg_only, a.default_value, written)


def _kind(type_text: str, name: str, attribute_scalars: set[str]) -> str:
    inner = type_text.replace("Optional[", "").replace("]", "")
    if inner in _IGNORED or name in ("pin_memory", "non_blocking"):
        return "ignored"
    if inner == "Generator":
        return "generator"
    if inner == "Tensor":
        return "tensor"
    if inner == "List[Tensor":
        return "tensors"
    if inner == "number":
        return "scalar" if name in attribute_scalars else "number"
    if inner == "List[number":
        return "numbers"
    if inner == "float":
        return "float"
    if inner == "List[float":
        return "floats"
    return "list" if inner.startswith("List[") else "attr"


def functional_variant(overload: OpOverload) -> OpOverload | None:
    """Return the functional overload that computes what an in-place or ``out=`` overload writes."""
    explicit = _VARIANTS.get(str(overload).removeprefix("aten."))
    if explicit is not None:
        return overload_named(explicit)
    packet = overload._schema.name.removeprefix("aten::")
    if packet.startswith("__i") and packet.endswith("__"):  # __iand__
        packet = f"__{packet[3:]}"
    elif packet.endswith("_") and not any(a.is_out for a in overload._schema.arguments):
        packet = packet[:-1]
    same_packet = getattr(aten, packet, None)
    names = [] if same_packet is None else same_packet.overloads()
    found_there = [overload_named(f"{packet}.{name}") for name in names]
    variants = [found for found in found_there if found is not None and _is_variant(overload, found)]
    return min(variants, key=lambda found: len(found._schema.arguments), default=None)


def _is_variant(overload: OpOverload, found: OpOverload) -> bool:
    """Return whether ``found`` is functional and takes the arguments of ``overload``; others have defaults."""
    wanted = {a.name: str(a.real_type) for a in overload._schema.arguments if not a.is_out}
    shared = [a.name for a in found._schema.arguments if wanted.get(a.name) == str(a.real_type)]
    extra = [a for a in found._schema.arguments if a.name not in wanted]
    return set(shared) == set(wanted) and not found._schema.is_mutable and all(a.has_default_value() for a in extra)


def overload_named(name: str, namespace: str = "aten") -> OpOverload | None:
    """Return the overload of a name such as ``add.Tensor``, or ``neg`` for the default one; None if there is none."""
    packet, _, overload = name.partition(".")
    try:
        found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except (AttributeError, RuntimeError):
        return None
    return found


# In-place and out= overloads whose functional variant has another name.
_VARIANTS = {
    "bernoulli_.float": "bernoulli.p",
    "bernoulli_.Tensor": "bernoulli.Tensor",
    "normal_.default": "normal_functional",
    "rrelu_with_noise_.default": "rrelu_with_noise_functional",
    "uniform_.default": "uniform",
    "random_.default": "random",
    "random_.from": "random.from",
    "random_.to": "random.to",
    "exponential_.default": "exponential",
    "geometric_.default": "geometric",
    "cauchy_.default": "cauchy",
    "log_normal_.default": "log_normal",
    "fill_.Scalar": "fill.Scalar",
    "fill_.Tensor": "fill.Tensor",
    "zero_.default": "zero",
    "arange.start_out": "arange.start_step",
    "arange.out": "arange",
    "range.out": "range.step",
    "range.out_": "range",
    "normal.out": "normal_functional",
    "_native_batch_norm_legit.out": "_native_batch_norm_legit",
    "eye.out": "eye",
    "eye.m_out": "eye.m",
}
