"""What GitHub, pip and citations read agrees with the package: versions, names, files."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import lazytpu
from lazytpu.versions import SUPPORTED

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(path: Path) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(path.read_text())


def test_every_yaml_file_parses() -> None:
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff", ROOT / ".pre-commit-config.yaml"]
    assert len(files) >= 9
    for file in files:
        assert isinstance(read(file), dict), file


def test_the_matrix_begins_where_the_supported_versions_begin() -> None:
    matrix = read(ROOT / ".github/workflows/tests.yml")["jobs"]["versions"]["strategy"]["matrix"]
    for package, (first, _) in SUPPORTED.items():
        assert matrix[package][0] == ".".join(map(str, first)) and matrix[package][-1] == "", package
        assert f"{package}>={matrix[package][0]}" in PROJECT["dependencies"]
    assert PROJECT["requires-python"] == f">={matrix['python'][0]}"
    named = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)}
    assert named == set(matrix["python"])


def test_the_steps_of_jobs_name_what_is_there() -> None:
    for file in (ROOT / ".github/workflows").glob("*.yml"):
        for name, job in read(file)["jobs"].items():
            assert job["runs-on"] == "ubuntu-latest" and job["steps"], name
            assert all(("uses" in step) != ("run" in step) for step in job["steps"]), name


def test_the_console_script_and_entry_points_lead_somewhere() -> None:
    targets = [*PROJECT["scripts"].values()]
    targets += [target for group in PROJECT["entry-points"].values() for target in group.values()]
    assert PROJECT["scripts"].keys() == {"lazytpu"}
    for target in targets:
        module, _, name = target.partition(":")
        found = importlib.import_module(module)
        assert not name or callable(getattr(found, name)), target


def test_the_citation_has_the_version() -> None:
    assert str(read(ROOT / "CITATION.cff")["version"]) == lazytpu.__version__
