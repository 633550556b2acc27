"""``torch_tpu.dynamo.tpu_mlir_jit``: the backend that a script gives to ``torch.compile``."""

from lazytpu.compat import lacking
from lazytpu.frontends.dynamo import backend as aot_backend

__getattr__ = lacking.names_of(__name__)
__all__ = ["aot_backend"]
