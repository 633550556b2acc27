"""``torch_xla.backends``: the precision of matrix products."""

from __future__ import annotations

import lazytpu
from lazytpu.compat import names

__getattr__ = names.missing_from(__name__)


def set_mat_mul_precision(precision: str) -> None:
    """Set the precision to ``highest`` (that of torch, the default here), ``high`` or ``default`` (the fastest).

    Raises:
        ValueError: it is none of these.
    """
    lazytpu.config.matmul_precision = precision


def get_mat_mul_precision() -> str:
    """Return the precision."""
    return lazytpu.config.matmul_precision
