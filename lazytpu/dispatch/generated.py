"""Generate the hot path: kernels written out for their schema.

A general kernel walks over the arguments of its schema; one of these has the walk unrolled.  The source generated for
``add.Tensor``, with a comment a line, is the file ``generated_add_tensor.txt`` beside this one; a test keeps the two
equal.

Whatever is not on the beaten path (numbers of odd types, plain tensors, a miss, a cut in the middle of it) goes to the
general kernel, which does the same from the start.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch

from lazytpu import random
from lazytpu.ir.op_schema import ABSENT, Argument, Op
from lazytpu.ir.tree import trace
from lazytpu.tensors.storage import Alias, Storage
from lazytpu.tensors.tensor import LazyTensor, adopt, make, reinterpret, strided
from lazytpu.tracing.record import INT64_MAX, float_key, load
from lazytpu.tracing.scalar_checks import is_factor

Kernel = Callable[..., Any]
FILE = "<lazytpu kernel>"  # in tracebacks
_KINDS = {"tensor", "number", "attr", "list", "float", "scalar", "generator", "ignored"}


def can_generate(op: Op, *, new: bool = False) -> bool:
    """Return whether the op's schema is one that has a fast form.

    Args:
        new: all results are new tensors: there may be lists of tensors among the arguments, or no tensor at all.
    """
    kinds = {a.kind for a in op.arguments}
    if op.order is not None or op.defaults or not op.arguments:
        return False
    return kinds <= _KINDS | {"tensors"} if new else kinds <= _KINDS and op.arguments[0].kind == "tensor"


def functional(op: Op, general: Kernel, made: Sequence[int] = ()) -> Kernel:
    """Return the fast form of `general.functional` for an op that returns one tensor, or several.

    Args:
        made: the results that are tensors, where others of several never are.
    """
    if op.returns != 1:
        return _several(op, general, made)
    return _compile(op, functional_lines(op), general)


def functional_lines(op: Op) -> list[str]:
    """Return the body of the kernel of an op that returns one new tensor."""
    lines = [*_operands(op), "s = Storage()", "s.dirty = step", "pending_append(s)", f"key = ({_key(op)})"]
    lines += _commit(op, ["s.value = node.value", "s.step = step"])
    lines += [
        "lay = s.layout = node.layout",
        "if not lay.as_created: return make(s)",
        "t = create(lay.size, lay.dtype)",
        "t.untyped_storage()._s = s",
        "t.__class__ = LazyTensor",
        "t._s = s",
        "return t",
    ]
    return lines


def _several(op: Op, general: Kernel, made: Sequence[int]) -> Kernel:
    """Return `functional` for an op that returns a tuple, in which a result that was not asked for is None."""
    assert op.returns is not None
    at = made or range(op.returns)
    names = [f"v{i}" if i in at else "_" for i in range(op.returns)]
    lines = _operands(op)
    for i in at:
        lines += [f"s{i} = Storage()", f"s{i}.dirty = step", f"pending_append(s{i})"]
    stores = [f"{', '.join(names)} = node.values"]
    for i in at:
        stores += [f"if v{i} is not None:", f"    s{i}.value = v{i}", f"    s{i}.step = step"]
    lines += [f"key = ({_key(op)})", *_commit(op, stores)]
    for i in at:
        lines += [f"if v{i} is not None: s{i}.layout = v{i}.layout"]
    results = [f"None if {v} is None else make(s{v[1:]})" if v != "_" else "None" for v in names]
    lines += [f"return {', '.join(results)}"]
    return _compile(op, lines, general)


def in_place(op: Op, general: Kernel) -> Kernel:
    """Return the fast form of `kernels.in_place` for an op that writes its first argument and returns it.

    Only for whole storages, and operands that may overlap with the target in another way than being it are left
    to the general kernel.
    """
    lines = [*_operands(op, writes=True), "c = a0._s", f"if type(c) is not Storage or c.step != step: {_general(op)}"]
    lines += ["if c.dirty != step:", "    c.dirty = step", "    pending_append(c)", f"key = ({_key(op)})"]
    lines += [f"if c.value is not k0: {_general(op)}"]  # another thread wrote it
    lines += _commit(op, ["c.value = node.value"])
    return _compile(op, [*lines, "return a0"], general)


def view(op: Op, general: Kernel) -> Kernel:
    """Return the fast form of `kernels.view` for an op that returns one tensor."""
    keys = [
        f"tuple(a{i}) if type(a{i}) is list else a{i}" if a.kind == "list" else f"a{i}"
        for i, a in enumerate(op.arguments)
    ]
    lines = [
        f"if type(a0) is not LazyTensor: {_general(op)}",
        "c = a0._s",
        "if type(c) is Alias: s = c.storage",
        "else: s = c",
        f"if s.moved is not None: {_general(op)}",
        f"try: lay = c.layout.children[(op, {', '.join(keys[1:])}{',' if len(keys) > 1 else ''})]",
        f"except KeyError: {_general(op)}",
        "if in_inference_mode(): t = strided(a0, lay.size, lay.stride, lay.offset - c.layout.offset)",
        "else: t = reinterpret(a0, lay.size, lay.stride, lay.offset - c.layout.offset)",
        "t.__class__ = LazyTensor",
        "t._s = s if lay is s.layout else Alias(s, lay)",
        "return t",
    ]
    return _compile(op, lines, general)


def _operands(op: Op, *, writes: bool = False) -> list[str]:
    """Return lines that leave the key of argument i in ``k<i>`` and the numbers in ``floats`` and ``ints``.

    Args:
        writes: the op writes its first argument.
    """
    lines = ["step = trace.step"]
    if _may_have_numbers(op):
        lines.append("floats = ints = ()")
    if op.random:
        lines += ["seed = numbers.seed", "if seed > INT64_MAX: seed -= 1 << 64"]
        lines += [f"if numbers.counter >= INT64_MAX: {_general(op)}"]
    for i, argument in enumerate(op.arguments):
        lines += _operand(op, i, argument, writes and i > 0)
    return lines


def _may_have_numbers(op: Op) -> bool:
    return any(a.kind == "number" or (a.kind == "tensor" and i) for i, a in enumerate(op.arguments))


def _operand(op: Op, i: int, argument: Argument, beside_target: bool) -> list[str]:
    a, k = f"a{i}", f"k{i}"
    number = [
        f"elif type({a}) is float:",
        f"    {k} = float",
        f"    floats += ({a},)",
        f"elif type({a}) is int and -INT64_MAX <= {a} <= INT64_MAX:",
        f"    {k} = int",
        f"    ints += ({a},)",
        f"elif {a} is None or {a} is ABSENT: {k} = {a}",
    ]
    if argument.kind == "tensor":
        tensor = [
            f"if type({a}) is LazyTensor:",
            f"    c = {a}._s",
            *([f"    if {_overlaps(op)}: {_general(op)}"] if beside_target else []),
            f"    {k} = c.value if c.step == step else load(c)",
        ]
        adopted = [
            f"elif type({a}) is Tensor and {a}.device.type == device_type:",
            f"    {k} = load(adopt({a}))",
        ]
        return [*tensor, *(number if i else []), *adopted, f"else: {_general(op)}"]
    if argument.kind == "number":
        if is_factor(op.overload, op.overload._schema.arguments[i]):  # one that a dtype may not hold is looked at
            number[0] = f"elif type({a}) is float and -65504.0 <= {a} <= 65504.0:"
            number[3] = f"elif type({a}) is int and -127 <= {a} <= 127:"
        return [
            f"if {a} is ABSENT: {k} = ABSENT",
            *number[:-1],
            f"elif {a} is None: {k} = None",
            f"else: {_general(op)}",
        ]
    if argument.kind == "tensors":
        return [
            f"{k} = []",
            f"for t in {a} if type({a}) is list or type({a}) is tuple else (ABSENT,):",
            "    if type(t) is LazyTensor:",
            "        c = t._s",
            f"        {k}.append(c.value if c.step == step else load(c))",
            f"    elif t is None: {k}.append(None)",
            f"    else: {_general(op)}",
            f"{k} = tuple({k})",
        ]
    if argument.kind == "list":
        return [f"{k} = tuple({a}) if type({a}) is list else {a}"]
    if argument.kind == "float":
        return [f"{k} = float_key({a}) if type({a}) is float else {a}"]
    if argument.kind == "scalar":
        return [f"{k} = (type({a}), float_key({a}) if type({a}) is float else {a}) if {a} is not ABSENT else {a}"]
    if argument.kind == "generator":
        return [f"if {a} is None or {a} is ABSENT: {k} = {a}", f"else: {_general(op)}"]
    if argument.kind == "ignored":
        return [f"{k} = ABSENT if {a} is ABSENT else None"]
    return [f"{k} = {a}"]


def _overlaps(op: Op) -> str:
    """Return whether the cell ``c`` may reach the memory of the target; pointwise ops may read the target itself."""
    view_of_target = "c.step != step and type(c) is Alias and c.storage is a0._s"
    return view_of_target if torch.Tag.pointwise in op.overload.tags else f"c is a0._s or {view_of_target}"


def _key(op: Op) -> str:
    return f"op, {', '.join(f'k{i}' for i in range(len(op.arguments)))},"


def _commit(op: Op, stores: list[str]) -> list[str]:
    """Look the key up and take effect.  No call may stand here: see the module's docstring."""
    numbers = ["if floats: trace.floats += floats", "if ints: trace.ints += ints"] if _may_have_numbers(op) else []
    drawn = ["numbers.counter = counter = numbers.counter + 1", "trace.ints += seed, counter"] if op.random else []
    return [
        f"if trace.step != step: {_general(op)}",
        "try:",
        "    node = trace.cursor.children[key]",
        *[f"    {line}" for line in ["trace.cursor = node", *stores, *numbers, *drawn]],
        f"except KeyError: {_general(op)}",
    ]


