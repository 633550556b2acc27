"""Strides of results whose operands do not lie as created, against eager; nothing is computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from lazytpu.tracing import eager_checks

ANY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mul": lambda x: x * x,
    "relu": lambda x: x.relu(),
    "nan_to_num": lambda x: x.nan_to_num(),
    "flip": lambda x: x.flip(0),
    "sort": lambda x: x.sort(-1)[0],
    "logsigmoid": F.logsigmoid,
    "poisson": torch.poisson,
    "isin": lambda x: torch.isin(x, x[0]),
    "frexp": lambda x: torch.frexp(x)[0],
    "rfftn": torch.fft.rfftn,
    "zeros_like": torch.zeros_like,
    "sum": lambda x: x.sum(1, keepdim=True),
    "to": lambda x: x.to(torch.float64),
    "of gaps": lambda x: x[::2].exp(),
    "view op": lambda x: x[:, None].neg(),
    "index": lambda x: x[:, torch.zeros(2, dtype=torch.int64, device=x.device)],
}
IMAGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nearest": lambda x: F.interpolate(x, size=(1, 1)),
    "bilinear": lambda x: F.interpolate(x, size=(3, 1), mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, size=(3, 1), mode="bicubic"),
    "antialiased": lambda x: F.interpolate(x, size=(2, 1), mode="bilinear", antialias=True),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "replicate": lambda x: F.pad(x, (1, 1, 1, 0), mode="replicate"),
}
LAYOUTS = {
    "channels_last": ((2, 3, 4, 5), (60, 1, 15, 3)),
    "channels_last of one channel": ((2, 1, 4, 5), (20, 1, 5, 1)),
    "channels_last of one pixel": ((2, 3, 1, 1), (3, 1, 3, 3)),
    "permuted": ((5, 4, 2, 3), (1, 5, 60, 20)),
    "large": ((2, 3, 64, 50), (9600, 1, 150, 3)),
    "one element in the way": ((2, 1, 2), (2, 7, 1)),
    "ones": ((2, 2, 1, 1), (2, 1, 4, 2)),
    "matrix": ((100, 70), (1, 100)),
    "as created": ((3, 4, 5), (20, 5, 1)),
}


@pytest.mark.parametrize("size, stride", LAYOUTS.values(), ids=LAYOUTS)
def test_results_lie_as_on_the_cpu(size, stride, device):
    x = torch.empty_strided(size, stride).fill_(0.5)
    ours = torch.empty_strided(size, stride, device=device)
    assert x.to(device).stride() == ours.stride() == stride
    functions = ANY | (IMAGES if len(size) == 4 else {})
    found = {name: function(ours).stride() for name, function in functions.items()}
    assert found == {name: function(x).stride() for name, function in functions.items()}


def test_solutions_lie_as_on_the_cpu(device):
    for size, rows in (((3, 5), 2), ((2, 3, 3), 4), ((2, 60, 80), 3)):
        a, b = torch.full(size, 0.5), torch.ones(*size[:-1], rows)
        want = torch.linalg.lstsq(a, b).solution.stride()
        assert torch.linalg.lstsq(a.to(device), b.to(device)).solution.stride() == want, size


def test_small_strides_nest_as_large_ones_do():
    assert eager_checks._scaled((64, 1, 50), (100, 6400, 1), (3, 1, 2)) == (4, 12, 1)
    assert eager_checks._scaled((3, 50, 64), (0, 64, 1), (4, 2, 3)) == (0, 3, 1)
    with pytest.raises(eager_checks._NotSimilarError):
        eager_checks._scaled((8, 8), (2, 3), (2, 2))
