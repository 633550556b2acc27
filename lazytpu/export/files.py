"""Exported programs as files: what is written, and how what is read is checked.

==========================  ==========================================================================================
``manifest.json``           format, versions, signature, and the sha256 of every other file
``manifest.json.sha256``    its own
``module.jax_export``       the program as ``jax.export`` serializes it, with its promise of compatibility
``module.stablehlo.bc``     the program as portable StableHLO bytecode, for other tools
``module.mlir``             the same as text
``weights/0000-name.npy``   one file an array
==========================  ==========================================================================================
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazytpu.errors import ArtifactError
from lazytpu.export.npy import file_name, to_npy

if TYPE_CHECKING:
    from lazytpu.export.program import StableHLOModule

FORMAT = 1
MANIFEST, SEAL = "manifest.json", "manifest.json.sha256"
EXPORTED, BYTECODE, TEXT = "module.jax_export", "module.stablehlo.bc", "module.mlir"


def contents_of(module: StableHLOModule, more: Mapping[str, bytes], kind: str) -> dict[str, bytes]:
    """Return names to contents of the files of a module, the manifest and its sha256 first.

    Args:
        more: further files.
        kind: ``stablehlo`` or ``package``.
    """
    weights = {file_name(i, n): to_npy(a) for i, (n, a) in enumerate(module.weights.items())}
    files = {
        EXPORTED: serialized(module.exported),
        BYTECODE: module.bytecode(),
        TEXT: module.text().encode(),
        **weights,
        **more,
    }
    manifest = {
        "format": FORMAT,
        "kind": kind,
        "signature": module.signature.to_json(),
        "weights": [
            {"name": n, "file": f, "dtype": a.dtype.name, "shape": list(a.shape)}
            for f, (n, a) in zip(weights, module.weights.items(), strict=True)
        ],
        "metadata": module.metadata,
        "calling_convention_version": module.exported.calling_convention_version,
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    text = json.dumps(manifest, indent=1).encode()
    return {MANIFEST: text, SEAL: hashlib.sha256(text).hexdigest().encode(), **files}


def serialized(exported: Any) -> bytes:
    """Return what ``jax.export`` writes of a program.

    Raises:
        ImportError: the package flatbuffers is missing.
    """
    need_flatbuffers()
    return bytes(exported.serialize())


def need_flatbuffers() -> None:
    """Raise ImportError, which says what to do, where flatbuffers is missing."""
    try:
        import flatbuffers  # type: ignore[import-untyped] # noqa: F401
    except ImportError:
        raise ImportError(
            "saving and loading exported programs needs flatbuffers, with which jax.export writes them: "
            "pip install flatbuffers"
        ) from None


def save(module: StableHLOModule, folder: str | os.PathLike[str]) -> None:
    """Write a module into a folder, which is made; see the top of this file for what is in it.

    Raises:
        FileExistsError: the folder has files of another kind in it.
        ImportError: the package flatbuffers is missing.
    """
    path = Path(folder)
    if path.exists() and any(path.iterdir()) and not (path / MANIFEST).exists():
        raise FileExistsError(f"{path} is not empty, and what is in it was not written by lazytpu.export")
    files = contents_of(module, {}, "stablehlo")
    for name, data in files.items():
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def manifest_of(read: Callable[[str], bytes], place: str) -> dict[str, Any]:
    """Return the manifest, checked as far as it says what it is.

    Raises:
        ArtifactError: it is none, was changed, or is of a later version.
    """
    text = read(MANIFEST)
    if hashlib.sha256(text).hexdigest().encode() != read(SEAL):
        raise ArtifactError(f"{place}: its manifest was changed", fix="do not use it; get or make it again")
    try:
        manifest: dict[str, Any] = json.loads(text)
        found = manifest["format"], manifest["sha256"], manifest["signature"], manifest["weights"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{place}: its manifest cannot be read: {error}", fix="save it again") from None
    if found[0] != FORMAT:
        raise ArtifactError(
            f"{place} has format {found[0]}, and this lazytpu reads format {FORMAT}", fix="install a newer lazytpu"
        )
    return manifest


def checked(manifest: Mapping[str, Any], name: str, read: Callable[[str], bytes], place: str) -> bytes:
    """Return the contents of a file.

    Raises:
        ArtifactError: it is not what was written.
    """
    wanted = manifest["sha256"].get(name)
    data = read(name)
    if wanted != hashlib.sha256(data).hexdigest():
        raise ArtifactError(
            f"{place}: {name} is not what was saved, its sha256 differs from the manifest's",
            fix="do not use it; get or save it again",
        )
    return data
