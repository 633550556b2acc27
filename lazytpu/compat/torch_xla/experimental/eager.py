"""``torch_xla.experimental.eager_mode``: run each op at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lazytpu


def eager_mode(enable: bool) -> None:
    """Switch it on or off; see ``lazytpu.config.eager``."""
    lazytpu.config.eager = enable


def is_eager_mode() -> bool:
    """Return whether it is on."""
    return lazytpu.config.eager


@contextmanager
def eager_mode_context(enable: bool) -> Iterator[None]:
    """Switch it inside only."""
    before = is_eager_mode()
    eager_mode(enable)
    try:
        yield
    finally:
        eager_mode(before)
