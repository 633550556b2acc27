"""``torch_xla.distributed``."""

from lazytpu.compat import names

__getattr__ = names.missing_from(__name__)
