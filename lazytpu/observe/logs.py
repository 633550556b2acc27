"""The log: which of its topics are on (``lazytpu.config.log``), and where it goes.

Each topic is a logger of Python's `logging`, ``lazytpu.<topic>``.  Messages go to standard error, unless the
program has set up logging itself: then they go where everything goes.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from lazytpu.config import config

TOPICS = {
    "compile": logging.INFO,
    "promote": logging.INFO,
    "fallback": logging.INFO,
    "cut": logging.DEBUG,
    "step": logging.DEBUG,
    "placement": logging.DEBUG - 1,  # so much that it has to be asked for by name
}
"""Topic to the level of its messages."""

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_root = logging.getLogger("lazytpu")
_loggers = {topic: logging.getLogger(f"lazytpu.{topic}") for topic in TOPICS}
_applied = ""
_on: frozenset[str] = frozenset()


class _ToStandardError(logging.StreamHandler[Any]):
    """Writes to what ``sys.stderr`` is at the time."""

    @property
    def stream(self) -> Any:
        """Where to write."""
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        pass  # set by the base class when it is made


_handler = _ToStandardError()
_handler.setFormatter(logging.Formatter("lazytpu: %(message)s"))


def is_on(topic: str) -> bool:
    """Whether messages of a topic go anywhere, so that a costly one need not be made."""
    if _applied != config.log:
        _apply()
    return topic in _on


def note(topic: str, message: str, *args: Any, level: int | None = None) -> None:
    """Writes to the log.

    Args:
        level: other than the topic's own.
    """
    if _applied != config.log:
        _apply()
    logger = _loggers[topic]
    has_own_place = logging.getLogger().handlers or any(h is not _handler for h in (*_root.handlers, *logger.handlers))
    if has_own_place:
        _root.removeHandler(_handler)
    elif _handler not in _root.handlers:
        _root.addHandler(_handler)
    logger.log(TOPICS[topic] if level is None else level, message, *args)


def _apply() -> None:
    """Sets the levels of the loggers as ``config.log`` says."""
    global _applied, _on
    parts = {part.strip() for part in config.log.split(",")}
    base = min((LEVELS[part] for part in parts & LEVELS.keys()), default=logging.WARNING)
    _root.setLevel(base)
    for topic, logger in _loggers.items():
        logger.setLevel(TOPICS[topic] if topic in parts else base)
    _on = frozenset(topic for topic, level in TOPICS.items() if topic in parts or level >= base)
    _applied = config.log
