"""``torch.compile(model, backend="lazytpu")``: whole graphs from Dynamo, compiled by the device's own compiler."""

from lazytpu.frontends.dynamo.entry import backend

__all__ = ["backend"]
