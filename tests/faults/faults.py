"""The faults by name, each with the number of times that it is tried."""

from __future__ import annotations

from tests.faults.disk import disks
from tests.faults.kills import bytes_of_a_checkpoint, kills
from tests.faults.memory import out_of_memory, shapes, steps
from tests.faults.mutations import mutations
from tests.faults.processes import exits, shared_cache, threads
from tests.faults.user_errors import user_errors

FAULTS = {
    "kills": (kills, 500),
    "bytes": (bytes_of_a_checkpoint, 200),
    "mutations": (mutations, 10_000),
    "disks": (disks, 40),
    "shared cache": (shared_cache, 10),
    "threads": (threads, 8_000),
    "exits": (exits, 70),
    "user errors": (user_errors, 156),
    "memory": (out_of_memory, 20),
    "steps": (steps, 100_000),
    "shapes": (shapes, 10_000),
}
