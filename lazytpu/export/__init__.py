"""Whole programs out of the process: StableHLO, and packages that run without the model's Python."""

from lazytpu.export.loading import load
from lazytpu.export.package import Package, describe, package
from lazytpu.export.program import StableHLOModule, stablehlo

__all__ = ["Package", "StableHLOModule", "describe", "load", "package", "stablehlo"]
