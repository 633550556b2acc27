"""Temporaries keep their pages from step to step."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
