"""The mesh of a step: one for all that is recorded in it."""

from __future__ import annotations

from lazytpu.errors import LazyTPUError
from lazytpu.ir.sharding import Mesh
from lazytpu.ir.tree import trace
from lazytpu.location import site
from lazytpu.runtime import meshes


def on_mesh(mesh: Mesh) -> None:
    """Note that something of this step lies on a mesh.

    Raises:
        LazyTPUError: something else of it lies on other devices.
    """
    if trace.mesh is None:
        trace.mesh = mesh
        meshes.used[:] = [True]
    elif trace.mesh.devices != mesh.devices:
        raise LazyTPUError(
            "one graph cannot take tensors from two sets of devices, or from one in two orders",
            at=str(site.line_here()),
            given=f"{trace.mesh} and {mesh}",
            fix="mark all of them on one mesh, or on meshes of the same devices; call mark_step() between two programs",
        )
