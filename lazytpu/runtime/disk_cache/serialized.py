"""Turn executables into bytes and back: XLA's own serialization, and what jax needs to call one.

jax pickles an executable; a pickle can run anything when it is read, so here the few facts besides XLA's bytes are
written as JSON, and jax's object is made from them and the graph.  A jax whose objects have other parts than those
known here keeps nothing on disk.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
import platform
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import jax
import jaxlib.version
import numpy as np
import torch

from lazytpu.config import config
from lazytpu.ir.graph import Graph
from lazytpu.ir.rank_patterns import connected
from lazytpu.lowering.support import shardings
from lazytpu.runtime.disk_cache.provenance import sources_digest
from lazytpu.runtime.disk_cache.warmup import ends_soon

core: Any
pxla: Any
xla_client: Any
lapack: Any
try:
    core, pxla, xla_client, lapack = map(
        importlib.import_module, ("jax._src.core", "jax._src.interpreters.pxla", "jaxlib.xla_client", "jaxlib.lapack")
    )
except ImportError:  # a jax that has moved them: nothing is kept on disk
    core = pxla = xla_client = lapack = None

_LAPACK = 'custom_call_target="lapack_'

# Settings that leave the programs as they are.
_IRRELEVANT = frozenset(
    "device_name fallback eager verify compile_after compile_in_background max_graph_ops max_tree_nodes "
    "max_executables max_compiles max_compiles_action cut_loops "
    "world collective_timeout log metrics metrics_file disk_cache disk_cache_dir disk_cache_bytes".split()
)

# Settings of jax that only say where things are kept or what is told; the others are part of the key.
_IRRELEVANT_TO_JAX = ("jax_compilation_cache", "jax_persistent_cache", "jax_log", "jax_dump", "jax_traceback_filtering")

_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TF_XLA_FLAGS")

# What the keeper of an executable in jax holds when there is nothing special about the program.
_NOTHING: dict[str, Any] = {
    "unordered_effects": [],
    "ordered_effects": [],
    "keepalive": [],
    "host_callbacks": [],
    "mut": None,
    "auto_spmd_lowering": False,
    "pgle_profiler": None,
}


IDENTITY = 16
"""How many digits of a key say which graph it is; the others say what it was compiled with."""


class CannotLoad(Exception):
    """The bytes are not an executable for this device."""


def key_of(graph: Graph, device: jax.Device) -> str:
    """Return a hash of all that decides the executable of a graph: the graph, versions, device, settings and flags.

    Empty where the sources of this package cannot be read, so that a changed rule would go unnoticed.
    """
    if not sources_digest():
        return ""
    # XLA has written the devices into the program.
    place = connected(graph.patterns, jax.process_index()) if graph.patterns else (device.id, jax.process_index())
    parts = (graph.key, graph.uniform, place, *(value for _, value in _circumstances(device)))
    return _digest(graph.key, graph.uniform)[:IDENTITY] + _digest(*parts)[IDENTITY:]


def made_by(device: jax.Device) -> dict[str, str]:
    """Return all that decides an executable besides its graph, in words, by name."""
    circumstances = dict(_circumstances(device))
    settings, of_jax, variables = (circumstances.pop(name) for name in ("settings", "jax_settings", "variables"))
    torch_version, _, jax_version, jaxlib_version, numpy_version = circumstances.pop("versions")
    return {
        "torch": torch_version,
        "jax": jax_version,
        "jaxlib": jaxlib_version,
        "numpy": numpy_version,
        "the source of lazytpu": circumstances.pop("sources")[:8],
        "the device": _digest(circumstances.pop("device"))[:8],
        **{f"lazytpu.config.{name}": repr(value) for name, value in settings.items()},
        **variables,
        "jax.config": _digest(of_jax)[:8],
    }


def _circumstances(device: jax.Device) -> list[tuple[str, Any]]:
    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in _IRRELEVANT}
    settings["dump"] = bool(config.dump)  # names of ops carry positions then
    of_jax = {
        name: str(getattr(jax.config, name, None))
        for name in sorted(jax.config.values)
        if not name.startswith(_IRRELEVANT_TO_JAX)
    }
    variables = {name: os.environ.get(name, "") for name in _VARIABLES}
    return [
        ("sources", sources_digest()),
        ("versions", _versions()),
        ("device", _device(device)),
        ("settings", settings),
        ("jax_settings", of_jax),
        ("variables", variables),
    ]


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def _versions() -> tuple[str, ...]:
    return torch.__version__, torch.version.git_version, jax.__version__, jaxlib.version.__version__, np.__version__


def device_facts(device: jax.Device) -> tuple[str, str, str, str]:
    """Return what an executable for a device depends on: platform and its version, kind of device, and processor."""
    platform_name, platform_version, kind, _, host = _device(device)
    return platform_name, platform_version, kind, host


@cache
def _device(device: jax.Device) -> tuple[str, str, str, tuple[int, int], str]:
    client = device.client
    host = _processor() if device.platform == "cpu" else ""
    world = jax.device_count(), jax.process_count()
    return client.platform, client.platform_version, device.device_kind, world, host


def _processor() -> str:
    """Return the kind of processor, as far as it decides XLA's instructions and the number of its threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
        kind = " ".join(line for line in lines if line.startswith(wanted))
    except OSError:  # no Linux: only this machine is known to be like itself
        kind = f"{platform.processor()} {platform.node()}"
    return f"{sys.platform} {platform.machine()} {cores} {kind}"


