"""Packages: one file with a compiled program, its StableHLO for other devices, and its weights."""

from __future__ import annotations

import logging
import os
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import torch
from jax import numpy as jnp

from lazytpu import random
from lazytpu.config import config
from lazytpu.errors import ArtifactError
from lazytpu.export.files import MANIFEST, SEAL, checked, contents_of, manifest_of
from lazytpu.export.loading import module_of
from lazytpu.export.program import PLATFORMS, StableHLOModule, converted, device_of, notes
from lazytpu.export.to_jax import Converted
from lazytpu.frontends.jax.arrays import from_jax, share_buffer
from lazytpu.lowering.registry import lowering_for
from lazytpu.observe import logs, metrics
from lazytpu.runtime import client
from lazytpu.runtime.disk_cache import serialized

EXECUTABLE = "executable.bin"
_DIGEST, _CHUNK = 64, 1 << 20  # bytes
_EVERYWHERE = ("cpu", "cuda", "rocm", "tpu")


class Package(StableHLOModule):
    """A loaded package; called as the original was.

    Attributes:
        precompiled: whether the executable in the file is what runs; else its StableHLO was compiled here.
    """

    precompiled = False

    def __init__(self, module: StableHLOModule) -> None:
        super().__init__(module.exported, module.signature, module.weights, module.metadata)
        self._executable: Any = None

    def _use(self, executable: Any) -> None:
        self._executable, self.precompiled = executable, True

    def _execute(self, weights: list[Any], inputs: list[Any]) -> list[Any]:
        metrics.count("execute")
        if self._executable is None:
            return super()._execute(weights, inputs)
        return list(self._executable([], [*weights, *inputs]))

    def _run_lazily(self, inputs: list[Any]) -> list[Any]:
        """Run at once, on the buffers of the tensors: a compiled program cannot be part of a graph."""
        arrays = [share_buffer(x.to(device_of(inputs))) if isinstance(x, torch.Tensor) else x for x in inputs]
        with jax.enable_x64(True):
            arrays = [jnp.asarray(x) for x in arrays]
            if self.signature.random:
                arrays.append(jnp.asarray(random.default_generator.next_key(), jnp.uint64))
            outputs = self._execute([self._weight(n)[0] for n in self._names()], arrays)
        return [from_jax(x) for x in outputs]


class _Function(torch.nn.Module):
    """A function as a module, for torch.export; tensors it closes over become constants of the program."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: object) -> Any:
        return self.function(*args)


def package(
    fn_or_module: Callable[..., Any],
    example_inputs: Sequence[Any],
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: Any = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a program, compiled for this device, into one file that runs without the model's Python.

    The file is a zip of plain members: the executable for this kind of device and these versions, StableHLO for any
    other, the weights as ``.npy``, and ``manifest.json`` with versions, signature and the sha256 of each.  At its end
    stands the sha256 of the whole.

    Args:
        fn_or_module: a module, in the mode (train or eval) it is to run in, or a function of tensors; on the CPU or
            the device.  Or what ``torch.export.export`` gives.
        example_inputs: tuple of arguments; sizes and dtypes are fixed by them.
        path: the file to write.
        dynamic_shapes: as for ``torch.export.export``, sizes that may vary.  Such a program has no executable: it is
            compiled for each size where it is loaded.
        metadata: anything JSON holds, kept in the manifest.

    Returns:
        The path.

    Raises:
        Whatever ``torch.export`` raises for what it cannot trace.
        UnsupportedOpError, LoweringError: an op cannot be lowered.

    Example:
        >>> lazytpu.export.package(model.eval(), (x,), "model.ltz")  # doctest: +SKIP
        >>> y = lazytpu.load("model.ltz")(x)  # doctest: +SKIP
    """
    program = _exported(fn_or_module, tuple(example_inputs), dynamic_shapes)
    made = _converted_for_all(program)
    module = StableHLOModule(made.exported, made.signature, made.weights, notes(made, metadata))
    more: dict[str, bytes] = {}
    compiled = None if made.is_dynamic else serialized.dump(_compiled(made))
    if compiled is not None:
        facts, more[EXECUTABLE] = compiled
        module.metadata["executable"] = {"facts": facts, "target": target()}
    elif not made.is_dynamic:
        _note("package %s has no executable: this program or platform cannot be serialized", path)
    files = contents_of(module, more, "package")
    return _write(Path(path), files)


