"""What of torch's operator database is known not to pass on the device, or to run on the CPU, and why.

`test_ops.py` holds every other operator to what the CPU computes, and an entry of this table to failing: one
that passes has to leave the table.
"""

from __future__ import annotations

import torch

Key = tuple[str, str, torch.dtype]  # operator, variant, dtype

STATUS: dict[Key, str] = {}
