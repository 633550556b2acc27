"""Exports a model as StableHLO with a batch of any size, and as a package that runs without this file.

python examples/export_and_deploy.py FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import lazytpu


def make_model() -> nn.Module:
    """A small convolutional classifier with BatchNorm."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    ).eval()


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes ``FOLDER/stablehlo`` and ``FOLDER/model.ltz``, reads both and compares them with the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    model, x = make_model(), torch.randn(4, 1, 28, 28)

    batch = torch.export.Dim("batch", min=1, max=256)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    lazytpu.export.stablehlo(program).save(folder / "stablehlo")
    loaded = lazytpu.export.load(folder / "stablehlo")
    for n in (1, 7):
        image = torch.randn(n, 1, 28, 28)
        print(f"StableHLO, batch of {n}: largest difference {(loaded(image) - model(image)).abs().max():.1e}")

    lazytpu.export.package(model, (x,), folder / "model.ltz")
    package = lazytpu.load(folder / "model.ltz")
    print(f"package, precompiled {package.precompiled}: {(package(x) - model(x)).abs().max():.1e}")
    print(f"now try: python -m lazytpu inspect {folder / 'model.ltz'}")


if __name__ == "__main__":
    main()
