"""Reading exported programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lazytpu.errors import ArtifactError
from lazytpu.export.files import EXPORTED, checked, manifest_of, need_flatbuffers
from lazytpu.export.npy import from_npy
from lazytpu.export.program import StableHLOModule
from lazytpu.export.signature import Signature


def load(folder: str | os.PathLike[str]) -> StableHLOModule:
    """Read what `StableHLOModule.save` wrote.

    Raises:
        ArtifactError: a file is missing or was changed, or the format is of a later version.
        FileNotFoundError: there is no such folder.
    """
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder of lazytpu.export")

    def read(name: str) -> bytes:
        try:
            return (path / name).read_bytes()
        except FileNotFoundError:
            raise ArtifactError(f"{path} lacks {name}", fix="save it again") from None

    return module_of(manifest_of(read, str(path)), read, str(path))


def deserialized(data: bytes) -> object:
    """Return the ``jax.export.Exported`` that `files.serialized` wrote.

    Raises:
        ImportError: the package flatbuffers is missing.
    """
    need_flatbuffers()
    from jax import export

    return export.deserialize(bytearray(data))


def module_of(manifest: Mapping[str, Any], read: Callable[[str], bytes], place: str) -> StableHLOModule:
    """Return the module that a manifest describes; nothing of it is run, and no pickle is read.

    Raises:
        ArtifactError: a file was changed.
    """
    program = checked(manifest, EXPORTED, read, place)
    try:
        weights = {
            w["name"]: from_npy(checked(manifest, w["file"], read, place), w["dtype"], tuple(w["shape"]))
            for w in manifest["weights"]
        }
        signature = Signature.from_json(manifest["signature"])
        exported = deserialized(program)
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{place}: {error}", fix="save it again") from error
    return StableHLOModule(exported, signature, weights, dict(manifest["metadata"]))
