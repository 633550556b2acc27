"""What trying a fault has given."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

_PATH = re.compile(r'File "[^"]*?([^/"]+)"')  # of a line of a traceback


@dataclass
class Result:
    """Attributes:
    tried: how many times.
    what: what the number counts.
    found: what went wrong.
    seconds: how long it took.
    more: further figures by name.
    """

    tried: int
    what: str
    found: list[str]
    seconds: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a record keeps them: of files their names, not where this machine has them."""
        return {**asdict(self), "found": [_PATH.sub(r'File "\1"', text) for text in self.found]}


def timed(fault: Callable[..., Result]) -> Callable[..., Result]:
    """Notes how long a fault took to try."""

    @functools.wraps(fault)
    def call(*args: Any) -> Result:
        start = time.monotonic()
        result = fault(*args)
        result.seconds = round(time.monotonic() - start, 1)
        return result

    return call
