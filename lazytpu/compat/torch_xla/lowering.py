"""``torch_xla._XLAC.lowering``: the HLO of a graph, without running it, and which tensors its parameters are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lazytpu.compat.torch_xla.distributed.spmd.xla_sharded_tensor import unwrapped
from lazytpu.debug.graph_text import gspmd, module_of
from lazytpu.frontends.jax.arrays import mark_shared
from lazytpu.ir.tree import trace
from lazytpu.runtime.launch import scalar_arrays
from lazytpu.tensors.storage import Storage, new_storage, storage_of
from lazytpu.tensors.tensor import make
from lazytpu.tracing.reading import pending_graph
from lazytpu.tracing.record import cell_of, load, lock


class LoweringContext:
    """The HLO of what is pending of some tensors.

    Args:
        name: of the module.
        device: the one there is.
    """

    def __init__(self, name: str = "PyLoweringContext", device: torch.device | None = None) -> None:
        self.name = name

    def build(self, tensors: Sequence[torch.Tensor]) -> None:
        """Lower the graph that computes some tensors; this object keeps the contents that its inputs have now."""
        tensors = [unwrapped(t) for t in tensors]
        with lock, gspmd():
            for t in tensors:
                load(cell_of(t))
            graph = pending_graph(tuple(tensors))
            self._hlo, kept = module_of(graph, self.name)
            given: list[tuple[Storage | None, torch.Tensor]] = []
            for value in graph.inputs:
                storage, buffer, _ = trace.inputs[value.index]
                mark_shared(storage, buffer)
                copy = new_storage(storage.layout, buffer)
                copy.shared, copy.sharding = True, value.sharding
                given.append((storage, make(copy)))
            numbers = scalar_arrays(graph, trace.floats, trace.ints, trace.complexes)
        device = tensors[0].device
        given += [(None, torch.from_numpy(x).to(device)) for x in numbers if x is not None]
        self._parameters = [given[i] for i in kept]

    def hlo(self) -> bytes:
        """Return the module as a serialized ``HloModuleProto``."""
        return bytes(self._hlo.as_serialized_hlo_module_proto())

    def hlo_text(self) -> str:
        """Return the module as text."""
        return str(self._hlo.as_hlo_text())

    def tensor_parameter_id(self, tensor: torch.Tensor) -> int:
        """Return the number of the parameter that has the contents of a tensor at `build`; -1 where there is none."""
        storage = storage_of(cell_of(unwrapped(tensor)))
        return next((i for i, (owner, _) in enumerate(self._parameters) if owner is storage), -1)

    def device_parameter_id_tensor_mapping(self) -> dict[int, torch.Tensor]:
        """Return the parameters by number, as tensors of the device; the numbers of a script come in arrays."""
        return {i: t for i, (_, t) in enumerate(self._parameters)}

    def parameter_id_tensor_mapping(self) -> dict[int, torch.Tensor]:
        """Return the parameters by number, on the CPU."""
        return {i: t.cpu() for i, t in self.device_parameter_id_tensor_mapping().items()}
