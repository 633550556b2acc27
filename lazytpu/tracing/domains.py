"""Numbers that an op may refuse, looked at in each call.

A number that has been seen to change is an input of the graph, and nothing that is remembered depends on its value.
So the kernels of the ops here look at it first; what is not surely right they let the CPU's kernel judge, on tensors
of no elements or of two.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite, prod
from typing import Any

import torch

from lazytpu.ir.op_schema import OpOverload

Kernel = Callable[..., Any]
Domain = tuple[tuple[str, ...], Callable[..., bool]]  # names of numbers, and whether they are surely right


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
_STAND_INS = {"low": 0, "from": 0, "p": 0.5}

# Ops that make elements of their numbers, or compare elements with them: a number has to fit the dtype then.
_CONVERTING = {"clamp", "clamp_max", "clamp_min", "constant_pad_nd", "fill", "full", "full_like", "hardtanh"}
_CONVERTING |= {"addcmul", "index_fill", "linspace", "masked_fill", "new_full", "scalar_tensor", "scatter", "threshold"}
_FACTORS = {"add": "alpha", "addcdiv": "value", "lerp": "weight", "rsub": "alpha", "sub": "alpha"}
_PRODUCTS = {"addbmm", "addmm", "addmv", "addr", "baddbmm"}
_FITS_ALL = 127
_DIVIDING = {"floor_divide", "fmod", "remainder"}  # and div, where it rounds
_REFUSED = ("without overflow", "unsigned type with negative limits", "Converting complex Scalar")


def stand_in(op: str, argument: str, usual: Any) -> Any:
    """The number that stands for any when an op is asked for the types of its results.

    Args:
        op: its name without the overload, such as ``randint``.
        argument: the number's name in the schema.
        usual: what stands for it in other ops.
    """
    if op not in _DOMAINS or argument not in _STAND_INS:
        return usual
    return type(usual)(_STAND_INS[argument])


def checked(overload: OpOverload, kernel: Kernel) -> Kernel:
    """The kernel of an op; where the op may refuse a number, one that looks at it first."""
    name = overload._overloadpacket.__name__.removesuffix("_")
    places = {a.name: (i, a.default_value) for i, a in enumerate(overload._schema.arguments)}
    if name in _CONVERTING | _PRODUCTS:
        numbers = [(i, a.name) for i, a in enumerate(overload._schema.arguments) if _is_number(a)]
        return _checked_to_fit(overload, kernel, numbers, length=1 if name in _PRODUCTS else 2)
    if name in _DIVIDING or name == "div" and "rounding_mode" in places:
        return _checked_not_to_be_zero(overload, kernel)
    domains = _DOMAINS.get(name, [])
    found = next((domain for domain in domains if places.keys() >= set(domain[0])), None)
    if found is None:
        return kernel
    names, is_right = found
    wanted = [(name, *places[name]) for name in names]

    def looking(*args: Any, **kwargs: Any) -> Any:
        numbers = [args[i] if i < len(args) else kwargs.get(name, default) for name, i, default in wanted]
        if all(type(x) is float or type(x) is int for x in numbers) and not is_right(*numbers):
            _ask_the_cpu(overload, args, kwargs)
        return kernel(*args, **kwargs)

    return looking


def checked_when_new(overload: OpOverload, general: Kernel) -> Kernel:
    """The kernel that records what was not recorded before; for ops that are called too often to be looked at then.

    A factor that the dtype cannot hold is refused here; the fast kernels leave those to it that not all dtypes hold.
    """
    factors = [(i, a.name) for i, a in enumerate(overload._schema.arguments) if is_factor(overload, a)]
    return _checked_to_fit(overload, general, factors, length=1)


def is_factor(overload: OpOverload, argument: Any) -> bool:
    """Whether an argument of a schema is a number that has to fit the dtype of the tensors."""
    name = overload._overloadpacket.__name__.removesuffix("_")
    return argument.name == _FACTORS.get(name) and _is_number(argument)


def _is_number(argument: Any) -> bool:
    return str(argument.type) in ("number", "Optional[number]")


def _checked_to_fit(overload: OpOverload, kernel: Kernel, places: list[tuple[int, str]], length: int) -> Kernel:
    """The kernel of an op that refuses numbers which the dtype of its tensors cannot hold.

    Args:
        overload, kernel: the op.
        places: positions and names of the numbers.
        length: see `_ask_the_cpu`.
    """
    if not places:
        return kernel

    def looking(*args: Any, **kwargs: Any) -> Any:
        for i, name in places:
            x = args[i] if i < len(args) else kwargs.get(name)
            if (type(x) is float or type(x) is int) and not 0 <= x <= _FITS_ALL or type(x) is complex:
                dtype = kwargs.get("dtype") or getattr(args[0], "dtype", None) or _default_dtype(x)
                if not _fits(x, dtype):
                    _ask_the_cpu(overload, args, kwargs, length, _REFUSED)
        return kernel(*args, **kwargs)

    return looking


def _checked_not_to_be_zero(overload: OpOverload, kernel: Kernel) -> Kernel:
    """The kernel of a division, which refuses to divide whole numbers by a number that is zero in their dtype."""
    takes_tensor = str(overload._schema.arguments[1].type) == "Tensor"

    def looking(*args: Any, **kwargs: Any) -> Any:
        x, y = args[0], args[1] if len(args) > 1 else kwargs.get("other")
        if (type(y) is int or type(y) is bool) and not 0 < y <= _FITS_ALL and _is_zero(y, x):
            divisor = torch.tensor(type(y)(0)) if takes_tensor else y
            _ask_the_cpu(overload, (x, divisor, *args[2:]), kwargs, length=2, refused=("ZeroDivisionError",))
        return kernel(*args, **kwargs)

    return looking


def _is_zero(number: int, x: Any) -> bool:
    """Whether a number is zero in the dtype of a tensor of whole numbers, if it has elements."""
    if not isinstance(x, torch.Tensor) or x.is_floating_point() or not x.numel():
        return False
    return number == 0 or x.dtype is not torch.bool and number % (1 << 8 * x.dtype.itemsize) == 0


def _default_dtype(number: complex) -> torch.dtype:
    """The dtype of a tensor of a number."""
    if type(number) is int:
        return torch.int64
    return torch.get_default_dtype() if type(number) is float else torch.complex128


def _fits(number: complex, dtype: torch.dtype) -> bool:
    """Whether a number surely is one of a dtype, up to rounding."""
    if isinstance(number, complex):
        return dtype in (torch.bool, torch.complex128)
    if dtype in (torch.bool, torch.complex64):
        dtype = torch.float32
    if dtype is torch.complex128:
        return True
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min <= number <= info.max or dtype.is_floating_point and not isfinite(number)


def _ask_the_cpu(
    overload: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], length: int = 0, refused: tuple[str, ...] = ()
) -> None:
    """Raises what the CPU's kernel raises for these numbers.

    Args:
        overload, args, kwargs: what was called.
        length: the size of the tensors that it is asked with, in their first dimension, unless they are smaller.
        refused: pieces of the messages that are about the numbers, where others may be about the sizes.
    """
    named = {**dict(zip([a.name for a in overload._schema.arguments], args, strict=False)), **kwargs}
    if named.get("device") is not None:
        named["device"] = torch.device("cpu")
    if "size" in named:
        named["size"] = [min(length, prod(named["size"]))]

    def stand_in(x: torch.Tensor) -> torch.Tensor:
        size = (min(length, x.numel()), *[1] * (x.dim() - 1))
        return torch.zeros(size if x.dim() or not length else (), dtype=x.dtype)

    named = {k: stand_in(x) if isinstance(x, torch.Tensor) else x for k, x in named.items() if k != "generator"}
    try:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            overload(**named)
    except NotImplementedError:  # of a dtype that only the device knows
        return
    except Exception as error:
        if not refused or any(piece in str(error) for piece in refused):
            raise
