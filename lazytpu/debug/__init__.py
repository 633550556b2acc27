"""Debug: run each op at once, compare with the CPU, find the first NaN, stop where an op is recorded."""

from lazytpu.debug.against_cpu import check
from lazytpu.debug.modes import break_at, eager
from lazytpu.debug.nonfinite import find_nan

__all__ = ["break_at", "check", "eager", "find_nan"]
