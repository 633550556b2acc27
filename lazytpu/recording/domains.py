"""Numbers that an op may refuse, looked at in each call.

A number that has been seen to change is an input of the graph, and nothing that is remembered depends on its value.
So the kernels of the ops here look at it first; what is not surely right they let the CPU's kernel judge, on tensors
of no elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazytpu.recording.schema import OpOverload

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
    arguments = overload._schema.arguments
    places = {a.name: (i, a.default_value) for i, a in enumerate(arguments)}
    domains = _DOMAINS.get(overload._overloadpacket.__name__.removesuffix("_"), [])
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


def _ask_the_cpu(overload: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises what the CPU's kernel raises for these numbers."""
    named = {**dict(zip([a.name for a in overload._schema.arguments], args, strict=False)), **kwargs}
    if named.get("device") is not None:
        named["device"] = torch.device("cpu")
    if "size" in named:
        named["size"] = [0]
    named = {k: _empty(x) if isinstance(x, torch.Tensor) else x for k, x in named.items() if k != "generator"}
    try:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            overload(**named)
    except NotImplementedError:  # of a dtype that only the device knows
        return


def _empty(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((0, *[1] * (x.dim() - 1)), dtype=x.dtype)
