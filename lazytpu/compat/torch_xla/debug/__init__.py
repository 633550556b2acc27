"""``torch_xla.debug``."""

from lazytpu.compat import lacking

__getattr__ = lacking.names_of(__name__)