def _exported(x: Any, inputs: tuple[Any, ...], dynamic_shapes: Any) -> torch.export.ExportedProgram:
    if isinstance(x, torch.export.ExportedProgram):
        return x
    module = x if isinstance(x, torch.nn.Module) else _Function(x)
    if dynamic_shapes is not None and not isinstance(x, torch.nn.Module):
        dynamic_shapes = {"args": tuple(dynamic_shapes)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*isinstance\\(treespec, LeafSpec\\)", FutureWarning)  # torch's own doing
        return torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes)


def _converted_for_all(program: torch.export.ExportedProgram) -> Converted:
    """Return the program for every platform, or for this one where jax has no lowering for the others."""
    try:
        return converted(program, False, _EVERYWHERE)
    except (NotImplementedError, ValueError) as error:
        _note("the StableHLO of the package is for this platform alone: %s", str(error).partition("\n")[0])
        return converted(program, False, (PLATFORMS[client.platform()],))


def _compiled(made: Converted) -> Any:
    """Return the program compiled for this device, with the rules' forms for its platform."""
    count = len(made.signature.weights)

    def step(given: list[Any], kept: list[Any]) -> Any:
        return tuple(made.call(kept[:count], *kept[count:]))

    types = [*made.types[0], *made.types[1:]]
    with (
        jax.enable_x64(True),
        jax.default_matmul_precision(config.matmul_precision),
        lowering_for(client.platform()),
    ):
        return jax.jit(step, donate_argnums=0).trace([], types).lower().compile()


def target() -> list[str]:
    """Return what an executable is for: platform and its version, kind of device and processor, and jaxlib."""
    platform, platform_version, kind, processor = serialized.device_facts(client.device())
    host = f"processor {sha256(processor.encode()).hexdigest()[:12]}" if processor else ""
    return [platform, platform_version, kind, host, f"jax {jax.__version__}", f"jaxlib {version('jaxlib')}"]


def _note(message: str, *args: object) -> None:
    logs.note("compile", message, *args, level=logging.WARNING)


