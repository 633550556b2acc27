"""Shims for the packages whose scripts run here: torch_xla, torch_tpu, torch_mlu.

Each is a package below this one, with the names and the behaviour of the original on a machine with one device::

    import lazytpu.compat.torch_xla as torch_xla        # by hand
    lazytpu.compat.install("torch_xla")                 # or: `import torch_xla` finds it from now on
    python -m lazytpu run SCRIPT                        # or: no edit, found from the script's imports
"""

from __future__ import annotations

from lazytpu.compat.finder import install

__all__ = ["install"]
