"""``torch_tpu`` (Sophgo's backend): importing it makes the device ``tpu`` there, which importing this has done.

What its scripts use is on torch itself: ``torch.tpu``, ``model.tpu()``, ``torch.autocast("tpu", ...)``.
"""

from __future__ import annotations

import lazytpu  # noqa: F401  makes the device
from lazytpu.compat import names

__version__ = "2.8.0"  # whose names these are
__getattr__ = names.missing_from(__name__)
