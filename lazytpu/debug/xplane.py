"""Adds what we know of device events to a trace for XProf: the ``*.xplane.pb`` that jax's profiler writes.

The file is a protocol buffer, `XSpace` of the open-source profiler: planes hold lines, lines hold events, and an event
has stats, each a name and a value.  Only what is named here is read; all else is copied as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lazytpu.debug.protobuf import NotAMessage, changed, fields, integer, last, text

# Numbers of fields, see xplane.proto.
_PLANES = 1  # of XSpace
_LINES, _STAT_NAMES = 3, 5  # of XPlane; the latter maps a number to (number, name)
_EVENTS = 4  # of XLine
_STATS = 4  # of XEvent
_KIND, _TEXT, _REFERENCE = 1, 5, 7  # of XStat: its name, by number, and its value, a text or the number of one
_KEY, _VALUE = 1, 2  # of an entry of a map
_ID, _NAME = 1, 2  # of XStatMetadata

About = Callable[[str, str], Mapping[str, str]]


def with_names(space: bytes, about: About) -> bytes:
    """The trace with more stats on the events of the device.

    Args:
        space: contents of the file.
        about: the HLO module and the instruction of an event to the stats to add, by name.

    Raises:
        NotAMessage: it is no such file.
    """
    try:
        return changed(space, _PLANES, lambda plane: _plane(plane, about))
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:  # fields of other kinds
        raise NotAMessage("this is no trace for XProf") from error


def _plane(plane: bytes, about: About) -> bytes:
    names = _Names(plane)
    module, op = names.numbers.get("hlo_module"), names.numbers.get("hlo_op")
    if module is None or op is None:
        return plane

    def event_with_names(event: bytes) -> bytes:
        told = dict([names.of(stat) for n, stat, _ in fields(event) if n == _STATS])
        if module not in told or op not in told:
            return event
        more = about(told[module], told[op])
        return event + b"".join([text(_STATS, names.stat(name, value)) for name, value in more.items()])

    with_more = changed(plane, _LINES, lambda line: changed(line, _EVENTS, event_with_names))
    return with_more + b"".join(names.added)


class _Names:
    """The names and texts of a plane, each of which has a number.

    Attributes:
        numbers: of each.
        added: the fields that the plane lacks so far.
    """

    def __init__(self, plane: bytes) -> None:
        self._names: dict[int, str] = {}
        for n, entry, _ in fields(plane):
            if n == _STAT_NAMES:
                found = last(last(entry)[_VALUE])
                self._names[found.get(_ID, 0)] = found.get(_NAME, b"").decode()
        self.numbers = {name: number for number, name in self._names.items()}
        self.added: list[bytes] = []

    def of(self, stat: bytes) -> tuple[int, str]:
        """The number of a stat's name, and its value where that is a text."""
        found = last(stat)
        value = found[_TEXT].decode() if _TEXT in found else self._names.get(found.get(_REFERENCE, -1), "")
        return found.get(_KIND, 0), value

    def stat(self, name: str, value: str) -> bytes:
        """A stat of that name and value."""
        return integer(_KIND, self._number_of(name)) + integer(_REFERENCE, self._number_of(value))

    def _number_of(self, name: str) -> int:
        number = self.numbers.get(name)
        if number is None:
            number = self.numbers[name] = max(self._names, default=0) + 1
            self._names[number] = name
            entry = integer(_KEY, number) + text(_VALUE, integer(_ID, number) + text(_NAME, name.encode()))
            self.added.append(text(_STAT_NAMES, entry))
        return number
