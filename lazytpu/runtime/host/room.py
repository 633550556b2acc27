"""Ask for the memory of a large program before it is started: once it runs, a failure loses its donated inputs."""

from __future__ import annotations

import mmap

import jax

from lazytpu.runtime import client

_LARGE = 256 << 20  # bytes; what is smaller is there


def needed(compiled: object) -> int:
    """Return the bytes that a program takes beside its inputs, if they are many and memory is the host's; else 0."""
    if client.platform() != "cpu" or not isinstance(compiled, jax.stages.Compiled):
        return 0
    found = compiled.memory_analysis()
    needs = found.output_size_in_bytes - found.alias_size_in_bytes + found.temp_size_in_bytes if found else 0
    return int(needs) if needs >= _LARGE else 0


def is_there(size: int) -> bool:
    """Return whether the system would give so many bytes; nothing is written to them, so asking costs microseconds."""
    try:
        mmap.mmap(-1, size).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True
