"""What of torch's operator database is known not to pass on the device, or to run on the CPU, and why.

The one table of exceptions: `test_ops.py`, `test_op_transforms.py` and `sweep.py` hold every other operator to what
the CPU computes, and the entries here to failing: what passes has to leave the table.  The documentation's page of
operators is made from it too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import lazytpu

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


_TIES = "which of equal values comes first is up to the algorithm; on GPUs and TPUs their order is kept"
_NAN = "the CPU gives NaN; here the exponential is computed in float32"
_REST = "the CPU rounds x ** -0.5 twice in the elements that its vectors leave over"
_TAPS = "on processors without AVX-512 the CPU rounds the sum after each tap of the window; here it is rounded once"
_GAPS = "the CPU leaves a tensor with gaps in memory, given as out, unwritten"
_OUT_OF_BATCHES = "torch takes Python numbers out of batches on the CPU only"

KNOWN: tuple[Known, ...] = (
    Known("matrix_exp", "forward", "bfloat16 float16", _NAN),
    Known("nn.functional.gelu nn.functional.avg_pool3d narrow_copy", "out", "float32", _GAPS),
    Known("narrow_copy", "out", "complex64", _GAPS),
    Known("nn.functional.pixel_unshuffle", "empty", ANY_DTYPE, "the CPU gives a batch of none the shape it had before"),
    Known("_segment_reduce:lengths", "empty", ANY_DTYPE, "recording does not look at the values of the lengths"),
    Known("nn.functional.normalize", "backward", "bfloat16", _REST, rare=True),
    Known(
        "nn.functional.conv_transpose1d nn.functional.conv_transpose2d nn.functional.conv_transpose3d",
        "forward, strided",
        "bfloat16",
        _TAPS,
        rare=True,
    ),
    Known("linspace:tensor_overload logspace:tensor_overload", "vmap", ANY_DTYPE, _OUT_OF_BATCHES),
)

# What the CPU as XLA's platform does as eager does, and other platforms do not.
ELSEWHERE: tuple[Known, ...] = (
    Known("argsort sort topk kthvalue mode", "forward", "bfloat16 float16 int64 int32 uint8 bool", _TIES, rare=True),
    Known("msort sort topk kthvalue", "backward", "bfloat16 float16", _TIES, rare=True),
)

_READS = "finding it would cut the graph at every call"
_BOUNDS = "config.check_bounds reports it at the next read"

# Errors of the CPU about the values in a tensor, which recording does not look at: pattern of the message to reason.
# `test_value_errors.py` has a call for each, and holds those that config.check_bounds reports to being reported.
BY_VALUE = {
    r"index -?\d+ is out of bounds|out of range: tried to access index|[Ii]ndex out of range": _BOUNDS,
    r"Found an invalid max index": _BOUNDS,
    r"select\(\): index -?\d+ out of range|Index \d+ of input takes value|offsets\[-1\] can not be greater": _BOUNDS,
    r"Target -?\d+ is out of bounds|target'? ?(is )?out of range|Class values must be smaller": _BOUNDS,
    r"source < number of ones in mask|sorter index out of range|[Pp]ivots (passed|given) to lu_": _BOUNDS,
    r"q values must be in the range": "a q above 1 is reported by config.check_bounds at the next read",
    r"offsets\[0\] has to be 0": "the elements before the first bag are left out",
    r"probability tensor contains|invalid multinomial distribution": "what is drawn from such weights is undefined",
    r"p_in >= 0 && p_in <= 1": "a probability below 0 counts as 0, and one above 1 as 1",
    r"expects all elements of std >= 0": "a negative deviation mirrors the numbers",
    r"invalid Poisson rate": "what is drawn with a negative rate is undefined",
    r"all elements of (input|target) should be between 0 and 1": "the formula is computed, which gives NaN or a number",
    r"range of \[.*\] is not finite": "what is not finite is in no bin, or in the last",
    r"ZeroDivisionError": f"XLA divides by zero: the quotient is -1, the remainder the dividend; {_BOUNDS}",
    r"Expected all rows of lengths|lengths contains negative value": "rows end where the data ends",
    r"algorithm failed to converge because the input|should not contain infs or NaNs|false INTERNAL ASSERT": (
        f"NaN and infinity give NaN; {_READS}"
    ),
    r"cholesky_inverse: The diagonal element": f"the result is NaN; {_READS}",
}


def known(op: str, check: str, dtype: torch.dtype | None) -> Known | None:
    """The entry of the table for one check of one operator; ``dtype`` is None where the check has none."""
    table = KNOWN if lazytpu.platform() == "cpu" else KNOWN + ELSEWHERE
    return next((entry for entry in table if entry.covers(op, check, dtype)), None)
