"""``torch_xla.utils.utils``: the helpers that torch_xla's example scripts use."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from tempfile import TemporaryDirectory
from typing import Generic, TypeVar

from torch.utils._pytree import tree_leaves

from lazytpu.compat import names

__getattr__ = names.missing_from(__name__)
T = TypeVar("T")
D = TypeVar("D")


class SampleGenerator(Generic[T]):
    """Yields the same batch a number of times, for runs without data."""

    def __init__(self, data: T, sample_count: int) -> None:
        self._data, self._sample_count = data, sample_count
        self._left = repeat(data, sample_count)

    def __iter__(self) -> SampleGenerator[T]:
        return SampleGenerator(self._data, self._sample_count)

    def __len__(self) -> int:
        return self._sample_count

    def __next__(self) -> T:
        return next(self._left)

    next = __next__


class FnDataGenerator(Generic[D, T]):
    """Yields ``func(gen_tensor(batch_size, *dims))`` a number of times."""

    def __init__(
        self,
        func: Callable[[D], T],
        batch_size: int,
        gen_tensor: Callable[..., D],
        dims: tuple[int, ...] | None = None,
        count: int = 1,
    ) -> None:
        self._make: Callable[[], T] = lambda: func(gen_tensor(batch_size, *(dims or ())))
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        return (self._make() for _ in range(self._count))


class TmpFolder(TemporaryDirectory[str]):
    """A temporary folder, removed at the end of ``with``; ``name`` is its path."""

    def __init__(self) -> None:
        super().__init__(ignore_cleanup_errors=True)


class TimedScope:
    """Prints the seconds spent inside."""

    def __init__(self, msg: str = "", printfn: Callable[[str], None] | None = None) -> None:
        self._text, self._print = msg, printfn or eprint

    def __enter__(self) -> TimedScope:
        self._start = time.time()
        return self

    def __exit__(self, *_: object) -> None:
        self._print(f"{self._text}{time.time() - self._start:.3f}sec")


def as_list(t: object) -> list[object] | tuple[object, ...]:
    """Return lists and tuples as they are, anything else in a list."""
    return t if isinstance(t, (tuple, list)) else [t]


def getenv_as(name: str, type: Callable[[str], T], defval: T | None = None) -> T | bool | None:
    """Return an environment variable, converted; for bool it may be 0 or 1, yes or no, true or false."""
    text = os.environ.get(name)
    if text is None:
        return defval
    return check_env_flag(name) if type is bool else type(text)


def check_env_flag(name: str, default: str = "") -> bool:
    """Return whether an environment variable says yes."""
    return os.environ.get(name, default).upper() in ("ON", "1", "YES", "TRUE", "Y")


def for_each_instance(value: object, select_fn: Callable[[object], bool], fn: Callable[[object], None]) -> None:
    """Call ``fn`` with each selected leaf of a pytree."""
    for leaf in tree_leaves(value):
        if select_fn(leaf):
            fn(leaf)


def timed(fn: Callable[[], T], msg: str = "", printfn: Callable[[str], None] | None = None) -> T:
    """Return the result of ``fn`` and print how long it took."""
    with TimedScope(msg, printfn):
        return fn()


def eprint(*args: object, sep: str = " ", end: str = "\n", flush: bool = False) -> None:
    """Print to the standard error."""
    print(*args, file=sys.stderr, sep=sep, end=end, flush=flush)


def null_print(*args: object, **kwargs: object) -> None:
    """Print nothing."""


def get_print_fn(debug: bool | None = None) -> Callable[..., None]:
    """Return `eprint`, or `null_print` where ``debug`` is false (by default the variable ``XLA_DEBUG_LOG``)."""
    return eprint if (check_env_flag("XLA_DEBUG_LOG") if debug is None else debug) else null_print
