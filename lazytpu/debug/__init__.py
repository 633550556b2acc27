"""Debug: run each op at once, compare with the CPU, find the first NaN, stop where an op is recorded."""

import lazytpu.debug.verify  # noqa: F401  follows `lazytpu.config.verify`
from lazytpu.debug.against_cpu import check
from lazytpu.debug.modes import break_at, eager
from lazytpu.debug.nonfinite import find_nan

__all__ = ["break_at", "check", "eager", "find_nan"]
