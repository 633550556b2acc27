"""Dtypes that CUDA takes and the CPU does not: a slice of ``python -m tests.sweep_cuda_dtypes``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.op_checks import error_of, full_name
from tests.sweep_cuda_dtypes import jobs, run

SLICE = "abs,angle,fft.irfft,fft.rfft2,histc,nansum,nn.functional.avg_pool3d,nn.functional.multi_margin_loss,trace"
JOBS = {f"{full_name(op)} {str(dtype)[6:]}": (op, dtype) for op, dtype in jobs(SLICE)}

pytestmark = pytest.mark.filterwarnings("ignore")  # of complex32, and those of torch's samples


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_it_computes(job: tuple[Any, torch.dtype], device: torch.device) -> None:
    assert run(*job, 1, device) == []


def test_bins_of_integers_are_exact(device: torch.device) -> None:
    large = torch.tensor([0, 2**40 - 1, 2**40, 2**41], device=device)  # float32 could not tell the middle two apart
    assert torch.histc(large, 2, 0, 2**41).tolist() == [2, 2]
    assert torch.histc(torch.tensor([3, 3, 3], device=device, dtype=torch.int32), 3).tolist() == [0, 3, 0]


def test_out_of_transforms_in_half_precision(device: torch.device) -> None:
    x = torch.tensor([1.0, 2, 3, 4], dtype=torch.float16, device=device)
    out = torch.empty(0, dtype=torch.complex32, device=device)
    assert torch.fft.rfft(x, out=out) is out
    assert out.to(torch.complex64).tolist() == [10, -2 + 2j, -2]
    _, error = error_of(torch.fft.rfft, x.bfloat16())
    assert "Unsupported dtype BFloat16" in str(error)
