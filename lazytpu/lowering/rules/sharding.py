"""``lazytpu::shard(Tensor x, str sharding) -> Tensor``: the operand, laid out on a mesh.

``sharding`` is the text of a sharding (`lazytpu.ir.sharding`), which says all of it, so that it is part of the graph.
"""

import torch

from lazytpu.ir.sharding import named_sharding
from lazytpu.lowering.registry import lowers
from lazytpu.lowering.support.shardings import constrained

library = torch.library.Library("lazytpu", "FRAGMENT")
library.define("shard(Tensor x, str sharding) -> Tensor")
shard_op = torch.ops.lazytpu.shard.default
library.impl("shard", lambda x, sharding: torch.empty_like(x), "Meta")
library.impl("shard", lambda x, sharding: x.clone(), "CPU")  # for `lazytpu.config.verify`


@lowers(shard_op)
def shard(out, x, sharding):
    return constrained(x, named_sharding(sharding, x.ndim))
