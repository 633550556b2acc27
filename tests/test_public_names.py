"""The names of `lazytpu`: `__all__`, the API page and what the docs use agree, and nothing else is visible."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import lazytpu
from tests.support.processes import run_code

DOCS = Path(__file__).parents[1] / "docs"
API = (DOCS / "reference" / "api.md").read_text()
PAGES = sorted([DOCS.parent / "README.md", *DOCS.rglob("*.md")])
PAGES.remove(DOCS / "explanation" / "architecture.md")  # for those who change the package
SUBMODULES = {module.name for module in pkgutil.iter_modules(lazytpu.__path__)}
PUBLIC = {*lazytpu.__all__, "__version__", "errors", "compat"}  # errors: on the API page; compat: imported by itself
_DOCUMENTED = re.compile(r"\.\. auto(?:function|class|module):: ([\w.]+)")
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
_USED = re.compile(r"\blazytpu\.(\w+)|from lazytpu import (\w+)")


def documented() -> list[str]:
    """Return the full names that the API page documents."""
    return [name if name.startswith("lazytpu.") else f"lazytpu.{name}" for name in _DOCUMENTED.findall(API)]


def test_all_names_exist():
    assert sorted(lazytpu.__all__) == lazytpu.__all__
    assert [name for name in lazytpu.__all__ if not hasattr(lazytpu, name)] == []


def test_only_public_names_and_submodules_are_visible():
    visible = {name for name in vars(lazytpu) if not name.startswith("_")}
    assert sorted(visible - PUBLIC - SUBMODULES) == []


@pytest.mark.parametrize("name", documented())
def test_documented_name_is_there_after_the_import(name):
    found = lazytpu
    for part in name.split(".")[1:]:
        found = getattr(found, part)


def test_api_page_has_every_public_name():
    missing = [name for name in lazytpu.__all__ if not re.search(rf"lazytpu\.{name}\b|:: {name}\n", API)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_page_uses_public_names_only(page):
    used = {a or b for block in _PYTHON.findall(page.read_text()) for a, b in _USED.findall(block)}
    assert sorted(used - PUBLIC) == []


@pytest.mark.parametrize("name", ["cache", "metrics", "profiler", "quantization"])
def test_public_module_can_be_imported_by_its_name(name):
    assert importlib.import_module(f"lazytpu.{name}") is getattr(lazytpu, name)


def test_quantization_is_imported_when_asked_for():
    code = "import sys, lazytpu; a = 'lazytpu.quantization' in sys.modules; lazytpu.quantization.convert; print(a)"
    done = run_code(code)
    assert done.stdout == "False\n", done.stderr


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="module 'lazytpu' has no attribute 'events'"):
        _ = lazytpu.events
