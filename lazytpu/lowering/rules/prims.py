"""The few ops of torch's ``prims`` that torch.compile puts into graphs."""

import torch

from lazytpu.lowering.registry import lowers


@lowers(torch.ops.prims.convert_element_type.default)
def convert_element_type(out, x, dtype):
    return x.astype(out.dtype)
