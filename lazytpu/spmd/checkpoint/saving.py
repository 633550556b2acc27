"""Save and load the state of a program, on any mesh."""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils._pytree import tree_map

from lazytpu.spmd.checkpoint.planners import LoadPlanner, PreparedSavePlanner, SavePlanner, State, is_of_device
from lazytpu.spmd.checkpoint.shared_save import SharedSave
from lazytpu.tracing.record import is_device_tensor

_T = TypeVar("_T")
writer = ThreadPoolExecutor(1, "lazytpu-checkpoint")
"""The thread that writes what `async_save` saves."""


def save(state: State, folder: str | os.PathLike[str]) -> None:
    """Save a state to a folder, which is complete or not there at all, whenever the process ends.

    Every process of a program calls it, with a folder that all of them see.

    Args:
        state: any pytree of dictionaries and lists of tensors and other values, such as state dicts.
        folder: that is made.

    Raises:
        FileExistsError: it is there already.
        LazyTPUError: another process could not save.
    """
    _write(_plain(state), _free(folder), SavePlanner(), SharedSave())


def async_save(state: State, folder: str | os.PathLike[str]) -> Future[None]:
    """Save a state as it is now, on a thread, while the program goes on.

    Tensors of the device are not copied first: what a later step writes goes to new memory, so until a checkpoint is
    written it takes the memory of the tensors that were overwritten meanwhile.

    Returns:
        A future: ``result()`` waits, and raises what went wrong.

    Raises:
        FileExistsError: the folder is there already.
    """
    return writer.submit(taken(state), _free(folder))


def taken(state: State) -> Callable[[str | os.PathLike[str]], None]:
    """Take a state as it is now; return what writes it to a folder, once."""
    planner, shared = PreparedSavePlanner(), SharedSave()
    planner.prepare(_copied(_plain(state)))
    return lambda folder: _write({}, _free(folder), planner, shared)


def _plain(state: State) -> State:
    """Return the state with the contents of what has a ``state_dict`` in its place."""
    return {name: x.state_dict() if isinstance(x, Stateful) else x for name, x in state.items()}


def _copied(state: _T) -> _T:
    def copied(x: object) -> object:
        if isinstance(x, torch.Tensor):
            return x if is_of_device(x) else x.detach().clone()
        return copy.deepcopy(x)

    found: _T = tree_map(copied, state)
    return found


def load(state: State, folder: str | os.PathLike[str], *, partial: bool = False) -> State:
    """Load a checkpoint into a state: tensors in place, as they lie, other values in their dictionaries.

    Args:
        state: as what was saved, with tensors of the same sizes; they may lie on another mesh, on one device, or on the
            CPU.
        folder: from `save`, or any of ``torch.distributed.checkpoint``.
        partial: leave what the checkpoint has not as it is.

    Returns:
        The state itself.

    Raises:
        RuntimeError: the checkpoint lacks a name of the state.
        ValueError: sizes differ.
    """
    with _without_wrapping():
        planner = LoadPlanner(allow_partial_load=partial)
        state_dict_loader.load(state, checkpoint_id=folder, planner=planner, no_dist=True)  # each what it has
    return state


def gather(state: _T) -> _T:
    """Return a state whose tensors are whole and on the CPU: ``torch.save`` of it loads without lazytpu."""
    found: _T = tree_map(lambda x: x.detach().cpu() if is_device_tensor(x) else x, state)
    return found


def _free(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder)
    if path.exists():
        raise FileExistsError(f"there is a checkpoint, or something else, at {path}")
    return path


def _write(state: State, path: Path, planner: SavePlanner, shared: SharedSave) -> None:
    """Write a checkpoint: what each process has, then what all of it is, then its name."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    first = shared.rank == 0
    # Parts come as CPU tensors.  What copies ahead would wait for the device, and so cut the step that is recorded.
    files = FileSystemWriter(unfinished, sync_files=True, per_thread_copy_ahead=0)

    def begin() -> None:
        if first:
            shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed

    def plan() -> SavePlan:
        planner.set_up_planner(state, files.storage_meta(), is_coordinator=first)
        files.set_up_storage_writer(first, rank=shared.rank, use_collectives=True)
        return files.prepare_local_plan(planner.create_local_plan())

    def write(plans: list[SavePlan]) -> list[WriteResult]:
        own = planner.finish_plan(files.prepare_global_plan(plans)[shared.rank])
        return files.write_data(own, planner).wait()

    def finish(metadata: Metadata, written: list[list[WriteResult]]) -> None:
        if first:
            files.finish(metadata, written)
            _sync(unfinished)
            unfinished.rename(path)
            _sync(path.parent)

    try:
        with _without_wrapping():
            shared.share(begin)
            plans, metadata = planner.create_global_plan(shared.share(plan))
            written = shared.share(lambda: write(plans))
            shared.share(lambda: finish(metadata, written))
    except BaseException:
        if first:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _sync(folder: Path) -> None:
    """Have a name in a folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _without_wrapping() -> Iterator[None]:
    """Raise what went wrong, which torch puts into an exception of its own, and warn of no missing process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.filterwarnings("ignore", "Setting `no_dist`")
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        try:
            yield
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None
