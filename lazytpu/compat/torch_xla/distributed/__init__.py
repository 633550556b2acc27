"""``torch_xla.distributed``."""

from lazytpu.compat import lacking

__getattr__ = lacking.names_of(__name__)
