"""`run` finds the shims that a script needs, however it imports the package, and names the device to match."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lazytpu.cli import shims

ROOT = Path(__file__).parents[2]
TORCH_XLA = shims.SHIMS["torch_xla"]
USES = "import torch_xla.core.xla_model as xm\nprint(xm.xla_device())\n"

# Import statements are found before the script runs.
STATEMENTS = {
    "import": "import torch, torch_xla.core.xla_model as xm",
    "in a function": "def f():\n    from torch_xla import runtime",
    "module beside it": "import json, no_such_module, uses",
    "package": "import package.inner.train",
    "from a package": "from package.inner import train",
    "relative": "from package import another",
    "folder of the name of an import": "import data\nimport torch_xla",
}
OTHERS = ["import torch, torch_xlarge\n'import torch_xla'\n", "not python (", "from . import torch_xla"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    files = {
        "uses.py": USES,
        "computed.py": "exec('import ' + 'torch_xla as x; print(x.device())')\n",
        "package/__init__.py": "",
        "package/another.py": "from .inner import train",
        "package/inner/__init__.py": "",
        "package/inner/train.py": "from ..net import device",
        "package/net.py": "def device():\n    import torch_xla",
        "package/__main__.py": USES,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", STATEMENTS.values(), ids=STATEMENTS)
def test_import_statements_are_found_before_the_script_runs(text: str, folder: Path) -> None:
    (folder / "script.py").write_text(text)
    assert shims.needed_by("script.py") == [TORCH_XLA]


@pytest.mark.parametrize("text", OTHERS)
def test_other_scripts_need_no_shim(text: str, folder: Path) -> None:
    (folder / "script.py").write_text(text)
    assert shims.needed_by("script.py") == []


def test_modules_and_folders_are_read_too(folder: Path) -> None:
    assert shims.needed_by("package.inner.train", is_module=True) == [TORCH_XLA]
    assert shims.needed_by("package", is_module=True) == shims.needed_by("package") == [TORCH_XLA]
    assert shims.needed_by("json.tool", is_module=True) == []


def test_the_process_starts_again_under_the_name_that_a_shim_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[object, ...]] = []
    monkeypatch.setattr(shims.os, "execve", lambda *a: started.append(a))
    monkeypatch.setattr(shims, "_environment", {"HOME": "/"})  # as the process was started
    shims.rename_device([])
    assert started == []
    shims.rename_device([shims.SHIMS["torch_mlu"]])
    assert started == [
        (sys.executable, [sys.executable, *sys.orig_argv[1:]], {"HOME": "/", "LAZYTPU_DEVICE_NAME": "mlu"})
    ]
    monkeypatch.setitem(shims._environment, "LAZYTPU_DEVICE_NAME", "tpu")  # the user's choice stays
    shims.rename_device([shims.SHIMS["torch_mlu"]])
    assert len(started) == 1


def run(script: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    variables = {name: value for name, value in os.environ.items() if name != "LAZYTPU_DEVICE_NAME"}
    return subprocess.run(
        [sys.executable, "-m", "lazytpu", "run", *(options or ("script.py",))],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**variables, "PYTHONPATH": str(ROOT)},
    )


def test_an_import_by_a_computed_name_starts_the_script_again(folder: Path) -> None:
    done = run('import importlib\nimportlib.import_module("".join(["comp", "uted"]))', folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "xla:0\n"
    assert "imports torch_xla; starting the script again; use --compat torch_xla" in done.stderr


LIBRARY = """
import importlib.util
found = importlib.util.find_spec('torch_xla')
try:
    import torch_xla
except ImportError:
    print('not installed')
"""
SCRIPT = """
import sys, torch
sys.path += ["env/site-packages"]
import library
print(library.found)
x = torch.ones(2, device="tpu")
print(__import__("torch_" + "xla").device(), x.sum().item())
"""


def test_a_library_finds_no_shim_and_a_device_in_use_keeps_its_name(folder: Path) -> None:
    library = folder / "env" / "site-packages" / "library.py"
    library.parent.mkdir(parents=True)
    library.write_text(LIBRARY)
    done = run(SCRIPT, folder)
    assert done.stdout == "not installed\nNone\ntpu:0 2.0\n", done.stderr
    assert "script.py:7 imports torch_xla; the device is in use and stays tpu" in done.stderr


WORKERS = """
import sys
import torch, torch_xla
import torch_xla.core.xla_model as xm
from torch.utils.data import DataLoader

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return torch.full((2,), float(i))

if __name__ == "__main__":
    loader = DataLoader(Rows(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    print([x.to(torch_xla.device()).sum().item() for x in loader], sys.argv[1:])
"""


@pytest.mark.parametrize("options", [["script.py"], ["-m", "script"]], ids=["file", "module"])
def test_spawned_workers_know_the_shims(options: list[str], folder: Path) -> None:
    done = run(WORKERS, folder, *options, "--own", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2.0, 10.0] ['--own', '1']\n"
