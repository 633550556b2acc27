"""torch's operator database on the device, with the CPU as the oracle: a sample of it, in few minutes.

Every fifth operator runs, the others with ``-m slow``: in float32 with gradients, and some, as those without float32,
in one other dtype without, with a single sample.  All its samples are recorded, forward, backward and in place, before
one cut runs them, for the time goes into compiling.  What is known not to pass stands in `op_status.py`.
``LAZYTPU_TEST_SAMPLES=1000`` takes all samples instead of a few; `sweep.py` checks more, and all of it.
"""

from __future__ import annotations

import os
import re
import zlib
from typing import Any

import pytest
import torch

from lazytpu.lowering.decompose import can_lower
from tests.support.op_checks import ENTRIES, error_of, full_name, problems, samples_of, tensors, to_device
from tests.support.op_status import BY_VALUE, CHECKS, ELSEWHERE, KNOWN, known

pytestmark = pytest.mark.filterwarnings("ignore")  # those of torch's own samples, and of fallbacks, which are counted

ALL_SAMPLES = "LAZYTPU_TEST_SAMPLES" in os.environ
OTHER_DTYPES = (torch.int64, torch.bool, torch.bfloat16, torch.complex64)


def dtypes_of(op: Any) -> list[torch.dtype]:
    """Return float32, and for some operators one of the other dtypes, both as the operator's name picks them."""
    number = zlib.crc32(full_name(op).encode())
    start = number % len(OTHER_DTYPES)
    others = [d for d in OTHER_DTYPES[start:] + OTHER_DTYPES[:start] if d in op.dtypes]
    if torch.float32 not in op.dtypes:
        return others[:1]
    return [torch.float32, *others[:1]] if ALL_SAMPLES or number // len(OTHER_DTYPES) % 3 == 0 else [torch.float32]


def verdict(op: Any, dtype: torch.dtype | None, found: dict[str, list[str]]) -> list[str]:
    """What to complain of: checks that fail, and checks that pass although the table says they do not."""
    texts = []
    for check, problem in found.items():
        entry = known(full_name(op), check, dtype)
        if entry is None:
            texts += [f"{dtype}, {check}: {text}" for text in problem]
        elif not problem and not entry.rare:
            texts.append(f"{dtype}, {check} passes: remove it from op_status.py ({entry.reason})")
    return texts


def sampled(op: Any) -> Any:
    """Return an operator as a parameter, of which the name of the operator makes four in five slow."""
    slow = zlib.crc32(full_name(op).encode()) // 12 % 5
    return pytest.param(op, id=full_name(op), marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize("op", [sampled(op) for op in ENTRIES])
def test_operator(op: Any, device: torch.device) -> None:
    texts = []
    for dtype in dtypes_of(op):
        grad = dtype is torch.float32 and op.supports_autograd
        checks = ("forward", "backward", "in place", "lowered") if grad else ("forward", "in place", "lowered")
        samples = samples_of(op, dtype, grad)
        if dtype is not torch.float32 and not ALL_SAMPLES:
            samples = samples[:1]
        texts += verdict(op, dtype, problems(op, samples, checks, device, per_graph=1000))
    assert not texts, "\n".join(texts)


def test_every_operator_has_a_lowering() -> None:
    """Whatever the sample is, a rule that is no longer registered is noticed."""
    packets = {op.name: getattr(torch.ops.aten, op.aten_name or op.name, None) for op in ENTRIES}
    overloads = [getattr(packet, name) for packet in packets.values() if packet for name in packet.overloads()]
    of_tensors = [o for o in overloads if any(str(a.type) == "Tensor" for a in o._schema.arguments)]
    lacking = {str(o) for o in of_tensors if not o._schema.is_mutable and not can_lower(o)}
    assert lacking == {f"aten.{name}" for name in NOT_LOWERED.split()}


# Those whose result, or its size, depends on values; the others are TorchScript's.
NOT_LOWERED = """
allclose.default equal.default masked_select.default nonzero.default unique_consecutive.default
__getitem__.Dict_Tensor einsum.sublist index_put.hacked_twin mH.a mT.a split.default
to.prim_Device to.prim_dtype to.prim_other
"""


def test_the_status_table_speaks_of_what_there_is() -> None:
    names = {full_name(op) for op in ENTRIES}
    assert {name for entry in KNOWN + ELSEWHERE for name in entry.ops.split()} <= names
    assert {check for entry in KNOWN + ELSEWHERE for check in entry.checks.split(", ")} <= set(CHECKS)
    assert all(entry.reason for entry in KNOWN + ELSEWHERE)


# --- wrong arguments --------------------------------------------------------------------------------------

REFUSERS = [op for op in ENTRIES if op.error_inputs_func is not None]


@pytest.mark.parametrize("op", REFUSERS, ids=full_name)
def test_wrong_arguments_raise_what_they_raise_on_the_cpu(op: Any, device: torch.device) -> None:
    """The same type of error, when the op is called; and no tensor has changed then."""
    texts = []
    for number, wrong in enumerate(op.error_inputs("cpu")):
        sample = wrong.sample_input
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        before = [t.detach().clone() for t in tensors((args, kwargs))]
        twins, error = error_of(to_device, (args, kwargs), device)
        _, expected = error_of(op, *args, **kwargs)
        if any(re.search(pattern, str(expected)) for pattern in BY_VALUE):
            continue
        if error is None:
            _, error = error_of(op, *twins[0], **twins[1])
        if type(error) is not type(expected):
            texts.append(f"error input {number}: {error!r}, not {expected!r}")
        elif twins is not None and expected is not None:
            changes = [error_of(_assert_same, *pair)[1] for pair in zip(tensors(twins), before, strict=True)]
            texts += [f"error input {number}: a tensor has changed: {change}" for change in changes if change]
    assert not texts, "\n".join(texts)


def _assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    if not theirs.is_meta:
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)
