"""Waiting for buffers that another thread may donate."""

from __future__ import annotations

import pytest

from lazytpu.runtime import transfers


class Fake:
    """A buffer that is deleted, or fails, while somebody waits for it."""

    def __init__(self, *, donated: bool) -> None:
        self.donated, self.waits = donated, 0

    def is_deleted(self) -> bool:
        return self.donated and self.waits > 0

    def block_until_ready(self) -> None:
        self.waits += 1
        raise RuntimeError("deleted or donated" if self.donated else "failed")


def test_a_buffer_that_is_donated_meanwhile_is_left_out() -> None:
    transfers.wait([Fake(donated=True)])


def test_one_that_failed_raises() -> None:
    with pytest.raises(RuntimeError, match="failed"):
        transfers.wait([Fake(donated=True), Fake(donated=False)])
