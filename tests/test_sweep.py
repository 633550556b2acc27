"""The sweep over the operator database: it goes on where its file ends, and judges by the table."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import sweep

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the sweep in this process, its operators in a child; return its exit status and what it printed."""

    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["sweep.py", "--samples", "1", *map(str, arguments)])
        return sweep.main(), capsys.readouterr().out

    return call


def test_it_goes_on_where_it_stopped_and_judges_by_the_table(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    failed = {"op": "neg", "dtype": "float32", "checks": ["forward", "lowered"]}
    failed["problems"] = {"forward": ["sample 0: wrong"], "lowered": ["aten.neg"]}
    file.write_text(json.dumps(failed) + '\n{"op": "nonz')  # one that fails, and one that was cut short
    options = ("--ops", "neg,nonzero", "--dtype", "float32", "--checks", "forward,lowered", "--resume", file)
    status, printed = run(*options)
    assert status == 1
    assert "FAIL neg float32, forward: sample 0: wrong" in printed
    assert "CPU  neg float32: aten.neg" in printed
    assert "2 entries: 1 not as op_status.py says, 1 ran in part on the CPU" in printed
    verdicts = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(v["op"], v["problems"]) for v in verdicts] == [("neg", failed["problems"]), ("nonzero", {})]


def test_what_passes_although_the_table_says_otherwise_is_reported(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    verdict = {"op": "matrix_exp", "dtype": "bfloat16", "checks": ["forward"], "problems": {}}
    file.write_text(json.dumps(verdict) + "\n")
    status, printed = run("--ops", "matrix_exp", "--dtype", "bfloat16", "--resume", file)
    assert status == 1
    assert "PASS matrix_exp bfloat16, forward: remove it from op_status.py" in printed
