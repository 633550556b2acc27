"""A dictionary of bounded size."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


class LeastRecent(OrderedDict[_K, _V]):
    """A dictionary that forgets its least recently used entry past ``limit``; ``newest`` is the last used one."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.newest: _V | None = None

    def find(self, key: _K) -> _V | None:
        """Return the entry, now the most recent, or None."""
        if key in self:
            self.move_to_end(key)
            self.newest = self[key]
            return self.newest
        return None

    def keep(self, key: _K, value: _V) -> None:
        """Add an entry."""
        self[key] = self.newest = value
        if len(self) > self.limit:
            self.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self.newest = None
