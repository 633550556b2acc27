"""``torch_xla.experimental``."""

from lazytpu.compat import names
from lazytpu.compat.torch_xla.experimental.eager import eager_mode, eager_mode_context, is_eager_mode

__getattr__ = names.missing_from(__name__)
__all__ = ["eager_mode", "eager_mode_context", "is_eager_mode"]
