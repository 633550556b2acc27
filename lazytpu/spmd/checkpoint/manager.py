"""Checkpoints of a run: a folder for each step, of which the last few are kept."""

from __future__ import annotations

import os
import re
import shutil
from concurrent.futures import Future
from pathlib import Path

from lazytpu.spmd.checkpoint import saving
from lazytpu.spmd.checkpoint.planners import State
from lazytpu.spmd.checkpoint.shared_save import SharedSave

_NAME = re.compile(r"step-(\d+)")
_LEFT = re.compile(r"\.step-(\d+)\.(removed|unfinished)")


class CheckpointManager:
    """Saves a state at steps of a run and keeps the last few.

    A checkpoint appears by the renaming of its folder: a process that is killed leaves those before it whole.

    Args:
        folder: of the run, made if need be.
        keep: how many checkpoints stay; 0 for all.
        wait: write before `save` returns; else on a thread, while the program goes on.

    Raises:
        ValueError: ``keep`` is negative.

    Example:
        >>> manager = lazytpu.spmd.checkpoint.CheckpointManager("run", keep=3)  # doctest: +SKIP
        >>> start = manager.load(state)                              # 0 where there is none  # doctest: +SKIP
        >>> for step in range(start, 10_000):                        # doctest: +SKIP
        ...     ...
        ...     if step % 500 == 499:
        ...         manager.save(step + 1, state)
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3, wait: bool = False) -> None:
        if keep < 0:
            raise ValueError(f"keep is 0 or more, not {keep}")
        self.folder, self.keep, self._wait = Path(folder), keep, wait
        self.folder.mkdir(parents=True, exist_ok=True)
        self._running: Future[None] | None = None

    def steps(self) -> list[int]:
        """Return the steps of which there is a complete checkpoint, in order."""
        found = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        return sorted(int(match[1]) for match in found if match)

    def save(self, step: int, state: State) -> None:
        """Save a state as it is now; the one before it is written first.

        Raises:
            FileExistsError: there is a checkpoint of that step.
            Exception: what went wrong with the one before.
        """
        self.wait()
        if self._wait:
            saving.save(state, self._path(step))
            self._remove_old()
        else:
            self._running = saving.async_save(state, self._path(step))

    def load(self, state: State, step: int | None = None) -> int:
        """Load a checkpoint into a state, by default the last one; return its step, 0 where there is none.

        Raises:
            FileNotFoundError: there is none of the step that was asked for.
        """
        self.wait()
        found = self.steps()
        if step is None:
            if not found:
                return 0
            step = found[-1]
        if step not in found:
            raise FileNotFoundError(f"{self.folder} has no checkpoint of step {step}, but of {found}")
        saving.load(state, self._path(step))
        return step

    def wait(self) -> None:
        """Wait until what was saved is written.

        Raises:
            Exception: what went wrong.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()
            self._remove_old()

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}"

    def _remove_old(self) -> None:
        """Remove checkpoints that are not kept, and what processes have left that were killed here."""
        if SharedSave().rank != 0:
            return
        steps = self.steps()
        for step in steps[: -self.keep] if self.keep else ():
            path = self._path(step)
            removed = path.with_name(f".{path.name}.removed")
            shutil.rmtree(removed, ignore_errors=True)  # of an earlier checkpoint of that step
            path.rename(removed)  # no longer a checkpoint, before the first of its files is gone
        for path in self.folder.glob(".step-*.*"):
            found = _LEFT.fullmatch(path.name)
            if found and int(found[1]) <= steps[-1]:
                shutil.rmtree(path, ignore_errors=True)