def _write(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write the file beside its place first, so that nobody sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as archive:
            for name, data in files.items():
                archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)
            archive.comment = b"0" * _DIGEST
        seal(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def seal(path: Path) -> None:
    """Put the sha256 of all that is before it at the end of a file, the place of the zip's comment."""
    digest = _digest(path)
    with path.open("r+b") as file:
        file.seek(-_DIGEST, os.SEEK_END)
        file.write(digest)


def _digest(path: Path) -> bytes:
    """Return the sha256, in hexadecimal digits, of a file but for as many bytes at its end."""
    digest, left = sha256(), path.stat().st_size - _DIGEST
    with path.open("rb") as file:
        while left > 0 and (chunk := file.read(min(left, _CHUNK))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest().encode()


class _File:
    """The members of a package, read once and checked."""

    def __init__(self, path: Path) -> None:
        self.place = str(path)
        self._check_seal(path)  # before anything parses what somebody may have changed
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
                self.members = {name: archive.read(name) for name in names}
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise ArtifactError(f"{path} is no package of lazytpu: {error}", fix="get or make it again") from None
        self.manifest = manifest_of(self.read, self.place)
        expected = {MANIFEST, SEAL, *self.manifest["sha256"]}
        if len(names) != len(self.members) or set(self.members) != expected:
            odd = sorted(set(self.members) ^ expected) or sorted(names)
            raise ArtifactError(
                f"{path} lacks members that its manifest lists, or has others: {', '.join(odd[:5])}",
                fix="get or make it again",
            )
        for name in self.manifest["sha256"]:
            checked(self.manifest, name, self.read, self.place)

    def _check_seal(self, path: Path) -> None:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) >= _DIGEST:
                file.seek(-_DIGEST, os.SEEK_END)
                if file.read() == _digest(path):
                    return
        raise ArtifactError(
            f"{path} is no package of lazytpu, or it was cut short or changed", fix="get or make it again"
        )

    def read(self, name: str) -> bytes:
        """Return a member."""
        if name not in self.members:
            raise ArtifactError(
                f"{self.place} lacks {name}, so it is no package of lazytpu", fix="get or make it again"
            )
        return self.members[name]


def load_package(path: str | os.PathLike[str]) -> Package:
    """Load what `lazytpu.export.package` wrote.

    Reads no pickle and needs none of the model's Python.  The executable is machine code: load packages from where
    you would install a program from.

    Args:
        path: the file.

    Returns:
        A callable with the arguments of the original: ``lazytpu.load(path)(x)``.  Its StableHLO is compiled, and the
        log says so, where the device or a version is another than those it was compiled for.

    Raises:
        ArtifactError: the file was cut short or changed, is no package, or has no program for this platform.
        FileNotFoundError: there is no such file.
    """
    file = _File(Path(path))
    loaded = Package(module_of(file.manifest, file.read, file.place))
    why = _load_executable(loaded, file)
    metrics.count("package_loaded")
    if why:
        _need_platform(loaded, file.place)
        metrics.count("package_recompiled")
        _note("%s: %s; its StableHLO is compiled here", file.place, why)
    return loaded


def _load_executable(loaded: Package, file: _File) -> str:
    """Load the executable of a package; return why that cannot be, else nothing."""
    found = loaded.metadata.get("executable")
    if found is None:
        return "it has no executable"
    wanted, here = found["target"], target()
    if wanted != here:
        different = ", ".join(f"{b!r} instead of {a!r}" for a, b in zip(wanted, here, strict=False) if a != b)
        return f"it was compiled for something else ({different[:300]})"
    weights = [jax.ShapeDtypeStruct(w.shape, jnp.dtype(w.dtype)) for w in loaded.signature.weights]
    inputs = [jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for x in loaded.signature.arrays]
    if loaded.signature.random:
        inputs.append(jax.ShapeDtypeStruct((2,), jnp.dtype("uint64")))
    try:
        with jax.enable_x64(True):
            loaded._use(serialized.revived(found["facts"], file.read(EXECUTABLE), [], [*weights, *inputs], []))
    except serialized.CannotLoad as error:
        return f"XLA refuses its executable ({error})"
    return ""


def _need_platform(loaded: Package, place: str) -> None:
    here = PLATFORMS[client.platform()]
    if here not in loaded.exported.platforms:
        raise ArtifactError(
            f"{place} has programs for {', '.join(loaded.exported.platforms)}, and this process runs on {here}",
            fix="make the package on this platform",
        )


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a package holds, as data for people and programs; its members are checked, and nothing is run.

    Raises:
        ArtifactError: the file was cut short or changed, or is no package.
        FileNotFoundError: there is no such file.
    """
    file = _File(Path(path))
    module = module_of(file.manifest, file.read, file.place)
    found = module.metadata.get("executable", {"target": []})
    return {
        "file": file.place,
        "bytes": Path(path).stat().st_size,
        "inputs": {x.name: x.describe() for x in module.signature.arrays},
        "outputs": {n: module.output(n).describe() for n in module.output_names},
        "weights": {w.name: f"{w.describe()} {w.kind}" for w in module.signature.weights},
        "weight_bytes": sum(a.nbytes for a in module.weights.values()),
        "random": module.signature.random,
        "versions": module.metadata["versions"],
        "platforms": list(module.exported.platforms),
        "executable_bytes": len(file.members.get(EXECUTABLE, b"")),
        "executable_for": found["target"],
        "runs_here_without_compiling": found["target"] == target(),
        "metadata": {k: v for k, v in module.metadata.items() if k not in ("versions", "platforms", "executable")},
        "members": {name: len(data) for name, data in file.members.items()},
    }
