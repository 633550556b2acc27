"""``torch_xla.distributed.xla_backend``: importing it lets ``init_process_group("xla")`` have our backend."""

from lazytpu.distributed import backend

backend.register("xla")
