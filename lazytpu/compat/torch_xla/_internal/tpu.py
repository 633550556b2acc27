"""``torch_xla._internal.tpu``: which TPU this is."""

from __future__ import annotations

import re

import lazytpu
from lazytpu.compat import names
from lazytpu.compat.torch_xla.core import xla_model
from lazytpu.runtime import meshes

__getattr__ = names.missing_from(__name__)


def num_available_chips() -> int:
    """Return the number of TPU devices of this process; 0 on other platforms."""
    return len(meshes.devices()) // len(meshes.devices_by_process()) if lazytpu.platform() == "tpu" else 0


def num_available_devices() -> int:
    """Return the same: a device of jax is what torch_xla calls one."""
    return num_available_chips()


def version() -> int:
    """Return the generation of the TPU, such as 5; 0 on other platforms."""
    found = re.search(r"v(\d+)", xla_model.xla_device_kind()) if num_available_chips() else None
    return int(found[1]) if found else 0
