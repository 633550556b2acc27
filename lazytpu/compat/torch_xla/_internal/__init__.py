"""``torch_xla._internal``: what scripts ask it for all the same."""

from lazytpu.compat import names

__getattr__ = names.missing_from(__name__)
