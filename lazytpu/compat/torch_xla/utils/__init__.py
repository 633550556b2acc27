"""``torch_xla.utils``."""

from lazytpu.compat import lacking

__getattr__ = lacking.names_of(__name__)
