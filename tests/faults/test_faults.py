"""Faults, each tried a few times; ``python -m tests.faults`` tries them often."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import run_code


@pytest.mark.parametrize(
    ("names", "scale"),
    [
        (["kills", "bytes", "mutations"], 0.005),
        (["disks", "shared cache", "threads", "exits", "user errors"], 0.1),
        (["memory", "steps", "shapes"], 0.05),
    ],
)
def test_nothing_goes_wrong(names: list[str], scale: float, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    code = "import runpy; runpy.run_module('tests.faults', run_name='__main__', alter_sys=True)"
    done = run_code(code, *names, "--scale", scale, "--record", file, loaded=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text())["faults"]
    assert [*results] == names and all(r["tried"] > 0 and not r["found"] for r in results.values())
