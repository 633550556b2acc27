"""Temporaries keep their pages from step to step."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

from lazytpu.ir.graph import Graph
from lazytpu.runtime import launch
from lazytpu.runtime.executable import Executable
from lazytpu.runtime.host import memory

PROGRAM = """
import resource, torch, lazytpu

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

a, b = (torch.randn(2500, 16).to(lazytpu.device()) for _ in range(2))
for i in range(40):
    if i == 20:
        before = faults()
    y = ((a @ a.T) @ b + (b @ b.T) @ a).sum()  # two temporaries of 25 MB
    lazytpu.mark_step(wait=True)
print((faults() - before) / 20)
"""


def page_faults(**variables: str) -> float:
    """Page faults a step, in a new process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    environment = {**kept, "LAZYTPU_DISK_CACHE": "0", **variables}
    return float(subprocess.check_output([sys.executable, "-c", PROGRAM], env=environment, text=True))


@pytest.mark.skipif(not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"), reason="settings of glibc")
def test_pages_are_kept():
    assert any(page_faults() < 300 for _ in range(2))  # a busy machine may take pages back
    assert page_faults(LAZYTPU_REUSE_PAGES="0") > 1000
    assert page_faults(MALLOC_TOP_PAD_="131072") > 1000, "what the user has set is left as it is"


def test_a_program_with_large_temporaries_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Slow:
        """A result that is not ready before somebody waits for it."""

        def __init__(self) -> None:
            self.ready = False

        def is_deleted(self) -> bool:
            return False

        def is_ready(self) -> bool:
            return self.ready

        def block_until_ready(self) -> None:
            events.append("waited")
            self.ready = True

    def started(*_: object) -> list[Slow]:
        events.append("started")
        return [Slow()]

    monkeypatch.setattr(launch, "_large", [])
    graph = Graph((), (), (), (), (0, 0, 0))
    large, small = (Executable(graph, started, 0.0, 0.0, smallest=0, alone=alone) for alone in (True, False))
    for executable in (large, small, large, small):
        launch.start(executable, [], [], (None, None, None))
        launch.start_ready(executable, [], [], (None, None, None))
    ready = ["started", "waited", "started"]
    assert events == [*ready, "started", "started", "waited", "started", "waited", "started", "started", "started"]


def test_large_temporaries_are_found() -> None:
    size = 6000
    x = jax.ShapeDtypeStruct((size, 16), jax.numpy.float32)
    products = jax.jit(lambda x: (x @ x.T) @ x).lower(x).compile()
    needs, alone = memory.needed(products)
    assert alone == (jax.default_backend() == "cpu") and needs == 0, "144 MB of temporaries"
    assert memory.needed(jax.jit(lambda x: x + 1).lower(x).compile()) == (0, False)
