"""Libraries, each in a few lines; a case runs in a child process, on the CPU and then on the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests.ecosystem import (
    attention,
    derivatives,
    families,
    fields,
    geometry,
    idioms,
    language,
    learners,
    loading,
    loops,
    pictures,
    science,
    solvers,
    sound,
    training,
)  # fmt: skip
from tests.ecosystem.case import Library, Missing, Outcome, judge, version

_MODULES = (
    training, loading, fields, language, attention, families, science, derivatives, geometry, pictures, sound, loops,
    learners, idioms, solvers,
)  # fmt: skip
LIBRARIES: list[Library] = [case for module in _MODULES for case in module.LIBRARIES]
LIMIT_S = 600  # seconds a case may take
_MARK = "outcome: "
_ROOT = Path(__file__).parents[2]


def run(library: Library) -> Outcome:
    """Run a case in a child process."""
    outcome = Outcome(library.key, "skipped", "")
    try:
        outcome.version = version(library.name)
        for name in library.needs:
            version(name)
    except Missing as missing:
        outcome.detail = str(missing)
        return outcome
    environment = {
        **os.environ,
        "LAZYTPU_DISK_CACHE": "0",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "tests.ecosystem", "--child", library.key]
    try:
        done = subprocess.run(
            command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        outcome.result, outcome.detail = "fails", f"more than {LIMIT_S} s"
        return outcome
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines or not lines[-1].startswith(_MARK):
        outcome.result, outcome.detail = "fails", f"exit code {done.returncode}: {' | '.join(lines[-4:])}"
        return outcome
    for name, value in json.loads(lines[-1].removeprefix(_MARK)).items():
        setattr(outcome, name, value)
    return outcome


def child(key: str) -> None:
    """Run a case in this process, and print its outcome as the last line."""
    import lazytpu

    library = next(case for case in LIBRARIES if case.key == key)
    numbers, seconds = [], []
    for device in (torch.device("cpu"), lazytpu.device()):
        torch.manual_seed(0)
        start = time.monotonic()
        numbers.append(library.run(device))
        seconds.append(round(time.monotonic() - start, 1))
    result, detail = judge(*numbers, library.rtol)
    made = {
        "result": result,
        "detail": detail,
        "seconds": tuple(seconds),
        "compiles": lazytpu.metrics.counter("compile"),
        "fallbacks": lazytpu.metrics.fallbacks(),
    }
    if os.environ.get("LAZYTPU_EXPLAIN"):
        print(lazytpu.explain())
    print(_MARK + json.dumps(made))
