"""``torch_xla.version``."""

__version__ = "2.9.0"  # whose names these are
__xla_gitrev__ = __torch_gitrev__ = "unknown"
