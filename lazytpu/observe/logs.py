"""Write the log: its topics are those of ``lazytpu.config.log``.

Each topic is a logger of Python's `logging`, ``lazytpu.<topic>``.  Messages go to standard error, unless the
program has set up logging itself: then they go where everything goes.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from lazytpu.config import config

TOPICS = {
    "compile": logging.INFO,
    "made_dynamic": logging.INFO,
    "fallback": logging.INFO,
    "cut": logging.DEBUG,
    "step": logging.DEBUG,
    "world": logging.INFO,
    "placement": logging.DEBUG - 1,  # so verbose that it has to be asked for by name
}
"""Topic to the level of its messages."""

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_root = logging.getLogger("lazytpu")
_loggers = {topic: logging.getLogger(f"lazytpu.{topic}") for topic in TOPICS}
_applied = ""
_on: frozenset[str] = frozenset()


class _ToStandardError(logging.StreamHandler[TextIO]):
    """Writes to the present ``sys.stderr``."""

    @property
    def stream(self) -> TextIO:
        """Return where to write."""
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass  # the base class sets it


_handler = _ToStandardError()
_handler.setFormatter(logging.Formatter("lazytpu: %(message)s"))


def name_rank(rank: int) -> None:
    """Begin each message with the rank of this process, one of several."""
    _handler.setFormatter(logging.Formatter(f"lazytpu[{rank}]: %(message)s"))


def is_on(topic: str) -> bool:
    """Return whether messages of a topic are written; if not, a costly one need not be made."""
    if _applied != config.log:
        _apply()
    return topic in _on


def note(topic: str, message: str, *args: object, level: int | None = None) -> None:
    """Write a message to the log.

    Args:
        level: instead of the topic's own.
    """
    if _applied != config.log:
        _apply()
    logger = _loggers[topic]
    has_handler = logging.getLogger().handlers or any(h is not _handler for h in (*_root.handlers, *logger.handlers))
    if has_handler:
        _root.removeHandler(_handler)
    elif _handler not in _root.handlers:
        _root.addHandler(_handler)
    logger.log(TOPICS[topic] if level is None else level, message, *args)


def _apply() -> None:
    """Set the levels of the loggers to those of ``config.log``."""
    global _applied, _on
    parts = {part.strip() for part in config.log.split(",")}
    base = min((LEVELS[part] for part in parts & LEVELS.keys()), default=logging.WARNING)
    _root.setLevel(base)
    for topic, logger in _loggers.items():
        logger.setLevel(TOPICS[topic] if topic in parts else base)
    _on = frozenset(topic for topic, level in TOPICS.items() if topic in parts or level >= base)
    _applied = config.log
