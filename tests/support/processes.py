"""Programs that run in a process of their own."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]


def run_code(
    code: str, *arguments: object, cwd: str | Path = ROOT, loaded: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh process, as ``python -c CODE ARGUMENTS`` does, and return what it printed.

    Args:
        loaded: whether lazytpu is imported before, once for all such programs: those to which it does not matter how.
    """
    return start_code(code, *arguments, cwd=cwd, loaded=loaded, **environment).wait()


def run_script(script: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python SCRIPT ARGUMENTS`` in a fresh process that has loaded lazytpu."""
    code = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    return run_code(code, script, *arguments, loaded=True, **environment)


def run_lazytpu(*arguments: object, cwd: str | Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m lazytpu ARGUMENTS`` in a fresh process that has loaded lazytpu."""
    code = "import runpy; runpy.run_module('lazytpu', run_name='__main__', alter_sys=True)"
    return run_code(code, *arguments, cwd=cwd, loaded=True, **environment)


def run_python(*arguments: object, cwd: str | Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` itself: where it matters how the interpreter was started, for it takes seconds more."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=600, check=False)


def start_code(
    code: str, *arguments: object, cwd: str | Path = ROOT, loaded: bool = False, **environment: str
) -> Running:
    """Start a program in a fresh process; variables of the environment are added to those of this process.

    Python, torch and jax have read theirs already: use `run_python` where these are to be other ones.  So has lazytpu
    where it is ``loaded``, but for its settings.
    """
    streams = TemporaryDirectory(prefix="lazytpu-test-")
    request = {
        "code": textwrap.dedent(code),
        "arguments": [str(argument) for argument in arguments],
        "cwd": str(cwd),
        "environment": {**os.environ, "PYTHONPATH": str(ROOT), **environment},
        "streams": streams.name,
    }
    server = _server("lazytpu torch._dynamo.backends.registry" if loaded else "")
    return Running(server, server.ask(request), streams)


@dataclass
class Running:
    """A process that runs.

    Attributes:
        server: what started it.
        pid: its process id.
        streams: the folder that holds what it prints.
    """

    server: _Server
    pid: int
    streams: TemporaryDirectory[str]

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Return what it printed, once it has ended; a process that takes too long ends by an alarm."""
        status = self.server.ask({"wait": self.pid})
        out, err = (Path(self.streams.name, name).read_text() for name in ("stdout", "stderr"))
        self.streams.cleanup()
        return subprocess.CompletedProcess([], status, out, err)


class _Server:
    """The process of `fork_server.py`."""

    def __init__(self, loaded: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("fork_server.py")), *loaded.split()]
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)  # or each program would compile the package's source
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )
        atexit.register(self._end)

    def _end(self) -> None:
        with self._process:  # closes its streams and waits
            self._process.kill()

    def ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


@cache
def _server(loaded: str) -> _Server:
    return _Server(loaded)
