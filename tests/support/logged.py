"""What is logged while a test runs."""

from __future__ import annotations

import logging


class Logged(logging.Handler):
    """Keeps what is logged.

    It stands for pytest's own, which hangs handlers on each of torch's loggers in each phase of each test, in more time
    than half of the tests take.

    Attributes:
        records: what has been logged, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def text(self) -> str:
        """The messages, one a line."""
        return "\n".join(record.getMessage() for record in self.records)

    def clear(self) -> None:
        self.records.clear()
