"""``lazytpu demo``: a first run that trains, and leaves a script, its graphs and a report."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.processes import run_lazytpu


def test_the_demo_trains_and_reports(tmp_path: Path) -> None:
    done = run_lazytpu("demo", "--seconds", "0.1", "--out", "seen", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert losses and losses[-1] < 2.4
    assert re.search(r"^ *\d+ steps +s +share", done.stdout, re.M), done.stdout
    shares = [int(share) for share in re.findall(r" (\d+)% *$", done.stdout, re.M)]
    assert len(shares) == 4 and sum(shares) in range(90, 111)  # of times that overlap a little
    assert f"the report: {Path('seen/report.html')}\n" in done.stdout
    page = (tmp_path / "seen/report.html").read_text()
    assert "lazytpu demo" in page and len(page) > 100_000
    assert "lazytpu.mark_step()" in (tmp_path / "seen/train.py").read_text()
    assert (tmp_path / "seen/graphs/manifest.json").exists()


def test_the_demo_overwrites_nothing_but_its_own(tmp_path: Path) -> None:
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs/mine.txt").write_text("kept")
    done = run_lazytpu("demo", "--out", ".", cwd=tmp_path)
    assert done.returncode == 2 and "is no dump of lazytpu's" in done.stderr
    assert (tmp_path / "graphs/mine.txt").exists()
