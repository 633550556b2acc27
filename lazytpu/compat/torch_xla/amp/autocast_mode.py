"""``torch_xla.amp.autocast_mode``."""

from lazytpu.compat import names
from lazytpu.compat.torch_xla.amp import autocast

__getattr__ = names.missing_from(__name__)
__all__ = ["autocast"]
