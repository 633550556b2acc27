"""The sweep of libraries and scripts: verdicts, the page, a case that needs nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.ecosystem import libraries, page, scripts, training
from tests.ecosystem.__main__ import CASES
from tests.ecosystem.case import Library, Missing, Outcome, Script, judge, version


def test_numbers_are_judged() -> None:
    assert judge({"loss": 100.0}, {"loss": 100.9}, 0.01)[0] == "same"
    assert judge({"loss": 100.0}, {"loss": 101.1}, 0.01)[0] == "differs"
    assert judge({"loss": 0.5}, {"loss": math.nan}, 1.0)[0] == "differs"
    assert judge({"loss": 0.5}, {"lost": 0.5}, 1.0)[0] == "differs"


def test_a_case_runs_on_both_devices(device: torch.device) -> None:
    case = next(case for case in libraries.LIBRARIES if case.run is training.shapes_of_torch)
    assert judge(case.run(torch.device("cpu")), case.run(device), case.rtol)[0] == "same"


def test_what_is_missing_is_skipped_with_the_reason(tmp_path: Path) -> None:
    absent = Library("no-such-library", "nothing", training.shapes_of_torch)
    assert libraries.run(absent) == Outcome(absent.key, "skipped", "no-such-library is not installed")
    with pytest.raises(Missing, match="not installed"):
        version("no-such-library")
    outcome = scripts.run(scripts.SCRIPTS[0], None, tmp_path)
    assert (outcome.result, outcome.detail) == ("skipped", "no checkout of pytorch/examples (--scripts)")


def test_the_result_of_a_script_is_its_last() -> None:
    script = Script("a/b", "", ("x.py",), "", r"loss (\S+) after (\w+)")
    assert scripts.numbers_of(script, "loss 3 after 1\nloss 2.5 after all") == {"number 1": 2.5, "number 2": 1.0}
    with pytest.raises(scripts.Failed, match="prints nothing like"):
        scripts.numbers_of(script, "lost")


def test_the_page_has_each_case_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = page.PAGE.read_text()
    for case in CASES.values():
        assert f"| {case.tried} |" in text, f"{case.key}: python -m tests.ecosystem --only {case.key} --out F --write"
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    page.PAGE.write_text("<!-- scripts: written by the sweep -->\nold\n<!-- end -->\nafter\n")
    case = scripts.SCRIPTS[0]
    page.write([(case, Outcome(case.key, "fails", "a | b", "1.0"))])
    written = page.PAGE.read_text()
    assert "old" not in written and written.endswith("<!-- end -->\nafter\n") and "fails: a \\| b" in written
