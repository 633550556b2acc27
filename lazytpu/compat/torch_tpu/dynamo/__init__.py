"""``torch_tpu.dynamo``: its backend of ``torch.compile``."""

from lazytpu.compat import names
from lazytpu.compat.torch_tpu.dynamo.tpu_mlir_jit import aot_backend

__getattr__ = names.missing_from(__name__)
__all__ = ["aot_backend"]
