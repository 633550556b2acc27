"""Protocol buffers as they are written, without a library for them: a message is a row of fields with numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5  # how a field is written
_SIZES = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}


class NotAMessage(ValueError):
    """The bytes are no protocol buffer."""


def fields(message: bytes) -> Iterator[tuple[int, Any, bytes]]:
    """The fields of a message: number, value (an int where it is written as one, else bytes), and all its bytes.

    Raises:
        NotAMessage: the bytes are none.
    """
    at, end = 0, len(message)
    while at < end:
        start = at
        tag, at = varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = varint(message, at)
            yield tag >> 3, value, message[start:at]
            continue
        size, at = varint(message, at) if kind == _LENGTH else (_SIZES.get(kind, -1), at)
        if size < 0 or at + size > end:
            raise NotAMessage("this is no protocol buffer")
        at += size
        yield tag >> 3, message[at - size : at], message[start:at]


def last(message: bytes) -> dict[int, Any]:
    """The value of each field by its number, the last where there are several."""
    return {n: value for n, value, _ in fields(message)}


def changed(message: bytes, n: int, change: Callable[[bytes], bytes]) -> bytes:
    """The message with other contents in the fields of a number."""
    return b"".join([text(n, change(value)) if m == n else raw for m, value, raw in fields(message)])


def text(n: int, value: bytes) -> bytes:
    """A field of bytes."""
    return _as_varint(n << 3 | _LENGTH) + _as_varint(len(value)) + value


def integer(n: int, value: int) -> bytes:
    """A field of an int that is not negative."""
    return _as_varint(n << 3 | _VARINT) + _as_varint(value)


def varint(message: bytes, at: int) -> tuple[int, int]:
    """A number in the base 128, the least significant digit first, and where it ends.

    Raises:
        NotAMessage: the bytes end before it does.
    """
    value = 0
    for i, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, at + i + 1
    raise NotAMessage("this is no protocol buffer")


def _as_varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])
