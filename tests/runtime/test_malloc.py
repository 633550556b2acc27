"""Large temporaries keep their pages from step to step where that is switched on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch, lazytpu

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

x = torch.randn(5000, 16).to(lazytpu.device())
for i in range(12):
    if i == 6:
        before = faults()
    y = ((x @ x.T) @ x).sum()  # a temporary of 100 MB
    lazytpu.mark_step(wait=True)
print((faults() - before) / 6)
"""


def page_faults(**variables: str) -> float:
    """Page faults a step, in a new process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    environment = {**kept, "LAZYTPU_DISK_CACHE": "0", **variables}
    return float(subprocess.check_output([sys.executable, "-c", PROGRAM], env=environment, text=True))


@pytest.mark.skipif(not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"), reason="settings of glibc")
def test_pages_are_kept():
    assert any(page_faults(LAZYTPU_REUSE_PAGES="1") < 100 for _ in range(2))  # a busy machine may take pages back
    assert page_faults(LAZYTPU_REUSE_PAGES="1", MALLOC_ARENA_MAX="4") > 1000, "what the user has set is left as it is"
