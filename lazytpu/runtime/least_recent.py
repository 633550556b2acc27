"""A dictionary of bounded size."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any


class LeastRecent(OrderedDict[Any, Any]):
    """A dictionary that forgets its least recently used entry past ``limit``; ``newest`` is the last used one."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.newest: Any = None

    def find(self, key: Any) -> Any:
        """Return the entry, now the most recent, or None."""
        if key in self:
            self.move_to_end(key)
            self.newest = self[key]
            return self.newest
        return None

    def keep(self, key: Any, value: Any) -> None:
        """Add an entry."""
        self[key] = self.newest = value
        if len(self) > self.limit:
            self.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self.newest = None
