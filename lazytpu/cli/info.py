"""``info``: show versions, devices, caches and environment."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer

import lazytpu
from lazytpu.cli import tables
from lazytpu.observe.metrics_tables import size, table
from lazytpu.runtime import client
from lazytpu.runtime.disk_cache import store

_PACKAGES = "torch jax jaxlib numpy torchvision libtpu jax-cuda12-plugin jax-cuda13-plugin torch_xla typer rich jinja2"
_VARIABLES = ("LAZYTPU_", "JAX_", "XLA_", "LIBTPU_", "TPU_", "PJRT_", "CUDA_VISIBLE", "TF_CPP_", "OMP_NUM", "MALLOC_")
# Variables whose names contain one of these may hold a secret: they are shown as set, without the value.
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")


def info(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show versions, devices, caches and environment, to paste into a bug report."""
    found = collect()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    out = tables.console()
    for section, rows in found.items():
        out.print(table([section, ""], [[name, str(value)] for name, value in rows.items()], left=2))


def collect() -> dict[str, dict[str, object]]:
    """Return the values by section and name."""
    return {
        "versions": {"lazytpu": lazytpu.__version__, "python": sys.version.split()[0], **_versions()},
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        "device": _device(),
        "caches": _caches(),
        "settings other than the default": _settings(),
        "environment": {**_environment()},
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES.split():
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _device() -> dict[str, object]:
    try:
        device = client.device()
    except RuntimeError as error:  # a broken driver is what the report is for
        return {"name": str(lazytpu.device()), "error": str(error)}
    return {
        "name": str(lazytpu.device()),
        "platform": lazytpu.platform(),
        "kind": device.device_kind,
        "runtime": str(device.client.platform_version).partition("\n")[0],
        "jax devices": ", ".join(map(str, device.client.devices())),
        "memory": size(client.memory_limit()),
        "threads of torch": torch.get_num_threads(),
    }


def _caches() -> dict[str, object]:
    disk = store.info()
    found: dict[str, object] = {
        "disk cache": disk.folder if disk.enabled else "off",
        "programs in the disk cache": f"{disk.files:,}, {size(disk.bytes)} of {size(disk.limit_bytes)}",
        "executables in memory": f"at most {lazytpu.config.max_executables:,}",
    }
    if disk.problem:
        found["problem of the disk cache"] = disk.problem
    return found


def _settings() -> dict[str, object]:
    default = type(lazytpu.config)()
    names = [n for n in default.__slots__ if getattr(lazytpu.config, n) != getattr(default, n)]
    return {name: getattr(lazytpu.config, name) for name in names}


def _environment() -> dict[str, str]:
    shown = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES):
            shown[name] = "(set)" if any(word in name for word in _SECRET) else value
    return shown
