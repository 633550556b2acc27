"""``torch_xla.utils.checkpoint``: torch's own, which recomputes on any device."""

from torch.utils.checkpoint import checkpoint

from lazytpu.compat import lacking

__getattr__ = lacking.names_of(__name__)
__all__ = ["checkpoint"]
