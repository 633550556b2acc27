"""``torch_mlu`` (Cambricon's CATCH): importing it makes the device there.

Its layer-wise, fused and offline modes are here running each op at once (``lazytpu.config.eager``), the lazy device
as it is, and `lazytpu.export.package`.
"""

from __future__ import annotations

import lazytpu  # noqa: F401  makes the device
from lazytpu.compat import names

__version__ = "1.3.0"  # whose names these are
__getattr__ = names.missing_from(__name__)
