"""``torch_xla.experimental``."""

from lazytpu.compat import lacking
from lazytpu.compat.torch_xla.experimental.eager import eager_mode, eager_mode_context, is_eager_mode

__getattr__ = lacking.names_of(__name__)
__all__ = ["eager_mode", "eager_mode_context", "is_eager_mode"]
