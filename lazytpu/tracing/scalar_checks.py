"""Scalar checks: look at numbers that an op may refuse, in each call.

A number that is an input of the graph is no part of what a recorded op is found by, so nothing that is remembered
depends on its value.  The kernels of the ops here look at it first; what is not surely right is left to the CPU's
kernel to judge, on sample tensors of two elements at most a dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, TypeAlias

import torch

from lazytpu.ir.op_schema import Arg, OpOverload
from lazytpu.tracing.sample_tensors import dry_run, named_arguments

Kernel: TypeAlias = Callable[..., Any]
Domain: TypeAlias = tuple[tuple[str, ...], Callable[..., bool]]  # names of numbers, and whether they are surely right


def _rising(low: float, high: float) -> bool:
    return low < high


def _positive(number: float) -> bool:
    return number > 0


def _not_negative(number: float) -> bool:
    return number >= 0


_HALF_OPEN: list[Domain] = [(("low", "high"), _rising), (("high",), _positive)]
_DOMAINS: dict[str, list[Domain]] = {
    "bernoulli": [(("p",), lambda p: 0 <= p <= 1)],
    "cauchy": [(("sigma",), _positive)],
    "exponential": [(("lambd",), _positive)],
    "geometric": [(("p",), lambda p: 0 < p < 1)],
    "huber_loss": [(("delta",), _positive)],
    "log_normal": [(("std",), _positive)],
    "normal": [(("std",), _not_negative)],
    "normal_functional": [(("std",), _not_negative)],
    "randint": _HALF_OPEN,
    "randint_like": _HALF_OPEN,
    "random": [(("from", "to"), _rising), (("to",), _positive)],
    "renorm": [(("maxnorm",), _not_negative)],
    "smooth_l1_loss": [(("beta",), _not_negative)],
    "softshrink": [(("lambd",), _not_negative)],
    "uniform": [(("from", "to"), _rising)],
}

# Ops that make elements of their numbers, or compare elements with them: a number has to fit the dtype then.
_CONVERTING = {"clamp", "clamp_max", "clamp_min", "constant_pad_nd", "fill", "full", "full_like", "hardtanh"}
_CONVERTING |= {"addcmul", "index_fill", "linspace", "masked_fill", "new_full", "scalar_tensor", "scatter", "threshold"}
_CONVERTING |= {"addbmm", "addmm", "addmv", "addr", "baddbmm"}
_FACTORS = {"add": "alpha", "addcdiv": "value", "lerp": "weight", "rsub": "alpha", "sub": "alpha"}
_FITS_ALL = 127
_DIVIDING = {"floor_divide", "fmod", "remainder"}  # and div, where it rounds

# Pieces of the messages about a number that does not fit, or that is zero; others may be about sizes.
_MISFIT = (
    "without overflow",
    "outside the representable range",  # since torch 2.15
    "unsigned type with negative limits",
    "Converting complex Scalar",
)
_DIVISION = ("ZeroDivisionError",)


def checked(overload: OpOverload, kernel: Kernel) -> Kernel:
    """Return the kernel of an op; where the op may refuse a number, one that looks at it first."""
    name = _name(overload)
    places = {a.name: (i, a.default_value) for i, a in enumerate(overload._schema.arguments)}
    if name in _CONVERTING:
        numbers = [(i, a.name) for i, a in enumerate(overload._schema.arguments) if _is_number(a)]
        return _checked_to_fit(overload, kernel, numbers)
    if name in _DIVIDING or name == "div" and "rounding_mode" in places:
        return _checked_not_to_be_zero(overload, kernel)
    found = next((domain for domain in _DOMAINS.get(name, ()) if places.keys() >= set(domain[0])), None)
    if found is None:
        return kernel
    names, is_right = found
    wanted = [(name, *places[name]) for name in names]

    def checking(*args: object, **kwargs: object) -> object:
        numbers = [args[i] if i < len(args) else kwargs.get(name, default) for name, i, default in wanted]
        if all(type(x) is float or type(x) is int for x in numbers) and not is_right(*numbers):
            _raise_if_refused(overload, args, kwargs)
        return kernel(*args, **kwargs)

    return checking


def checked_when_new(overload: OpOverload, general: Kernel) -> Kernel:
    """Return the kernel that records what is new, for ops that are called too often to be looked at each time.

    It looks at factors that the dtype may not hold; the fast kernels leave those to it that not all dtypes hold.
    """
    factors = [(i, a.name) for i, a in enumerate(overload._schema.arguments) if is_factor(overload, a)]
    return _checked_to_fit(overload, general, factors)


def is_factor(overload: OpOverload, argument: torch.Argument) -> bool:
    """Return whether an argument of a schema is a number that has to fit the dtype of the tensors."""
    return argument.name == _FACTORS.get(_name(overload)) and _is_number(argument)


def _name(overload: OpOverload) -> str:
    return str(overload._overloadpacket.__name__).removesuffix("_")


def _is_number(argument: torch.Argument) -> bool:
    return str(argument.type) in ("number", "Optional[number]")


def _checked_to_fit(overload: OpOverload, kernel: Kernel, places: Sequence[tuple[int, str]]) -> Kernel:
    """Return the kernel of an op that refuses scalars, at these places, which the dtype of its tensors cannot hold."""
    if not places:
        return kernel

    def checking(*args: object, **kwargs: object) -> object:
        for i, name in places:
            x = args[i] if i < len(args) else kwargs.get(name)
            if (type(x) is float or type(x) is int) and not 0 <= x <= _FITS_ALL or type(x) is complex:
                dtype: Arg = kwargs.get("dtype") or getattr(args[0], "dtype", None) or _default_dtype(x)
                if not _fits(x, dtype):
                    _raise_if_refused(overload, args, kwargs, _MISFIT)
        return kernel(*args, **kwargs)

    return checking


def _checked_not_to_be_zero(overload: OpOverload, kernel: Kernel) -> Kernel:
    """Return the kernel of a division that refuses to divide whole numbers by a number that is zero in their dtype."""

    def checking(*args: object, **kwargs: object) -> object:
        x, y = args[0], args[1] if len(args) > 1 else kwargs.get("other")
        if (type(y) is int or type(y) is bool) and not 0 < y <= _FITS_ALL and _is_zero(y, x):
            _raise_if_refused(overload, args, kwargs, _DIVISION)
        return kernel(*args, **kwargs)

    return checking


def _is_zero(number: int, x: object) -> bool:
    """Return whether a number is zero in the dtype of a tensor of whole numbers, if it has elements."""
    if not isinstance(x, torch.Tensor) or x.is_floating_point() or not x.numel():
        return False
    return number == 0 or x.dtype is not torch.bool and number % (1 << 8 * x.dtype.itemsize) == 0


def _default_dtype(number: complex) -> torch.dtype:
    """Return the dtype of a tensor of a number."""
    if type(number) is int:
        return torch.int64
    return torch.get_default_dtype() if type(number) is float else torch.complex128


def _fits(number: complex, dtype: torch.dtype) -> bool:
    """Return whether a number surely is one of a dtype, up to rounding."""
    if isinstance(number, complex):
        return dtype in (torch.bool, torch.complex128)
    if dtype in (torch.bool, torch.complex64):
        dtype = torch.float32
    if dtype in (torch.complex32, torch.complex128):  # what is too large for a half is infinite, and no error
        return True
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min <= number <= info.max or dtype.is_floating_point and not isfinite(number)


def _at_most_two(size: int) -> int:
    return min(size, 2)


def _raise_if_refused(
    overload: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], pieces: Sequence[str] = ("",)
) -> None:
    """Raise what the CPU's kernel raises for these numbers, if its message has one of the ``pieces``."""
    named: dict[str, Arg] = named_arguments(overload, args, kwargs)
    if "size" in named:
        named["size"] = [_at_most_two(n) for n in named["size"]]
    try:
        dry_run(overload, named, _at_most_two)
    except NotImplementedError:  # of a dtype that only the device knows
        return
    except Exception as error:
        if any(piece in str(error) for piece in pieces):
            raise
