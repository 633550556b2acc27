"""What the sweep tries, and what came of it."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import torch

Numbers = Mapping[str, float]
NUMBER = r"(-?[\d.]+(?:[eE][-+]?\d+)?)"  # in what a script prints


class Missing(Exception):
    """What a case needs is not installed, or not on disk; the message says what."""


@dataclass(frozen=True, slots=True)
class Library:
    """A few lines of a library, run on the CPU and on the device in one process.

    Attributes:
        name: its distribution, as pip knows it.
        tried: what the lines do, for a reader of the page.
        run: takes a device, returns numbers to compare by name.
        rtol: how far the device's numbers may be from the CPU's, relative to the larger of the number and one.
        needs: further distributions.
    """

    name: str
    tried: str
    run: Callable[[torch.device], Numbers]
    rtol: float = 1e-4
    needs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.name}.{self.run.__name__}"


@dataclass(frozen=True, slots=True)
class Script:
    """A public script, run unmodified by ``python`` and by ``python -m lazytpu run``.

    Attributes:
        repository: as GitHub names it; the folder beside the others has its last part.
        folder: where in the repository the script is started.
        arguments: the script and its arguments, the same for both.
        tried: what these do, for a reader of the page.
        result: a regular expression; its groups in the last match in the output are the numbers to compare.
        rtol: how far these may differ; large where dropout or sampling draws other numbers on the device.
        on_cpu: arguments for the CPU alone.
        on_device: arguments for the device alone.
        options: options of ``python -m lazytpu run``.
        before: commands of Python that lay out what the script reads, the same for both.
        data: what `material` lays out first.
        needs: distributions.
    """

    repository: str
    folder: str
    arguments: tuple[str, ...]
    tried: str
    result: str
    rtol: float = 1e-3
    on_cpu: tuple[str, ...] = ()
    on_device: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    before: tuple[tuple[str, ...], ...] = ()
    data: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    label: str = ""

    @property
    def key(self) -> str:
        return ".".join(filter(None, (self.repository.rpartition("/")[2], self.folder, self.label))).replace("/", ".")


@dataclass(slots=True)
class Outcome:
    """What came of a case; a line of the sweep's file.

    Attributes:
        key: of the case.
        result: "same", "differs", "fails" or "skipped".
        detail: the numbers, the end of the error, or what is missing.
        version: of the library, or the commit of the repository.
        seconds: of the run on the CPU and of that on the device, each with all that starting it takes.
        compiles: programs that the device's run compiled.
        fallbacks: ops that ran on the CPU in the device's run, with their counts.
    """

    key: str
    result: str
    detail: str
    version: str = ""
    seconds: tuple[float, float] | None = None
    compiles: int | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)

    def json(self) -> dict[str, object]:
        return asdict(self)


def version(name: str) -> str:
    """Return the version of an installed distribution.

    Raises:
        Missing: it is not installed.
    """
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise Missing(f"{name} is not installed") from None


def judge(cpu: Numbers, device: Numbers, rtol: float) -> tuple[str, str]:
    """Return the verdict on a case's numbers, and them as text."""
    if cpu.keys() != device.keys():
        return "differs", f"{sorted(cpu)} on the CPU, {sorted(device)} on the device"
    close = all(math.isfinite(device[n]) and abs(cpu[n] - device[n]) <= rtol * max(abs(cpu[n]), 1.0) for n in cpu)
    shown = ", ".join(f"{name} {cpu[name]:.5g} / {device[name]:.5g}" for name in cpu)
    return ("same" if close else "differs"), shown
