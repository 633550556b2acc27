"""The versions that are written into what is saved."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import torch


def versions() -> dict[str, Any]:
    """Return package to version, for all that decides what a saved program is."""
    try:
        own = version("lazytpu")
    except PackageNotFoundError:  # run from the source tree
        own = "source"
    return {
        "lazytpu": own,
        "torch": torch.__version__,
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
    }
