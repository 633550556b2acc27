"""GPUs that are only described: ``h100:8`` on one host, ``h100:16x8`` on 16 hosts of eight."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Sequence

import jax

# Compute capability, limits and sizes as `nvidia-smi -q` and `deviceQuery` print them for an H100 SXM.
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84978434048
}
platform_name: "CUDA" device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 8 } runtime_version { major: 12 minor: 8 }
"""
_NAME = re.compile(r"h100:(?:(\d+)x)?(\d+)")
_UNCHECKED = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"  # jax's plugin asks for a driver else, which compiling does not need


def is_gpu(name: str) -> bool:
    """Return whether a topology is one of GPUs."""
    return _NAME.fullmatch(name) is not None


def devices_of(name: str) -> Sequence[jax.Device]:
    """Return jax's descriptions of the GPUs of a topology.

    Raises:
        ModuleNotFoundError: XLA's compiler for GPUs is not installed.
        ValueError: jax cannot describe them.
    """
    plugins = [n for n in (12, 13) if importlib.util.find_spec(f"jax_cuda{n}_plugin")]
    if not plugins:
        raise ModuleNotFoundError(
            "to compile for a GPU needs jax's plugin for CUDA: pip install jax-cuda12-plugin jax-cuda12-pjrt (180 MB)"
        )
    found = _NAME.fullmatch(name)
    assert found is not None
    shape = f"1x{found[1] or 1}x{found[2]}"
    unchecked = os.environ.get(_UNCHECKED)
    os.environ[_UNCHECKED] = "1"
    try:
        try:
            return _described(shape)
        except NotImplementedError:  # jax has started without its plugin, for want of a driver
            importlib.import_module(f"jax_plugins.xla_cuda{plugins[0]}").initialize()
            return _described(shape)
    except Exception as error:
        raise ValueError(f"jax cannot describe {name!r}: {error}") from error
    finally:
        if unchecked is None:
            os.environ.pop(_UNCHECKED)


def _described(shape: str) -> Sequence[jax.Device]:
    topologies = importlib.import_module("jax.experimental.topologies")
    devices: Sequence[jax.Device] = topologies.get_topology_desc(
        "", "cuda", target_config=_H100, topology=shape
    ).devices
    return devices
