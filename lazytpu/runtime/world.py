"""Connect the processes of a world, once, before jax's first use.

A process that no launcher started never gets here: `awaited` is empty, and that is all it looks at.  In one that a
launcher started beside others, the first use of jax (a transfer to the device, a cut, a mesh) or
``torch.distributed.init_process_group``, whichever comes first, waits for the other processes to come to theirs.  It
says so if that takes long, and raises in the end (`config.collective_timeout`).  Processes that only happen to be
started together are kept apart by ``LAZYTPU_WORLD=0``.

All meet in a ``TCPStore``: torchrun's own, or one that rank 0 keeps where the environment says.  Through it rank 0
tells where its coordinator is (`coordinator`), a process that runs jax's service and hears when a rank dies.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from glob import glob
from pathlib import Path
from types import ModuleType
from typing import Protocol

import jax

from lazytpu.config import config
from lazytpu.errors import WorldError
from lazytpu.observe import logs
from lazytpu.runtime import coordinator, launchers
from lazytpu.runtime.launchers import Place
from lazytpu.runtime.ranks import Ranks, named

awaited: list[Place] = []
"""The place of this process in a world that is not connected yet; empty in a process that is alone or connected."""

_NOTICE_S = 10.0  # after which a process says that it waits, and again after twice as long
_POLL_S = 0.05
_NEVER_S = 10**6


# By kind: the variable that chooses some, files of all, the package that jax needs for them, what jax may call them.
_ACCELERATORS = {
    "GPU": ("CUDA_VISIBLE_DEVICES", r"/dev/nvidia(\d+)", "jax_plugins", ("cuda", "gpu")),
    "TPU chip": ("TPU_VISIBLE_CHIPS", r"/dev/(?:accel|vfio/)(\d+)", "libtpu", ("tpu",)),
}


class Store(Protocol):
    """What is used of a ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""

    def get(self, key: str) -> bytes:
        """Return a value; wait until it is set."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return it."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all values are set."""


_place: Place | None = None
_afterwards: list[Callable[[], None]] = []
_kept: list[subprocess.Popen[bytes]] = []  # the coordinator that this process started
_ranks: Ranks | None = None


def rank() -> int:
    """Return the rank of this process; 0 in a process that is alone."""
    place = _known()
    return place.rank if place else 0


def size() -> int:
    """Return the number of processes of the world, connected or not; 1 for a process that is alone."""
    place = _known()
    return place.size if place else 1


def local_rank() -> int:
    """Return the rank of this process among those of its host."""
    place = _known()
    return place.local_rank if place else 0


def local_size() -> int:
    """Return the number of processes of the world on this host."""
    place = _known()
    return place.local_size if place else 1


def _known() -> Place | None:
    return _place or (awaited[0] if awaited else None)


def is_connected() -> bool:
    """Return whether this process is connected with others."""
    return _ranks is not None


def ranks() -> Ranks:
    """Return the other ranks, of a connected process."""
    assert _ranks is not None
    return _ranks


def when_connected(call: Callable[[], None]) -> None:
    """Have a function called when this process has been connected."""
    _afterwards.append(call)


def connect(store: Store | None = None, rank: int | None = None, size: int | None = None) -> None:
    """Connect this process with the others of its world; does nothing if it is connected, or alone.

    Args:
        store, rank, size: as ``init_process_group`` has them; by default those of the launcher.

    Raises:
        WorldError: jax was used before, or some ranks did not come in time.
    """
    global _place, _ranks
    place = _place or (awaited[0] if awaited else launchers.found() if size is not None else None)
    if size is not None and rank is not None:
        place = _agreeing(place, rank, size)
    if _ranks is not None or place is None or place.size == 1:
        return
    started = time.monotonic()
    _refuse_if_started(place)
    awaited[:] = [place]
    meeting = store if store is not None else _store(place)
    meeting = _torch().PrefixStore(f"lazytpu/world/{place.attempt}", meeting)
    host, jax_port, port = _meet(place, meeting)
    _initialize(place, f"{host}:{jax_port}")
    found = Ranks(place.rank, place.size, (host, port))
    awaited.clear()
    os.environ["LAZYTPU_WORLD"] = "0"  # what this process starts has no place of its own
    _place, _ranks = place, found
    logs.name_rank(place.rank)
    for call in _afterwards:
        call()
    seconds = time.monotonic() - started
    logs.note(
        "world", "rank %d of %d, started by %s, connected in %.1f s", place.rank, place.size, place.launcher, seconds
    )


