"""``torch_tpu.dynamo``: its backend of ``torch.compile``."""

from lazytpu.compat import lacking
from lazytpu.compat.torch_tpu.dynamo.tpu_mlir_jit import aot_backend

__getattr__ = lacking.names_of(__name__)
__all__ = ["aot_backend"]
