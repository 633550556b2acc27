"""``torch_xla.distributed.xla_backend``: importing it lets ``init_process_group("xla")`` have our backend."""

from __future__ import annotations

import os
from collections.abc import Iterator

from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from lazytpu.compat.torch_xla.core import world
from lazytpu.distributed import backend
from lazytpu.ir.op_schema import Arg


def _through_environment(url: str, *_: object, **options: Arg) -> Iterator[tuple[Store, int, int]]:
    """Find the other processes for ``init_method="xla://"``: as torchrun has set them; without it, there are none.

    Raises:
        AssertionError: the script has chosen SPMD, where a program is for the devices of all.
    """
    assert not world.is_spmd(), "xla:// connects processes that compute apart, not those of SPMD"
    if "RANK" in os.environ:
        yield from rendezvous("env://", **options)
    else:
        yield HashStore(), 0, 1


backend.register("xla")
for _scheme in ("xla", "pjrt"):
    try:
        register_rendezvous_handler(_scheme, _through_environment)
    except RuntimeError:  # registered already
        pass
