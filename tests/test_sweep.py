"""The sweep over the operator database: it reports, stops at a line and goes on from there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def sweep(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.sweep", "--samples", "1", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_it_goes_on_where_it_stopped_and_judges_by_the_table(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    options = ("--ops", "neg,nonzero", "--dtype", "float32", "--checks", "forward,lowered", "--resume", str(file))
    first = sweep(*options)
    assert first.returncode == 0, first.stderr
    assert "2 entries: 0 not as op_status.py says, 0 ran in part on the CPU" in first.stdout
    verdicts = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(v["op"], v["problems"]) for v in verdicts] == [("neg", {}), ("nonzero", {})]

    verdicts[0]["problems"] = {"forward": ["sample 0: wrong"], "lowered": ["aten.neg"]}
    file.write_text(json.dumps(verdicts[0]) + '\n{"op": "nonz')  # one that fails, and one that was cut short
    second = sweep(*options)
    assert second.returncode == 1
    assert "FAIL neg float32, forward: sample 0: wrong" in second.stdout
    assert "CPU  neg float32: aten.neg" in second.stdout
    assert len(second.stdout.split("entries")) == 2
    assert "2 entries: 1 not as" in second.stdout


def test_what_passes_although_the_table_says_otherwise_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    verdict = {"op": "matrix_exp", "dtype": "bfloat16", "checks": ["forward"], "problems": {}}
    file.write_text(json.dumps(verdict) + "\n")
    done = sweep("--ops", "matrix_exp", "--dtype", "bfloat16", "--resume", str(file))
    assert done.returncode == 1
    assert "PASS matrix_exp bfloat16, forward: remove it from op_status.py" in done.stdout
