"""The runner calls the device as a script's package does, however the script comes to import it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lazytpu.cli import shims

ROOT = Path(__file__).parents[2]
USES = "import torch_xla.core.xla_model as xm\nprint(xm.xla_device())\n"

# What is written out is found before the script runs.
SEEN = {
    "run_path": 'import runpy\nrunpy.run_path("uses.py")',
    "run_path below": 'import runpy, os\nrunpy.run_path(os.path.join(os.path.dirname(__file__), "uses.py"))',
    "f-string": 'import runpy, os\nrunpy.run_path(f"{os.path.dirname(os.path.abspath(__file__))}/uses.py")',
    "run_module": 'import runpy\nrunpy.run_module("uses")',
    "import_module": 'import importlib\nimportlib.import_module("uses")',
    "exec of a file": 'exec(open("uses.py").read())',
    "exec of text": 'exec("import torch_xla")',
    "by its name": '__import__("torch_xla.core.xla_model")',
    "a package": "import package.inner.train",
    "from a package": "from package.inner import train",
    "relative": "from package import another",
}
# What is put together shows when it runs.
LATE = {
    "import_module": 'import importlib\nimportlib.import_module("".join(["us", "es"]))',
    "exec": 'exec("import " + "torch_xla as x; print(x.device())")',
    "in a try": 'try:\n    x = __import__("torch_" + "xla")\n    print(x.device())\nexcept ImportError:\n    pass',
    "asked for": 'import importlib.util\nif importlib.util.find_spec("torch_" + "xla"):\n'
    '    print(__import__("torch_" + "xla").device())',
    "elsewhere": 'import os, sys, importlib\nsys.path.insert(0, os.getcwd())\nos.chdir("package")\n'
    'importlib.import_module("".join(["us", "es"]))',
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inner = tmp_path / "package" / "inner"
    inner.mkdir(parents=True)
    files = {
        "uses.py": USES,
        "package/__init__.py": "",
        "package/another.py": "from .inner import train",
        "package/inner/__init__.py": "",
        "package/inner/train.py": "from ..net import device",
        "package/net.py": "def device():\n    import torch_xla",
        "package/__main__.py": USES,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("how", SEEN)
def test_what_is_written_out_is_found_before(how: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "script.py").write_text(SEEN[how])
    assert [layer.package for layer in shims.layers_of("script.py")] == ["torch_xla"]


def test_modules_folders_and_zips_are_read_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with zipfile.ZipFile("packed.zip", "w") as file:
        file.write("uses.py", "__main__.py")
    (folder / "plain.py").write_text("import json, no_such_module\nfrom . import torch_xla\nx = 'uses.py'\n")
    wanted = [shims.LAYERS["torch_xla"]]
    assert shims.layers_of("package.inner.train", is_module=True) == wanted
    assert shims.layers_of("package", is_module=True) == wanted
    assert shims.layers_of("packed.zip") == wanted
    assert shims.layers_of("package") == wanted
    assert shims.layers_of("plain.py") == shims.layers_of("json.tool", is_module=True) == []


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    variables = {name: value for name, value in os.environ.items() if name != "LAZYTPU_DEVICE_NAME"}
    return subprocess.run(
        [sys.executable, "-m", "lazytpu", "run", "script.py"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**variables, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize("how", LATE if "LAZYTPU_TEST_SAMPLES" in os.environ else [*LATE][:2])
def test_what_shows_late_starts_the_script_again(how: str, folder: Path) -> None:
    done = run(LATE[how], folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "xla:0\n"
    assert "imports torch_xla; starting again; run it with --compat torch_xla" in done.stderr


def test_a_device_in_use_keeps_its_name(folder: Path) -> None:
    script = (
        'import torch\nx = torch.ones(2, device="tpu")\nprint(__import__("torch_" + "xla").device(), x.sum().item())'
    )
    done = run(script, folder)
    assert done.stdout == "tpu:0 2.0\n", done.stderr
    assert "script.py:3 imports torch_xla; the device stays tpu" in done.stderr


def test_a_library_that_asks_is_told_no(folder: Path) -> None:
    library = folder / "env" / "site-packages" / "library.py"
    library.parent.mkdir(parents=True)
    library.write_text(
        "import importlib.util\nfound = importlib.util.find_spec('torch_xla')\n"
        "try:\n    import torch_xla\nexcept ImportError:\n    print('none')\n"
    )
    done = run('import sys, torch\nsys.path += ["env/site-packages"]\nimport library\nprint(library.found)\n', folder)
    assert (done.stdout, done.stderr) == ("none\nNone\n", "")


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
def test_workers_that_start_anew_know_the_stand_ins(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WORKERS)
    done = subprocess.run(
        [sys.executable, "-m", "lazytpu", "run", *options, "--own", "1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2.0, 10.0] ['--own', '1']\n"
