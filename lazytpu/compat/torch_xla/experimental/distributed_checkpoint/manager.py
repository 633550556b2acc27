"""``CheckpointManager``: a folder for each step, of which the newest few are kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from lazytpu.compat.torch_xla import preemption
from lazytpu.runtime import world
from lazytpu.spmd import checkpoint
from lazytpu.spmd.checkpoint import saving

State = dict[str, object]


class CheckpointManager:
    """Saves a state every few steps.

    Args:
        path: the folder of all checkpoints; each is complete, or not there.
        save_interval: steps from one checkpoint to the next.
        max_to_keep: how many stay, those that were written last; 0 for all.
        max_pending_async: how many may wait to be written.
        process_group: not needed: processes find each other.
        chkpt_on_preemption: save at the first step after SIGTERM, which then does not end the process.

    Raises:
        ValueError: ``save_interval`` is less than 1, or ``max_to_keep`` negative.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        save_interval: int,
        max_to_keep: int = 0,
        max_pending_async: int = 1,
        process_group: object = None,
        chkpt_on_preemption: bool = True,
    ) -> None:
        if save_interval < 1 or max_to_keep < 0:
            raise ValueError(f"save_interval={save_interval} is at least 1, and max_to_keep={max_to_keep} at least 0")
        self.base_path, self.save_interval, self.max_to_keep = Path(path), save_interval, max_to_keep
        self._pending: list[Future[None]] = []
        self._most_pending = max(max_pending_async, 1)
        self._saves_at_end = chkpt_on_preemption
        self.base_path.mkdir(parents=True, exist_ok=True)
        if chkpt_on_preemption:
            preemption.watch()

    def should_save(self, step: int) -> bool:
        """Return whether `save` would write a checkpoint of a step."""
        return step % self.save_interval == 0 or self.reached_preemption(step)

    def save(self, step: int, state_dict: State, force: bool = False) -> bool:
        """Write a checkpoint if it is time; return whether it was."""
        if not (force or self.should_save(step)):
            return False
        self.join()
        self._save(step, partial(checkpoint.save, state_dict))
        self._remove_old()
        return True

    def save_async(self, step: int, state_dict: State, force: bool = False) -> bool:
        """Write a checkpoint on a thread, of the state as it is now, if it is time; return whether it was.

        Raises:
            Exception: what went wrong with one before.
        """
        if not (force or self.should_save(step)):
            return False
        while len(self._pending) >= self._most_pending:
            self._pending.pop(0).result()
            self._remove_old()
        self._pending.append(saving.writer.submit(self._save, step, saving.taken(state_dict)))
        return True

    def _save(self, step: int, write: Callable[[Path], None]) -> None:
        write(self._free(step))

    def restore(self, step: int, state_dict: State) -> None:
        """Load the checkpoint of a step into a state, in place.

        Raises:
            FileNotFoundError: there is none.
        """
        self.join()
        if step not in self.all_steps():
            raise FileNotFoundError(f"{self.base_path} has no checkpoint of step {step}, but of {self.all_steps()}")
        checkpoint.load(state_dict, self.base_path / str(step))

    def all_steps(self) -> list[int]:
        """Return the steps of which there is a checkpoint, in the order in which they were written."""
        found = [path for path in self.base_path.iterdir() if path.name.isdecimal()]
        return [int(path.name) for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]

    def join(self) -> None:
        """Wait until what is saved on a thread is written.

        Raises:
            Exception: what went wrong.
        """
        while self._pending:
            self._pending.pop(0).result()
        self._remove_old()

    def reached_preemption(self, step: int) -> bool:
        """Return whether the process was asked to end."""
        return self._saves_at_end and preemption.asked(step)

    def _free(self, step: int) -> Path:
        """Return where a checkpoint goes; one of the same step is replaced."""
        path = self.base_path / str(step)
        if path.exists() and world.rank() == 0:
            shutil.rmtree(path)
        return path

    def _remove_old(self) -> None:
        if self.max_to_keep and world.rank() == 0:
            for step in self.all_steps()[: -self.max_to_keep]:
                shutil.rmtree(self.base_path / str(step))
