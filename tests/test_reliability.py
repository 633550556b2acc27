"""The page of what the sweeps found is written from what they recorded."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_says_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("reliability", DOCS / "reliability.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    monkeypatch.setattr(made, "PAGE", tmp_path / "page.md")
    made.main()
    text = (tmp_path / "page.md").read_text()
    assert text == (DOCS / "explanation/reliability.md").read_text(), "python docs/reliability.py writes it"
    for fault in json.loads((DOCS / "_data/reliability.json").read_text()).get("faults", {}).values():
        assert f"| {fault['title']} | {fault['tried']:,} |" in text
