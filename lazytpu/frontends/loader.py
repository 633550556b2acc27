"""``DeviceLoader``: batches are on the device before they are asked for, and each step ends where its batch ends."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from lazytpu.diagnosis import events
from lazytpu.dtypes import host_array
from lazytpu.frontends.jax.arrays import from_jax
from lazytpu.ir.sharding import Entry, Mesh, sharding
from lazytpu.location.site import line_here
from lazytpu.observe import metrics
from lazytpu.runtime import meshes
from lazytpu.tensors.tensor import LazyTensor
from lazytpu.tracing.sharding import mark
from lazytpu.tracing.step import mark_step

_POLL_S = 0.1  # how often a waiting thread looks whether the other side is still there
_running: dict[threading.Thread, threading.Event] = {}  # threads, and what tells each to stop


@dataclass(frozen=True, slots=True)
class _Failure:
    """What the loader raised."""

    error: BaseException


_END, _DROPPED = object(), object()


class DeviceLoader:
    """Iterates over a loader; a thread moves its batches to the device while the model computes.

    `lazytpu.mark_step` is called whenever a batch is done with (the next one is asked for, or there is none), so a
    training loop needs no call of its own.  After a ``break`` the step is left open.

    Args:
        loader: any iterable of batches, such as a ``torch.utils.data.DataLoader``.  A batch is a tensor or a pytree
            (tuples, lists, dictionaries, ...).  What has a method ``to`` is moved, the rest stays as it is.
        device: where to; by default the lazy device.
        prefetch: how many batches may wait on the device.
        progress: shows a progress bar (needs the package ``rich``).
        mesh: a `lazytpu.spmd.Mesh` that the tensors of a batch are put on.
        spec: how each lies there, as in `lazytpu.spmd.mark_sharding`; of a tensor with fewer dimensions the first
            entries count.  By default the first dimension is split over the first axis.  Batches whose sizes do not
            divide, such as the last one, are whole all the same.
        parts: of several processes, each one's loader gives its own part of each batch, as with a
            ``DistributedSampler``; by default each gives the whole batch, of which a process keeps its part.  Batches
            whose parts do not divide by the devices of their process are left out, with a warning and the counter
            ``batch_dropped``.

    Raises:
        ValueError: ``prefetch`` is less than 1, ``parts`` are given without a mesh, or ``spec`` has an axis that the
            mesh has not.
        ModuleNotFoundError: ``progress`` is asked for and ``rich`` is not installed.

    Example:
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=32, num_workers=2)
        >>> for images, labels in lazytpu.DeviceLoader(loader):
        ...     loss = torch.nn.functional.cross_entropy(model(images), labels)
        ...     loss.backward(); optimizer.step(); optimizer.zero_grad()
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str | None = None,
        prefetch: int = 2,
        progress: bool = False,
        *,
        mesh: Mesh | None = None,
        spec: Sequence[Entry] | None = None,
        parts: bool = False,
    ) -> None:
        if prefetch < 1:
            raise ValueError(f"prefetch must be at least 1, not {prefetch}")
        self.mesh = mesh
        self.spec = () if mesh is None else (mesh.axis_names[0],) if spec is None else tuple(spec)
        if mesh is not None:
            sharding(mesh, self.spec, (1,) * len(self.spec))  # raises
        if parts and mesh is None:
            raise ValueError("parts of a batch belong to a mesh: DeviceLoader(loader, mesh=mesh, parts=True)")
        self.parts = parts
        self.loader, self.prefetch, self.progress = loader, prefetch, progress
        self.device = torch.device(LazyTensor.device_type if device is None else device)
        if progress:
            _require_rich()

    def __len__(self) -> int:
        if not isinstance(self.loader, Sized):
            raise TypeError(f"the loader, a {type(self.loader).__name__}, has no length")
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        _join_stopped()  # a loader with persistent workers has one iterator, which two threads must not share
        batches = _Batches(iter(self.loader), self._to_device, self.prefetch)
        return _tracked(batches, self._total()) if self.progress else batches

    def _to_device(self, batch: Any) -> Any:
        if self.mesh is not None and self.parts and meshes.over_processes(self.mesh):
            return self._put_together(batch, self.mesh)
        found = to_device(batch, self.device)
        if self.mesh is not None:
            for x in tree_leaves(found):
                if isinstance(x, LazyTensor):
                    mark(x, self.mesh, self.spec[: x.dim()])
        return found

    def _put_together(self, batch: Any, mesh: Mesh) -> Any:
        """Return a batch of which each process has a part; `_DROPPED` where they do not divide."""

        def whole(x: object) -> object:
            if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
                return to_device(x, self.device)
            return from_jax(meshes.from_parts(host_array(x), sharding(mesh, self.spec[: x.dim()], x.shape)))

        try:
            return tree_map(whole, batch)
        except meshes.DoesNotDivide as error:
            metrics.count("batch_dropped")
            warnings.warn(f"DeviceLoader skips a batch: {error}", stacklevel=2)
            return _DROPPED

    def _total(self) -> int | None:
        try:
            return len(self)
        except TypeError:  # also what a DataLoader over an IterableDataset raises
            return None


