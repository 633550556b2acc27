"""What of torch's operator database is known not to pass on the device, or to run on the CPU, and why.

The one table of exceptions: `test_ops.py`, `test_op_transforms.py` and `sweep.py` hold every other operator to what
the CPU computes, and the entries here to failing: what passes has to leave the table.  The documentation's page of
operators is made from it too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# What is checked of an operator; "errors" are wrong arguments, "lowered" is that nothing of it runs on the CPU.
CHECKS = ("forward", "backward", "in place", "out", "strided", "empty", "jvp", "vmap", "gradgrad", "errors", "lowered")
ANY_DTYPE = "any"


@dataclass(frozen=True)
class Known:
    """A fact about some operators.

    Attributes:
        ops: full names (``div:floor_rounding``), separated by spaces.
        checks: which of `CHECKS` do not pass, separated by commas.
        dtypes: for which dtypes (``float32``), separated by spaces, or `ANY_DTYPE`.
        reason: why, for the reader of the documentation.
        rare: only some samples show it, so that a test of a few samples may pass.
    """

    ops: str
    checks: str
    dtypes: str
    reason: str
    rare: bool = False

    def covers(self, op: str, check: str, dtype: torch.dtype | None) -> bool:
        """Whether this is about one check of one operator."""
        name = str(dtype).removeprefix("torch.")
        return (
            op in self.ops.split()
            and check in self.checks.split(", ")
            and (self.dtypes == ANY_DTYPE or name in self.dtypes.split())
        )


_TIES = "which of equal values comes first is up to the algorithm; here their order is kept"
_COARSE = "the CPU computes coordinates in bfloat16 and is off by up to 0.1; here they are float32"
_OUT_OF_BATCHES = "torch takes Python numbers out of batches on the CPU only"

KNOWN: tuple[Known, ...] = (
    Known("matrix_exp", "forward", "bfloat16", "the CPU gives NaN; here the exponential is computed in float32"),
    Known("matrix_exp", "forward", "float32", "the CPU is 3e-4 off where the norm is large, this device 1e-4"),
    Known("logcumsumexp", "backward", "float32", "the CPU is further off float64 than the tolerance", rare=True),
    Known("argsort", "forward", "bfloat16", _TIES),
    Known("linspace:tensor_overload logspace:tensor_overload", "vmap", ANY_DTYPE, _OUT_OF_BATCHES),
    Known("grid_sampler_2d grid_sampler_3d nn.functional.grid_sample", "forward", "bfloat16", _COARSE),
)

# Errors of the CPU about the values in a tensor, which recording does not look at: pattern of the message to reason.
BY_VALUE = {
    r"index -?\d+ is out of bounds": "config.check_bounds reports it at the next read",
    r"probability tensor contains|invalid multinomial distribution": "what is drawn from such weights is undefined",
}


def known(op: str, check: str, dtype: torch.dtype | None) -> Known | None:
    """The entry of the table for one check of one operator; ``dtype`` is None where the check has none."""
    return next((entry for entry in KNOWN if entry.covers(op, check, dtype)), None)
