"""Measure what agreeing costs: ``python -m tests.world.agreement_cost [--sizes 2,4,64,1024,4096]``.

Up to eight ranks are processes that ask as lazytpu does.  More are connections of one process, which sends for all and
reads for all: its time is part of the result.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

from lazytpu.runtime import coordinator
from tests.support.processes import start_code

_PROCESSES = 8
_LINE = "train.py:41"
_RANK = """
    import json, sys, time
    from lazytpu.runtime.ranks import Ranks
    rank, size, port, rounds = map(int, sys.argv[1:])
    ranks, members, took = Ranks(rank, size, ("127.0.0.1", port)), range(size), []
    for i in range(rounds):
        began = time.perf_counter()
        assert ranks.agree(f"2:abc.{i}", members, "0" * 32, "train.py:41", 60.0) == {}
        took.append(time.perf_counter() - began)
    ranks.leave()
    print(json.dumps(took[rounds // 10:]))
"""


def coordinator_of(size: int) -> tuple[subprocess.Popen[bytes], int]:
    """Start a coordinator; return it and the port for ranks."""
    command = [sys.executable, coordinator.__file__, str(size)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    return process, int(process.stdout.readline().split()[1])


def of_processes(size: int, rounds: int) -> float:
    """Return the median of the seconds that a rank waits for the others, each a process."""
    process, port = coordinator_of(size)
    running = [start_code(_RANK, rank, size, port, rounds) for rank in range(size)]
    ended = [r.wait() for r in running]
    process.kill()
    return statistics.median(x for done in ended for x in json.loads(done.stdout))


def of_connections(size: int, rounds: int) -> float:
    """Return the median of the seconds that a round of all ranks takes, each a connection."""
    process, port = coordinator_of(size)
    ranks = [socket.create_connection(("127.0.0.1", port)) for _ in range(size)]
    for rank, connection in enumerate(ranks):
        connection.sendall(f"here {rank}\n".encode())
    took = []
    for i in range(rounds):
        line = f"agree {size}:abc.{i} {size} {'0' * 32} {_LINE}\n".encode()
        began = time.perf_counter()
        for connection in ranks:
            connection.sendall(line)
        for connection in ranks:
            assert connection.recv(1 << 16).startswith(b"0 same")
        took.append(time.perf_counter() - began)
    for connection in ranks:
        connection.close()
    process.kill()
    return statistics.median(took[1:])


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="2,4,64,1024,4096")
    parser.add_argument("--rounds", type=int, default=300)
    asked = parser.parse_args()
    print(f"{os.cpu_count()} processors")
    for size in map(int, asked.sizes.split(",")):
        alone = size <= _PROCESSES
        seconds = (of_processes if alone else of_connections)(size, asked.rounds if alone else 20)
        print(f"{size} ranks, {'processes' if alone else 'connections'}: {1e3 * seconds:.3g} ms", flush=True)


if __name__ == "__main__":
    main()
