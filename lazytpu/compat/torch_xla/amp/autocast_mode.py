"""``torch_xla.amp.autocast_mode``."""

from lazytpu.compat import lacking
from lazytpu.compat.torch_xla.amp import autocast

__getattr__ = lacking.names_of(__name__)
__all__ = ["autocast"]
