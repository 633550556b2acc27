"""Libraries of transforms and of solvers: Fourier and cosine transforms, hyperdimensional vectors, minimizers."""

from __future__ import annotations

import torch

from tests.ecosystem.case import Library, Numbers
from tests.ecosystem.steps import drawn


def transforms(device: torch.device) -> Numbers:
    """Transform a picture to scattered frequencies and back, and rows to cosines, with gradients."""
    import torch_dct
    from torchkbnufft import KbNufft, KbNufftAdjoint

    picture = torch.complex(drawn(0, 1, 1, 8, 8), drawn(1, 1, 1, 8, 8)).to(device).requires_grad_()
    places = drawn(2, 2, 30).clamp(-3, 3).to(device)
    there = KbNufft(im_size=(8, 8)).to(device)(picture, places)
    there.abs().sum().backward()
    back = KbNufftAdjoint(im_size=(8, 8)).to(device)(there, places)
    rows = drawn(3, 3, 8).to(device).requires_grad_()
    cosines = torch_dct.dct_2d(rows)
    torch_dct.idct(cosines).square().sum().backward()
    assert picture.grad is not None and rows.grad is not None
    return {
        "frequencies": there.abs().sum().item(), "gradient": picture.grad.abs().sum().item(),
        "back": back.abs().sum().item(), "cosines": cosines.abs().sum().item(), "of rows": rows.grad.abs().sum().item(),
    }  # fmt: skip


def symbols(device: torch.device) -> Numbers:
    """Bind, bundle and permute hypervectors, and look which is near."""
    import torchhd

    torch.manual_seed(0)
    words = torchhd.random(6, 200).to(device)
    said = torchhd.bundle(torchhd.bind(words[0], words[1]), words[2])
    near = torchhd.cosine_similarity(said, words)
    return {
        "near": near.abs().sum().item(), "nearest": float(near.argmax()), "set": torchhd.multiset(words).sum().item(),
        "permuted": torchhd.permute(words, shifts=2)[:, :50].sum().item(),
    }  # fmt: skip


def minima(device: torch.device) -> Numbers:
    """Minimize Rosenbrock's function in eight ways."""
    from torchmin import minimize

    def valley(x: torch.Tensor) -> torch.Tensor:
        return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()

    ways = "bfgs l-bfgs cg newton-cg newton-exact trust-ncg dogleg trust-exact".split()
    start = torch.tensor([-1.2, 1.0, 0.5], device=device, dtype=torch.float64)
    return {way: float(minimize(valley, start, method=way, max_iter=8).fun) for way in ways}


LIBRARIES = [
    Library("torchkbnufft", "with torch-dct: transforms of Fourier and cosines, gradients", transforms, rtol=1e-3,
            needs=("torch-dct",)),
    Library("torch-hd", "hypervectors bound, bundled and compared", symbols, rtol=1e-3),
    Library("pytorch-minimize", "eight minimizers, from BFGS to trust regions", minima, rtol=1e-3),
]  # fmt: skip
