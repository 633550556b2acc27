"""``torch_xla.utils.checkpoint``: torch's own, which works on any device."""

from torch.utils.checkpoint import checkpoint

from lazytpu.compat import names

__getattr__ = names.missing_from(__name__)
__all__ = ["checkpoint"]