def _general(op: Op) -> str:
    """Start again in the general kernel."""
    given = [f"{a.name}=a{i}" if a.kwarg_only else f"a{i}" for i, a in enumerate(op.arguments)]
    return f"return general({', '.join(given)})"


def source_of(op: Op, lines: list[str]) -> str:
    """Return the source of the function ``kernel(a0, a1=ABSENT, …)``; keyword-only arguments keep their names."""
    parameters, renames, star = [], [], False
    for i, argument in enumerate(op.arguments):
        if argument.kwarg_only and not star:
            parameters.append("*")
            star = True
        name = argument.name if argument.kwarg_only else f"a{i}"
        parameters.append(name if i == 0 else f"{name}=ABSENT")
        if argument.kwarg_only:
            renames.append(f"a{i} = {name}")
    body = "\n".join(f"    {line}" for line in [*renames, *lines])
    return f"def kernel({', '.join(parameters)}):\n{body}\n"


def _compile(op: Op, lines: list[str], general: Kernel) -> Kernel:
    """Compile the kernel of an op."""
    scope: dict[str, Any] = {
        "ABSENT": ABSENT,
        "Alias": Alias,
        "INT64_MAX": INT64_MAX,
        "LazyTensor": LazyTensor,
        "Storage": Storage,
        "Tensor": torch.Tensor,
        "adopt": adopt,
        "create": torch._C._acc.create_empty_tensor,
        "device_type": LazyTensor.device_type,
        "float_key": float_key,
        "general": general,
        "numbers": random.default_generator,
        "load": load,
        "make": make,
        "in_inference_mode": torch.is_inference_mode_enabled,
        "op": op,
        "pending_append": trace.pending.append,
        "reinterpret": reinterpret,
        "strided": strided,
        "trace": trace,
    }
    exec(_code_of(source_of(op, lines)), scope)
    scope["kernel"].__qualname__ = f"kernel of {op.name}"
    found: Kernel = scope["kernel"]
    return found


@functools.cache
def _code_of(source: str) -> CodeType:
    """Compile a source once: ops of one shape of schema share it, and compiling is the costliest part of the import."""
    return compile(source, FILE, "exec")
