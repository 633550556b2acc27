"""The few functions of torch_xla's C++ module that scripts call to look at graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import lazytpu
from lazytpu.compat import lacking

__getattr__ = lacking.names_of(__name__)


def _get_xla_tensors_text(tensors: Sequence[torch.Tensor]) -> str:
    """The IR of the pending graph of some tensors."""
    return lazytpu.ir_text(*tensors)


def _get_xla_tensors_dot(tensors: Sequence[torch.Tensor]) -> str:
    """The same for Graphviz."""
    return lazytpu.ir_dot(*tensors)


def _get_xla_tensors_hlo(tensors: Sequence[torch.Tensor]) -> str:
    """Its HLO."""
    return lazytpu.hlo_text(*tensors)


def _xla_sync_multi(tensors: Sequence[torch.Tensor], devices: Sequence[str] = (), wait: bool = True) -> None:
    """Runs what is pending."""
    lazytpu.mark_step(wait=wait)


def _xla_step_marker(device: str = "", devices: Sequence[str] = (), wait: bool = False, **_: object) -> None:
    """Ends a step."""
    lazytpu.mark_step(wait=wait)


def _xla_get_default_device() -> str:
    """The device's name."""
    return str(lazytpu.device())


def _xla_metrics_report() -> str:
    """See `torch_xla.debug.metrics.metrics_report`."""
    return lazytpu.metrics.torch_xla_report()
