"""Inference without the wrapper that AOTAutograd puts around a graph, where that wrapper has nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lazytpu.frontends.dynamo.compiled import CompiledGraph
from lazytpu.frontends.dynamo.hit import quick

_NEW = ("non_alias", "unsafe_view_alias")  # kinds of results that the wrapper hands on as they are


def direct_call(graph: CompiledGraph, metadata: Any, example_inputs: Sequence[Any]) -> Callable[..., object] | None:
    """Return the graph as Dynamo calls it; None where AOTAutograd's wrapper is needed.

    The wrapper takes a microsecond or two of each call.  It does what the graph cannot do itself: changes of
    arguments, results that share memory, tensors made of others, the mode of gradients.  The graph of a function that
    has none of these takes the function's own arguments and gives its own results.

    Args:
        graph: the only one that was made of a function called without gradients.
        metadata: what AOTAutograd found out about the function (``ViewAndMutationMeta``), or None.
        example_inputs: the function's arguments.
    """
    if metadata is None or graph.kind != "inference" or not _is_plain(metadata):
        return None
    (output,) = graph.module.graph.find_nodes(op="output")
    arguments = len(graph.module.graph.find_nodes(op="placeholder"))
    if not arguments == len(example_inputs) == len(metadata.input_info):
        return None
    if not isinstance(output.args[0], (list, tuple)) or len(output.args[0]) != len(metadata.output_info):
        return None
    if any(isinstance(x, (list, tuple, dict)) or is_traceable_wrapper_subclass(x) for x in example_inputs):
        return None
    return quick(graph)


def _is_plain(metadata: Any) -> bool:
    """Return whether a function changes none of its arguments, and all it returns are new tensors or numbers.

    A version of torch that has other fields than those asked for here keeps its wrapper.
    """
    try:
        return (
            all(x.mutation_type.name == "NOT_MUTATED" for x in metadata.input_info)
            and all(x.output_type.name in _NEW and not x.dynamic_dims for x in metadata.output_info)
            and not metadata.num_intermediate_bases
            and not metadata.tokens
            and not metadata.num_graphsafe_rng_states
            and not metadata.is_rng_op_functionalized
            and metadata.grad_enabled_mutation is None
            and not getattr(metadata, "act_input_indices", ())  # of torch 2.13 alone
        )
    except AttributeError:
        return False
