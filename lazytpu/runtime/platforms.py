"""Choose which of jax's platforms runs the graphs, where the environment of another package says so."""

from __future__ import annotations

import os

import jax

from lazytpu.runtime import world

_JAX_NAMES = {"CPU": "cpu", "GPU": "cuda", "CUDA": "cuda", "TPU": "tpu"}


def choose(name: str) -> str:
    """Start jax on a platform, unless ``JAX_PLATFORMS`` names another.

    Args:
        name: ``CPU``, ``GPU``, ``CUDA`` or ``TPU``, as in ``PJRT_DEVICE``.

    Returns:
        Why jax runs elsewhere; empty where it runs as wanted, or as ``JAX_PLATFORMS`` says.
    """
    if os.environ.get("JAX_PLATFORMS"):
        return ""
    wanted = _JAX_NAMES.get(name.upper())
    if wanted is None:
        return f"not one of {', '.join(_JAX_NAMES)}"
    if wanted == "cpu":  # so that jax takes no memory of a GPU; without effect where it has started
        jax.config.update("jax_platforms", wanted)
    try:
        if world.awaited:
            world.connect()
        jax.devices(wanted)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    found = jax.local_devices()[0].platform
    return "" if found == {"cuda": "gpu"}.get(wanted, wanted) else f"jax runs on {found}"
