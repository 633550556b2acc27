"""Programs that run in several processes at once, as a launcher starts them."""

from __future__ import annotations

import socket
import subprocess

from tests.support.processes import Running, start_code


def start_world(
    code: str, size: int, *arguments: object, without: tuple[int, ...] = (), **environment: str
) -> list[Running]:
    """Start a program in each process of a world, with the variables that torchrun sets.

    Args:
        without: ranks that do not come.
    """
    port = free_port()
    common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    settings = {"LAZYTPU_COLLECTIVE_TIMEOUT": "60", "OMP_NUM_THREADS": "1", **environment}
    return [
        start_code(
            code, *arguments, **{k: str(v) for k, v in common.items()}, RANK=str(r), LOCAL_RANK=str(r), **settings
        )
        for r in range(size)
        if r not in without
    ]


def run_world(code: str, size: int, *arguments: object, **environment: str) -> list[subprocess.CompletedProcess[str]]:
    """Run a program in each process of a world; return what each printed."""
    return [running.wait() for running in start_world(code, size, *arguments, **environment)]


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
