"""From the IR to HLO: one registry of rules, one file a family of ops."""

from lazytpu.lowering.decompose import decompositions
from lazytpu.lowering.registry import lowers, target_platform

__all__ = ["decompositions", "lowers", "target_platform"]
