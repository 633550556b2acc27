"""`scan_layers` on a mesh: the loop keeps the examples split and gathers the parameters of one layer at a time."""

from __future__ import annotations

import torch
from torch import nn

import lazytpu
from lazytpu import spmd
from lazytpu.debug import hlo
from lazytpu.debug.collectives import collectives_of
from lazytpu.debug.graph_text import optimized_hlo_of
from lazytpu.diagnosis import events
from lazytpu.ir.graph import SHARD
from tests.support.eight_devices import eight_devices

LAYERS, BACKWARD = 3, "lazytpu.scan_layers_backward"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(64), nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def gradient(mesh: spmd.Mesh | None) -> torch.Tensor:
    torch.manual_seed(0)
    tokens, layers = nn.Embedding(80, 64), nn.ModuleList([Layer() for _ in range(LAYERS)])
    model = nn.ModuleList([tokens, layers]).to(lazytpu.device())
    x = torch.randint(80, (16, 4)).to(lazytpu.device())
    if mesh is not None:
        spmd.fully_shard(model, mesh)
        spmd.mark_sharding(x, mesh, ("data",))
    lazytpu.mark_step()
    lazytpu.scan_layers(layers, tokens(x), checkpoint=True).square().mean().backward()
    lazytpu.mark_step()
    assert layers[1].up.weight.grad is not None
    return layers[1].up.weight.grad.cpu()


@eight_devices
def test_nothing_but_parameters_is_gathered_in_the_loop() -> None:
    want = gradient(None)
    got = gradient(spmd.Mesh((8,), ("data",)))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    event = next(e for e in reversed(events.compilations) if any(n.op.name == BACKWARD for n in e.graph.nodes))
    found = collectives_of(hlo.parse(optimized_hlo_of(event.executable.compiled)), event.graph.mesh, event.graph)
    marks = [str(node.args[1]) for node in event.graph.nodes if node.op.name == SHARD]
    assert len(marks) == 2 and all("data" in mark for mark in marks), marks  # what goes in, and its gradient
    inside = [c for c in found if c.op.startswith("lazytpu.scan_layers")]
    gathers = [c for c in inside if c.kind == "all-gather"]
    assert gathers and {c.kind for c in inside} <= {"all-gather", "all-reduce"}, inside
    assert all(c.runs == LAYERS and c.nbytes <= 64 * 128 * 4 for c in gathers), gathers  # weights of one layer
    assert sum(c.total_bytes for c in gathers) <= 2 * LAYERS * 2 * 64 * 128 * 4, gathers  # forward and backward