def _agreeing(place: Place | None, rank: int, size: int) -> Place:
    """Return the place in the world of ``init_process_group``."""
    if place is None:
        return Place("init_process_group", rank, size, rank, 1, "", 0)
    if (place.rank, place.size) == (rank, size):
        return place
    if _ranks is not None:
        raise WorldError(
            f"this process is rank {place.rank} of {place.size}, not rank {rank} of {size}",
            fix="call init_process_group with the launcher's rank and world size, or before the device is used",
        )
    return replace(place, rank=rank, size=size)


def _refuse_if_started(place: Place) -> None:
    if jax.distributed.is_initialized():
        raise WorldError(
            "jax.distributed was initialized by the program",
            fix="leave that to lazytpu: it connects the processes when the device is first used",
        )
    bridge = importlib.import_module("jax._src.xla_bridge")
    if bridge.backends_are_initialized():
        raise WorldError(
            f"jax was used before the {place.size} processes of this world were connected",
            fix="call init_process_group, or make the first tensor of the device, before any other use of jax",
        )


def _store(place: Place) -> Store:
    """Return the store of the launcher, or one that rank 0 keeps; as torch does, so that it can share the port."""
    keeps = place.rank == 0 and not place.has_store
    waiting = _Waiting(place, f"for {place.host}:{place.port}, where rank 0 keeps the store")
    while not keeps and not _answers(place):
        waiting.pause()
    seconds = timedelta(seconds=config.collective_timeout)
    made: Store = _torch().TCPStore(
        place.host, place.port, place.size, keeps, seconds, wait_for_workers=False, multi_tenant=not place.has_store
    )
    return made


def _answers(place: Place) -> bool:
    try:
        with socket.create_connection((place.host, place.port), timeout=1.0):
            return True
    except OSError:
        return False


def _meet(place: Place, meeting: Store) -> tuple[str, int, int]:
    """Wait until every rank has come; return host and ports of the coordinator."""
    meeting.set(f"here/{place.rank}", f"{socket.gethostname()} {os.getpid()}")
    if place.rank == 0:
        jax_port, port = _start_coordinator(place.size)
        meeting.set("coordinator", f"{_own_address(place)} {jax_port} {port}")
    _note_devices(meeting, place)
    meeting.add("count", 1)
    waiting = _Waiting(place, "")
    while meeting.add("count", 0) < place.size:
        if waiting.is_long():
            missing = [rank for rank in range(place.size) if not meeting.check([f"here/{rank}"])]
            waiting.what = f"for {named(missing)} to use the device or to call init_process_group" if missing else ""
        waiting.pause()
    if meeting.check(["shared"]):
        shared = meeting.get("shared").decode()
        meeting.add("told", 1)
        while place.rank == 0 and meeting.add("told", 0) < place.size:  # the store ends with this process
            waiting.pause()
        raise WorldError(
            f"several processes are to use {shared}",
            fix="start as many processes as there are devices, or give each its own by "
            + " or ".join([variable for variable, *_ in _ACCELERATORS.values()]),
        )
    host, *ports = meeting.get("coordinator").decode().split()
    return host, int(ports[0]), int(ports[1])


class _Waiting:
    """Says that the process waits where that takes long, and raises in the end."""

    def __init__(self, place: Place, what: str) -> None:
        self.place, self.what = place, what
        self.started, self.said_s = time.monotonic(), _NOTICE_S

    def is_long(self) -> bool:
        """Return whether `pause` is to say something, or to raise."""
        return time.monotonic() - self.started >= min(self.said_s, config.collective_timeout)

    def pause(self) -> None:
        """Sleep for a moment.

        Raises:
            WorldError: it has taken too long.
        """
        if self.is_long():
            seconds, rank = time.monotonic() - self.started, self.place.rank
            if seconds >= config.collective_timeout:
                raise WorldError(
                    f"rank {rank} of {self.place.size} waited {seconds:.0f} s {self.what}",
                    fix="start all ranks with the same script; LAZYTPU_WORLD=0 if they are programs of their own",
                )
            self.said_s *= 2
            logs.name_rank(rank)
            logs.note(
                "world", "rank %d of %d waits %s (%.0f s so far)", rank, self.place.size, self.what, seconds, level=30
            )
        time.sleep(_POLL_S)


