"""``torch_xla.utils.utils``: the small things that torch_xla's example scripts use."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils._pytree import tree_leaves

from lazytpu.compat import lacking

__getattr__ = lacking.names_of(__name__)


class SampleGenerator:
    """Gives the same batch a number of times, for runs without data."""

    def __init__(self, data: Any, sample_count: int) -> None:
        self._data, self._sample_count = data, sample_count
        self._given = 0

    def __iter__(self) -> SampleGenerator:
        return SampleGenerator(self._data, self._sample_count)

    def __len__(self) -> int:
        return self._sample_count

    def __next__(self) -> Any:
        return self.next()

    def next(self) -> Any:
        """The batch, or StopIteration after the last time."""
        if self._given >= self._sample_count:
            raise StopIteration
        self._given += 1
        return self._data


class FnDataGenerator:
    """Gives ``func(batch_size, *dims)`` a number of times."""

    def __init__(
        self,
        func: Callable[..., Any],
        batch_size: int,
        gen_tensor: Any,
        dims: tuple[int, ...] | None = None,
        count: int = 1,
    ) -> None:
        self._make: Callable[[], Any] = lambda: func(gen_tensor(batch_size, *(dims or ())))
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return (self._make() for _ in range(self._count))


class TmpFolder:
    """A folder that is removed in the end; ``name`` is its path."""

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp()

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.name, ignore_errors=True)


class TimedScope:
    """Prints how many seconds were spent inside."""

    def __init__(self, msg: str = "", printfn: Callable[[str], None] | None = None) -> None:
        self._text, self._print = msg, printfn or eprint

    def __enter__(self) -> TimedScope:
        self._start = time.time()
        return self

    def __exit__(self, *_: object) -> None:
        self._print(f"{self._text}{time.time() - self._start:.3f}sec")


def as_list(t: Any) -> Any:
    """Lists and tuples as they are, anything else in a list."""
    return t if isinstance(t, (tuple, list)) else [t]


def getenv_as(name: str, type: Callable[[str], Any], defval: Any = None) -> Any:
    """An environment variable, converted; 0 and 1, yes and no ... for bool."""
    text = os.environ.get(name)
    if text is None:
        return defval
    return check_env_flag(name) if type is bool else type(text)


def check_env_flag(name: str, default: str = "") -> bool:
    """Whether an environment variable says yes."""
    return os.environ.get(name, default).upper() in ("ON", "1", "YES", "TRUE", "Y")


def for_each_instance(value: Any, select_fn: Callable[[Any], bool], fn: Callable[[Any], None]) -> None:
    """Calls ``fn`` with each leaf of nested containers that is selected."""
    for leaf in tree_leaves(value):
        if select_fn(leaf):
            fn(leaf)


def timed(fn: Callable[[], Any], msg: str = "", printfn: Callable[[str], None] | None = None) -> Any:
    """What ``fn`` returns, after printing how long it took."""
    with TimedScope(msg, printfn):
        return fn()


def eprint(*args: Any, **kwargs: Any) -> None:
    """Prints to the standard error."""
    print(*args, file=sys.stderr, **kwargs)


def null_print(*args: Any, **kwargs: Any) -> None:
    """Prints nothing."""


def get_print_fn(debug: bool | None = None) -> Callable[..., None]:
    """`eprint`, or `null_print` where ``debug`` is false (by default the variable ``XLA_DEBUG_LOG``)."""
    return eprint if (check_env_flag("XLA_DEBUG_LOG") if debug is None else debug) else null_print