def dump(compiled: jax.stages.Compiled) -> tuple[dict[str, Any], bytes] | None:
    """Return what to keep of an executable: facts that JSON can hold, and XLA's bytes.

    None where it cannot be kept: it calls back into Python, or this jax is another than those known.
    """
    if core is None:
        return None
    try:
        keeper = getattr(compiled._executable, "_unloaded_executable")  # noqa: B009  private to jax
        parts = {f.name: getattr(keeper, f.name) for f in dataclasses.fields(keeper)}
        if any(parts[name] for name in _NOTHING if name in parts) or compiled._params.const_args:
            return None
        if not _known_parts() >= {*parts}:
            return None
        outputs = [[list(a.shape), str(a.dtype), bool(a.weak_type)] for a in parts["output_avals"]]
        facts = {"kept": sorted(parts["kept_var_idx"]), "outputs": outputs, "name": parts["name"], "lapack": False}
        if parts["backend"].platform == "cpu":  # the others have neither LAPACK nor anything to plan in a first run
            text = "".join(module.to_string() for module in parts["xla_executable"].hlo_modules())
            facts["lapack"] = _LAPACK in text
            if len(parts["device_list"]) == 1 and ends_soon(compiled, text):
                facts["warm_up"] = [[list(a.shape), str(a.dtype)] for a in parts["input_avals"]]
        if len(parts["device_list"]) > 1:
            facts["devices"] = [device.id for device in parts["device_list"]]
            facts["shardings"] = [shardings.written(s) for s in parts["output_shardings"]]
        return facts, parts["xla_executable"].serialize()
    except (AttributeError, KeyError, NotImplementedError, jax.errors.JaxRuntimeError):
        return None  # of a platform that serializes nothing, or of an unknown jax


def deserialized(facts: dict[str, object], data: bytes, device: jax.Device) -> object:
    """Return XLA's executable of its bytes; other threads of Python run meanwhile.

    jax finds the functions of LAPACK when it lowers a call of one; a program that calls one before that crashes.
    """
    if facts.get("lapack", True):
        lapack.prepare_lapack_call("getrf", np.dtype("float32"))
    return device.client.deserialize_executable(data, executable_devices=_devices(facts, device))


def _devices(facts: dict[str, Any], device: jax.Device) -> Any:
    """Return the devices that a program runs on: those of its mesh, or the one device."""
    if "devices" not in facts:
        return xla_client.DeviceList((device,))
    known = {d.id: d for d in jax.devices()}
    return xla_client.DeviceList(tuple([known[i] for i in facts["devices"]]))


class Typed(Protocol):
    """An array or the type of one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the sizes."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Return the dtype."""


def revived(
    facts: dict[str, Any], made: Any, given: Sequence[Typed], kept: Sequence[Typed], scalars: Sequence[Typed | None]
) -> jax.stages.Compiled:
    """Return the executable that `dump` serialized, called with (given, kept, *scalars).

    Args:
        facts: what `dump` said of it.
        made: XLA's bytes, or what `deserialized` made of them.
        given, kept, scalars: types of the donated arguments, the others, and the arrays of numbers or None.

    Raises:
        CannotLoad: XLA refuses the bytes, or the facts are not about these arguments.
    """
    device = jax.local_devices()[0]
    types = [*given, *kept, *(t for t in scalars if t is not None)]
    donated = [i < len(given) for i in range(len(types))]
    all_avals = [core.ShapedArray(tuple(t.shape), np.dtype(t.dtype)) for t in types]
    try:
        used = [int(i) for i in facts["kept"]]
        avals = [all_avals[i] for i in used]
        results = [
            core.ShapedArray(tuple(shape), jax.numpy.dtype(dtype), weak_type=weak)
            for shape, dtype, weak in facts["outputs"]
        ]
        executable = deserialized(facts, made, device) if isinstance(made, bytes) else made
        devices = _devices(facts, device)
        if len(devices) == 1:
            placed: list[jax.sharding.Sharding] = [jax.sharding.SingleDeviceSharding(device)] * len(avals)
            laid_out: list[jax.sharding.Sharding] = [jax.sharding.SingleDeviceSharding(device)] * len(results)
        else:
            written = [shardings.read(s) for s in facts["shardings"]]
            laid_out, everywhere = [*written], shardings.whole(written[0].mesh)
            placed = [getattr(types[i], "sharding", None) or everywhere for i in used]
        parts: dict[str, Any] = {
            **_NOTHING,
            "xla_executable": executable,
            "device_list": devices,
            "backend": device.client,
            "input_avals": avals,
            "input_shardings": placed,
            "output_avals": results,
            "output_shardings": laid_out,
            "committed": len(devices) > 1,
            "name": str(facts["name"]),
            "kept_var_idx": set(used),
            "xla_in_layouts": [None] * len(avals),
            "dispatch_in_layouts": [None] * len(avals),
            "xla_out_layouts": [None] * len(results),
            "all_args_info": None,
        }
        names = [f.name for f in dataclasses.fields(pxla.UnloadedMeshExecutable)]
        keeper = pxla.UnloadedMeshExecutable(**{name: parts[name] for name in names})
        infos = iter([jax.stages.ArgInfo(a, d) for a, d in zip(all_avals, donated, strict=True)])
        arguments = jax.tree_util.tree_map(lambda _: next(infos), ((list(given), list(kept), *scalars), {}))
        tree = jax.tree_util.tree_structure((0,) * len(results))
        return jax.stages.Compiled(keeper.load(), [], arguments, tree)
    except Exception as error:  # whatever XLA or jax finds wrong with it
        raise CannotLoad(f"{type(error).__name__}: {error}") from error


def _known_parts() -> set[str]:
    return {
        *_NOTHING,
        *("xla_executable device_list backend input_avals input_shardings output_avals output_shardings".split()),
        *("committed name kept_var_idx xla_in_layouts dispatch_in_layouts xla_out_layouts all_args_info".split()),
    }