def _torch() -> ModuleType:
    return importlib.import_module("torch.distributed")


def _start_coordinator(size: int) -> tuple[int, int]:
    """Start the coordinator; return the port of jax's service and the one for the ranks."""
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    path = os.pathsep.join([str(Path(jax.__file__).parents[1]), *filter(None, [variables.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-S", coordinator.__file__, str(size)],
        stdin=subprocess.PIPE,  # closed at the end of this process; before anybody came, that ends it
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**variables, "PYTHONPATH": path},
        start_new_session=True,  # what ends the ranks of a terminal or a launcher does not end it before them
    )
    assert process.stdout is not None
    with process.stdout:
        ports = process.stdout.readline().split()
    if len(ports) != 2:
        raise WorldError(f"the coordinator of {size} processes did not start", fix=f"run {coordinator.__file__} {size}")
    _kept.append(process)
    process.returncode = 0  # it outlives this process, which is no reason for a warning
    return int(ports[0]), int(ports[1])


def _own_address(place: Place) -> str:
    """Return the address of this host that the others can reach: the one it reaches the place of meeting from."""
    if place.local_size == place.size:
        return "127.0.0.1"
    if not place.host:
        return socket.gethostbyname(socket.gethostname())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((place.host, place.port))
            own = str(probe.getsockname()[0])
        except OSError:
            own = ""
    return place.host if not own or own.startswith("127.") else own


def _initialize(place: Place, address: str) -> None:
    """Initialize ``jax.distributed``, without what would end this process from outside of Python."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM away
    visible = _own_accelerators(place)
    if visible:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, visible)))
    state = importlib.import_module("jax._src.distributed").global_state
    library = importlib.import_module("jaxlib._jax")
    state.process_id, state.num_processes, state.coordinator_address = place.rank, place.size, address
    state.client = library.get_distributed_runtime_client(
        address,
        place.rank,
        init_timeout=int(config.collective_timeout),
        shutdown_timeout=1,
        heartbeat_timeout=_NEVER_S,  # whoever missed one would be ended with a C++ stack; `ranks` hears of the dead
        shutdown_on_destruction=False,
        use_compression=True,
    )
    state.client.connect()
    atexit.register(setattr, state, "client", None)  # or jax would wait for the other ranks at the end of this process


def _own_accelerators(place: Place) -> Sequence[int]:
    """Return which of the GPUs of this host are for this process: an equal part of them for each."""
    each = len(_visible("GPU")) // place.local_size
    if place.local_size == 1 or not each:
        return ()
    return range(place.local_rank * each, (place.local_rank + 1) * each)


def _visible(kind: str) -> list[str]:
    """Return what names the accelerators of a kind that jax would let this process use."""
    variable, files, module, platforms = _ACCELERATORS[kind]
    first = str(getattr(jax.config, "jax_platforms", None) or "").partition(",")[0]
    if first not in platforms if first else importlib.util.find_spec(module) is None:
        return []
    given = os.environ.get(variable)
    if given is not None:
        return [x.strip() for x in given.split(",") if x.strip()]
    found = [re.fullmatch(files, path) for path in (*glob("/dev/*"), *glob("/dev/vfio/*"))]
    return sorted([match[1] for match in found if match], key=int)


def _note_devices(meeting: Store, place: Place) -> None:
    """Count this process at each device that it is to have; note one that another is to have as well."""
    for kind in _ACCELERATORS:
        names, own = _visible(kind), _own_accelerators(place) if kind == "GPU" else ()
        for name in [names[i] for i in own] or names:
            key = f"{kind} {name} of {socket.gethostname()}"
            if meeting.add(f"device/{key}", 1) > 1:
                meeting.set("shared", key)


def find() -> None:
    """Look for a launcher, at import, and let ``init_process_group`` find it as well, whichever it is."""
    if config.world:
        place = launchers.found()
        if place is not None:
            awaited.append(place)
            os.environ.update(place.variables() | os.environ)


find()
