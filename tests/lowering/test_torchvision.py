"""Torchvision's own ops, lowered: the same numbers and gradients as on the CPU, and no fallback."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazytpu
from lazytpu.observe import metrics

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torchvision = pytest.importorskip("torchvision")
from torchvision import ops

X = torch.randn(2, 6, 10, 12, generator=torch.Generator().manual_seed(0))
# batch, x0, y0, x1, y1: inside, hanging over every edge, smaller than a pixel, the whole, inside out, far outside
ROIS = torch.tensor(
    [
        [0, 1, 1, 7, 7],
        [1, -3, 2, 5, 30],
        [0, 3, 3, 3.2, 3.1],
        [1, 0, 0, 11, 9],
        [1, 8, 8, 2, 3],
        [0, 40, 40, 60, 50],
    ]
)


def compare(device: torch.device, run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    """Checks the result and the gradients of all inputs."""
    metrics.reset()
    ours = [x.to(device).requires_grad_() for x in inputs]
    theirs = [x.clone().requires_grad_() for x in inputs]
    got, want = run(*ours), run(*theirs)
    torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-5, atol=1e-5)
    cotangent = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(1))
    got_grads = torch.autograd.grad(got, ours, cotangent.to(device), allow_unused=True)
    want_grads = torch.autograd.grad(want, theirs, cotangent, allow_unused=True)
    assert [g is None for g in got_grads] == [g is None for g in want_grads]
    for g, w in zip(got_grads, want_grads, strict=True):
        if w is not None:
            torch.testing.assert_close(g.cpu(), w, rtol=1e-4, atol=1e-4)
    assert not metrics.fallbacks()


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("sampling_ratio", [-1, 1, 2])
def test_roi_align(device: torch.device, sampling_ratio: int, aligned: bool) -> None:
    compare(device, lambda x, rois: ops.roi_align(x, rois, (3, 4), 0.7, sampling_ratio, aligned), X, ROIS)


@pytest.mark.parametrize("sampling_ratio", [-1, 2])
def test_ps_roi_align(device: torch.device, sampling_ratio: int) -> None:
    compare(device, lambda x, rois: ops.ps_roi_align(x, rois, (2, 3), 0.7, sampling_ratio), X, ROIS)


def test_roi_pool(device: torch.device) -> None:
    compare(device, lambda x, rois: ops.roi_pool(x, rois, (3, 4), 0.7), X, ROIS)


def test_ps_roi_pool(device: torch.device) -> None:
    compare(device, lambda x, rois: ops.ps_roi_pool(x, rois, (2, 3), 0.7), X, ROIS)


@pytest.mark.parametrize("op", ["roi_align", "roi_pool"])
def test_no_regions(device: torch.device, op: str) -> None:
    compare(device, lambda x, rois: getattr(ops, op)(x, rois, (3, 4), 0.7), X, ROIS[:0])


def test_roi_align_of_float64(device: torch.device) -> None:
    compare(device, lambda x, rois: ops.roi_align(x, rois, 2, 0.5), X.double(), ROIS.double())


def test_wrong_regions(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match=r"Tensor\[K, 5\]"):
        torch.ops.torchvision.roi_align(X.to(device), ROIS[:, :4].to(device), 1.0, 2, 2, 2, False)


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_deform_conv2d(device: torch.device, groups: int, with_mask: bool) -> None:
    generator = torch.Generator().manual_seed(2)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    offset, mask = randn(2, 2 * 2 * 9, 8, 6) * 3, randn(2, 2 * 9, 8, 6).sigmoid()
    weight, bias = randn(8, 6 // groups, 3, 3), randn(8)

    def run(x: Any, offset: Any, weight: Any, bias: Any, *mask: Any) -> torch.Tensor:
        return ops.deform_conv2d(  # type: ignore[no-any-return]
            x, offset, weight, bias, (1, 2), (1, 1), (2, 1), mask[0] if mask else None
        )

    compare(device, run, X, offset, weight, bias, *([mask] if with_mask else []))


def boxes_of(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    boxes = torch.rand(n, 4, generator=generator) * 100
    boxes[:, 2:] = boxes[:, :2] + torch.rand(n, 2, generator=generator) * 30
    scores = torch.rand(n, generator=generator)
    return boxes, scores


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("n", [0, 1, 40, 700])
def test_nms(device: torch.device, n: int, threshold: float) -> None:
    boxes, scores = boxes_of(n)
    got = ops.nms(boxes.to(device), scores.to(device), threshold)
    assert got.device == device
    assert got.tolist() == ops.nms(boxes, scores, threshold).tolist()


def test_nms_of_equal_scores_and_boxes(device: torch.device) -> None:
    boxes, scores = boxes_of(60)
    boxes[30:] = boxes[:30]
    scores = scores.mul(5).round()
    assert ops.nms(boxes.to(device), scores.to(device), 0.5).tolist() == ops.nms(boxes, scores, 0.5).tolist()


def test_a_chain_of_boxes_that_decide_about_each_other(device: torch.device) -> None:
    x = torch.arange(600.0)  # each overlaps the next by half: every second one stays, across the blocks
    boxes = torch.stack([x * 0.5, x * 0, x * 0.5 + 1, x * 0 + 1], 1)
    got = ops.nms(boxes.to(device), -x.to(device), 0.3)
    assert got.tolist() == ops.nms(boxes, -x, 0.3).tolist() == list(range(0, 600, 2))


def test_nms_cuts_once_for_the_size(device: torch.device) -> None:
    boxes, scores = (t.to(device) for t in boxes_of(50))
    lazytpu.mark_step()
    metrics.reset()
    kept = boxes[ops.nms(boxes, scores, 0.3)] * 2
    assert metrics.counter("cut: nms") == metrics.counter("cut") == 1
    assert metrics.counter("transfer_out_bytes") == 8
    assert not metrics.fallbacks()
    assert torch.equal(kept.cpu(), boxes_of(50)[0][ops.nms(*boxes_of(50), 0.3)] * 2)


def test_batched_nms(device: torch.device) -> None:
    boxes, scores = boxes_of(80)
    classes = torch.arange(80) % 3
    got = ops.batched_nms(boxes.to(device), scores.to(device), classes.to(device), 0.3)
    assert got.tolist() == ops.batched_nms(boxes, scores, classes, 0.3).tolist()


@pytest.mark.parametrize(
    ("boxes", "scores"), [((3, 5), (3,)), ((3, 4, 1), (3,)), ((3, 4), (3, 1)), ((3, 4), (2,))], ids=str
)
def test_nms_of_wrong_shapes(device: torch.device, boxes: tuple[int, ...], scores: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError) as ours:
        ops.nms(torch.zeros(boxes, device=device), torch.zeros(scores, device=device), 0.5)
    with pytest.raises(RuntimeError) as theirs:
        ops.nms(torch.zeros(boxes), torch.zeros(scores), 0.5)
    message = str(ours.value).splitlines()[0].rstrip("D")
    assert message in str(theirs.value)


def test_a_detector(device: torch.device) -> None:
    torch.manual_seed(0)
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn as detector

    model = detector(weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64).eval()
    image = torch.rand(3, 64, 64)
    with torch.no_grad():
        want = model([image])[0]
        got = model.to(device)([image.to(device)])[0]
    assert not metrics.fallbacks()
    assert want["boxes"].shape == got["boxes"].shape
    torch.testing.assert_close(got["scores"].cpu(), want["scores"], rtol=1e-3, atol=1e-3)
