"""``torch_mlu.core``."""

from lazytpu.compat import lacking

__getattr__ = lacking.names_of(__name__)
