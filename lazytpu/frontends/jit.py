"""`jit`: a function of tensors compiled whole, gradient included."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from lazytpu.errors import GraphBreakError, LazyTPUError
from lazytpu.frontends.dynamo import backend

_LIMITS = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), 1 << 30)
_RECURRENT = "RNN, GRU, or LSTM"
_TWO_MASKS = "PendingUnbackedSymbolNotFound"  # what becomes in torch of several masks in one index
_BRANCH = "torch.where where both sides can be computed, else torch.cond; torch.while_loop for a loop"
_SIZE = "torch.while_loop or scan for the loop, a fixed size for the shape; a Python number that is an argument: static"
_OTHER = "take it out of the function, or use torch.compile(..., backend='lazytpu'), which goes on after it"


def jit(function: Callable[..., Any] | None = None, *, static: str | Iterable[str] = ()) -> Any:
    """Compile a function of tensors as one program, as ``tf.function(jit_compile=True)`` and ``jax.jit`` do.

    The function runs in Python once for each set of types; what follows are calls of the program.  It may use
    modules and tensors from outside, change buffers in place, draw random numbers, and be differentiated.

    Args:
        function: takes and returns any nesting of tensors and constants; on the device, or on the CPU, from where
            every call moves them.
        static: names of arguments whose floats are part of the program.  Other floats are inputs, 0-dim tensors
            inside the function, so a learning rate may change from call to call.  All else that is no tensor
            (ints, strings, flags, dtypes) is part of the program anyway, and each new value compiles another.

    Returns:
        A function with the same arguments; without ``function``, a decorator.

    Raises:
        GraphBreakError: at a call: the function does something that cannot be part of a program, such as an ``if`` on
            the value of a tensor; names the line and the fix.
        ValueError: ``static`` names no argument.

    Example:
        >>> @lazytpu.jit
        ... def step(x, w, lr):
        ...     return w - lr * (x.T @ (x @ w))
    """
    if function is None:
        return functools.partial(jit, static=static)
    call = _Jit(function, {static} if isinstance(static, str) else set(static)).call

    def jitted(*args: object, **kwargs: object) -> Any:
        return call(*args, **kwargs)

    functools.update_wrapper(jitted, function)
    if isinstance(function, FunctionType):
        jitted._torchdynamo_inline = function  # type: ignore[attr-defined]  # within another compiled function
    return jitted


class _Jit:
    """What `jit` knows of a function."""

    def __init__(self, function: Callable[..., Any], static: set[str]) -> None:
        signature = inspect.signature(function)
        self._names = [p.name for p in signature.parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        unknown = static - set(signature.parameters)
        if unknown and not takes_any:
            name = getattr(function, "__qualname__", repr(function))
            raise ValueError(f"static: {name} has no argument {', '.join(sorted(unknown))}")
        self._static = static
        self._allowed: dict[str, Any] = {}  # what Dynamo is to take that it would not by itself
        self._compiled: Any = torch.compile(
            function, backend=backend, fullgraph=True, dynamic=False, options={"fullgraph": True}
        )

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the program of these arguments."""
        names = [*self._names, *[None] * len(args)]
        given = [x if name in self._static else _traced(x) for name, x in zip(names, args, strict=False)]
        named = {k: x if k in self._static else _traced(x) for k, x in kwargs.items()}
        return self._call(given, named)

    def _call(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        from torch._dynamo import config, exc  # a second to import, and torch.compile has done it

        try:
            while True:
                try:
                    if not self._allowed:
                        return self._compiled(*args, **kwargs)
                    with config.patch(self._allowed):
                        return self._compiled(*args, **kwargs)
                except exc.FailOnRecompileLimitHit:  # the limit is for guards that fail by mistake
                    more = _LIMITS
                except exc.Unsupported as error:  # whose steps it would write one by one on other devices
                    if _RECURRENT not in str(error):
                        raise
                    more = {"allow_rnn": True}
                if more.items() <= self._allowed.items():
                    raise LazyTPUError(f"Dynamo ignored {more}")
                self._allowed |= more
        except (exc.Unsupported, exc.UserError, exc.InternalTorchDynamoError) as error:
            if isinstance(error, exc.InternalTorchDynamoError) and _TWO_MASKS not in str(error):
                raise
            raise _explained(error) from None


def _traced(x: object) -> Any:
    """Return floats as 0-dim tensors, which are inputs of the program."""
    if type(x) is float:
        return torch.tensor(x, dtype=torch.float64, device="cpu")
    if isinstance(x, torch.Tensor):
        return x
    return tree_map(lambda e: _traced(e) if type(e) is float else e, x) if isinstance(x, (list, tuple, dict)) else x


def _explained(error: Any) -> GraphBreakError:
    """Return the error for what Dynamo could not capture."""
    frame = next(reversed(error.real_stack), None) if getattr(error, "real_stack", None) else None
    at = f"{os.path.basename(frame.filename)}:{frame.lineno}: {(frame.line or '').strip()}" if frame is not None else ""
    text = str(error)
    first = text.strip().splitlines()[0]
    if "Data-dependent branching" in text:
        what, do = "Python's control flow depends on the value of a tensor", _BRANCH
    elif "data-dependent" in text or _TWO_MASKS in text:
        what, do = "a size, or the number of iterations of a loop, depends on the value of a tensor", _SIZE
    else:
        what, do = first[0].lower() + first[1:], _OTHER
    return GraphBreakError(f"the function cannot be one program: {what}", at=at, fix=do)
