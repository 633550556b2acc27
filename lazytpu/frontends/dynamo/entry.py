"""The backend that Dynamo calls with each graph it captures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lazytpu.dispatch.composites import FUSED
from lazytpu.dispatch.recurrent import TRACED
from lazytpu.frontends.dynamo.compiled import CompiledGraph
from lazytpu.frontends.dynamo.direct import direct_call
from lazytpu.frontends.dynamo.dump_module import positions_of, weight_names
from lazytpu.frontends.dynamo.hit import boxed
from lazytpu.frontends.dynamo.padded_batches import PaddedGraph, Sizes, sizes_of
from lazytpu.frontends.dynamo.partition import partition
from lazytpu.frontends.dynamo.written_masks import as_places


def backend(module: torch.fx.GraphModule, example_inputs: Sequence[object], **options: Any) -> Callable[..., Any]:
    """Compile one graph of a function given to ``torch.compile(function, backend="lazytpu")``.

    AOTAutograd makes the graphs of the forward and the backward pass; each becomes one executable, compiled when it is
    first called, and again for arguments of other sizes.

    Args:
        module: what Dynamo captured.
        example_inputs: the arguments of the first call; on the device, or on the CPU, from where each call moves them.
        options: ``options={"fullgraph": True}`` of ``torch.compile`` makes a graph that cannot be one program an error;
            otherwise its ops are recorded one by one, with a warning.
            ``{"pad": True}`` pads batches of varying size to the next power of two, ``{"pad": [8, 32]}`` to the next of
            these sizes, so that few programs are compiled; it is for calls without gradients, and refused where the
            rows of a batch are not known to be independent.

    Raises:
        TypeError: another option was given.
        UnsupportedOpError: the graph cannot be what an option demands.
    """
    settings = dict(options.pop("options", None) or {})
    fullgraph = bool(settings.pop("fullgraph", False))
    pad = sizes_of(settings.pop("pad", False))
    if settings or any(options.values()):
        raise TypeError(f'backend="lazytpu" has the options "fullgraph" and "pad" only, got {settings or options}')
    # torch._dynamo takes a second to import, and is there when this is called
    from torch._dynamo.backends.common import aot_autograd

    for function, as_one in TRACED.items():
        for node in module.graph.find_nodes(op="call_function", target=function):
            node.target = as_one
    as_places(module)
    names = weight_names(module)
    made: list[tuple[CompiledGraph | PaddedGraph, Any]] = []

    def compile_as(kind: str) -> Callable[..., object]:
        return partial(_compile, made, kind, fullgraph, pad, names)

    compile_aot = aot_autograd(
        fw_compiler=compile_as("forward"),
        bw_compiler=compile_as("backward"),
        inference_compiler=compile_as("inference"),
        decompositions=FUSED,
        partition_fn=partition,
        keep_inference_input_mutations=True,  # copies to arguments stay in the graph, which can take over their memory
    )
    wrapped: Callable[..., object] = compile_aot(module, example_inputs)
    graph, metadata = made[0] if len(made) == 1 else (None, None)
    direct = direct_call(graph, metadata, example_inputs) if isinstance(graph, CompiledGraph) else None
    return direct or wrapped


def _compile(
    made: list[tuple[CompiledGraph | PaddedGraph, object]],
    kind: str,
    fullgraph: bool,
    pad: Sizes,
    names: Sequence[str],
    module: torch.fx.GraphModule,
    example_inputs: Sequence[object],
) -> Callable[[list[object]], list[object]]:
    weights = {} if kind == "backward" else positions_of(module, names)
    graph = CompiledGraph(module, kind, _saved(kind), fullgraph, weights)
    called = graph if pad is False else PaddedGraph(graph, pad)
    context = torch._guards.TracingContext.try_get()
    made.append((called, context and context.fw_metadata))
    return boxed(called) if isinstance(called, CompiledGraph) else called


def _saved(kind: str) -> tuple[int, ...]:
    """Return positions of arguments of a backward graph that nobody sees after it: activations saved for it alone."""
    context = torch._guards.TracingContext.try_get()
    if kind != "backward" or context is None or context.fw_metadata is None:
        return ()
    saved = tuple(context.fw_metadata.bw_donated_idxs or ())
    context.fw_metadata.bw_donated_idxs = []  # else torch refuses retain_graph=True, for which we keep them
    return saved
