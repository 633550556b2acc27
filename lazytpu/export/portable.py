"""StableHLO text as portable bytecode, which other versions of XLA read."""

from __future__ import annotations

from jax.extend.mlir.dialects import stablehlo


def bytecode_of(text: str) -> bytes:
    """Return the bytecode of a program, for every XLA of the last twelve weeks and all later ones.

    Args:
        text: what `lazytpu.stablehlo_text` returns.

    Raises:
        ValueError: it is not StableHLO.
    """
    version = stablehlo.get_version_from_compatibility_requirement(stablehlo.StablehloCompatibilityRequirement.WEEK_12)
    return bytes(stablehlo.serialize_portable_artifact_str(text, version))
