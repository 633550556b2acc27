"""Keep Gloo, which connects processes on CPUs, from writing to standard output.

It prints a line for each connection through ``std::cout``, and no setting changes that.  A stream of C++ whose state is
bad writes nothing, so the state is made bad while programs run that may connect.  Python's own output goes another way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

_BAD, _GOOD = 1, 0


@contextmanager
def silenced() -> Iterator[None]:
    """Let nothing be written through ``std::cout`` inside."""
    set_state = _state()
    set_state(_BAD)
    try:
        yield
    finally:
        set_state(_GOOD)


@cache
def _state() -> Callable[[int], object]:
    """Return what sets the state of ``std::cout``; does nothing where there is no such library."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        stream = ctypes.addressof(ctypes.c_char.in_dll(library, "_ZSt4cout"))
        clear = library["_ZNSt9basic_iosIcSt11char_traitsIcEE5clearESt12_Ios_Iostate"]
    except (OSError, AttributeError, ValueError):
        return lambda state: None
    clear.argtypes, clear.restype = [ctypes.c_void_p, ctypes.c_int], None
    table = ctypes.c_void_p.from_address(stream).value  # of virtual functions; before them lies where the base begins
    assert table is not None
    base = stream + ctypes.c_ssize_t.from_address(table - 3 * ctypes.sizeof(ctypes.c_void_p)).value
    return lambda state: clear(base, state)