class _Batches(Iterator[object]):
    """One pass over the loader.  Its thread stops when the pass ends, fails or is forgotten."""

    def __init__(self, source: Iterator[Any], move: Callable[[Any], object], prefetch: int) -> None:
        self._queue: queue.Queue[object] = queue.Queue(prefetch)
        self._stop = threading.Event()
        # The thread holds no reference to this object, so forgetting the object stops the thread.
        self._thread = threading.Thread(
            target=_produce,
            args=(source, move, self._queue, self._stop),
            name="lazytpu.DeviceLoader",
            daemon=True,
        )
        weakref.finalize(self, self._stop.set)
        self._started = False

    def __next__(self) -> Any:
        if self._started:
            mark_step()
        if self._stop.is_set():
            raise StopIteration
        if not self._started:
            # Not before the first batch is waited for: the random numbers that the loader draws at its start
            # come in their turn.
            self._started = True
            _running[self._thread] = self._stop
            self._thread.start()
            item = self._take()
        else:
            began = time.perf_counter()
            item = self._take()
            events.batches.setdefault(line_here(), events.Tally()).add(time.perf_counter() - began)
        if isinstance(item, _Failure):
            self.close()
            raise item.error
        if item is _END:
            self.close()
            raise StopIteration
        return item

    def _take(self) -> Any:
        while True:
            try:
                return self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                if not self._thread.is_alive() and self._queue.empty():
                    self.close()
                    raise RuntimeError("the thread of a DeviceLoader is gone; was the process forked?") from None

    def close(self) -> None:
        """Stop the thread; batches that wait are dropped."""
        self._stop.set()


def _produce(
    source: Iterator[object], move: Callable[[object], object], into: queue.Queue[object], stop: threading.Event
) -> None:
    """Take batches from the loader, start their transfer and put them in line: what the thread does."""
    try:
        for batch in source:
            found = move(batch)
            if found is not _DROPPED and not _put(into, found, stop):
                return
        _put(into, _END, stop)
    except BaseException as error:  # passed on: it belongs to whoever iterates
        _put(into, _Failure(error), stop)
    finally:
        _running.pop(threading.current_thread(), None)


def _put(into: queue.Queue[object], item: object, stop: threading.Event) -> bool:
    """Wait for a place in line; False when nobody wants the item any more."""
    while not stop.is_set():
        try:
            into.put(item, timeout=_POLL_S)
            return True
        except queue.Full:
            pass
    return False


def to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with everything in the pytree that can be moved on ``device``."""

    def move(x: object) -> Any:
        if isinstance(x, torch.Tensor):
            return x.to(device, non_blocking=True)
        return x.to(device) if hasattr(x, "to") else x  # PackedSequence, BatchEncoding and the like

    return tree_map(move, batch, is_leaf=lambda x: hasattr(x, "to"))


def _join_stopped() -> None:
    """Wait for threads that were told to stop."""
    for thread, stop in list(_running.items()):
        if stop.is_set():
            thread.join()


@atexit.register
def _stop_all() -> None:
    """End the threads in order: Python would end them in the middle of a transfer, which XLA does not survive."""
    for stop in list(_running.values()):
        stop.set()
    for thread in list(_running):
        thread.join(timeout=5.0)


def _require_rich() -> None:
    try:
        import rich.progress  # noqa: F401 # an optional dependency
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("DeviceLoader(progress=True) needs the package rich: pip install rich") from missing


def _tracked(batches: _Batches, total: int | None) -> Iterator[Any]:
    from rich.progress import track  # an optional dependency

    try:
        yield from track(batches, "batches", total)
    finally:
        batches.close()
