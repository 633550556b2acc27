"""``torch_tpu.dynamo.tpu_mlir_jit``: the backend that a script gives to ``torch.compile``."""

from lazytpu.compat import names
from lazytpu.frontends.dynamo import backend as aot_backend

__getattr__ = names.missing_from(__name__)
__all__ = ["aot_backend"]
