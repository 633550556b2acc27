"""``torch_xla.backends``: how exact matrix products are."""

from __future__ import annotations

import lazytpu
from lazytpu.compat import lacking

__getattr__ = lacking.names_of(__name__)


def set_mat_mul_precision(precision: str) -> None:
    """``highest`` (as torch computes, the default here), ``high`` or ``default`` (as fast as the device can).

    Raises:
        ValueError: it is another.
    """
    lazytpu.config.matmul_precision = precision


def get_mat_mul_precision() -> str:
    """What was set."""
    return lazytpu.config.matmul_precision
