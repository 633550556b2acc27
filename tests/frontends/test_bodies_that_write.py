"""A body that writes to its arguments, as torch 2.15 passes on, is refused and not run as if it did not."""

from __future__ import annotations

import pytest
from torch._higher_order_ops.scan import scan_op

from lazytpu.errors import UnsupportedOpError
from lazytpu.frontends import control_flow_kernels
from lazytpu.frontends.fx.higher_order import TABLE


def test_it_is_refused() -> None:
    higher = next(h for h in TABLE.values() if h.op is scan_op)
    with pytest.raises(UnsupportedOpError, match="the body of scan writes to its arguments"):
        control_flow_kernels._call(higher, None, [], [], (), mutated_arg_indices="0")
