"""Ops do not import Dynamo, and once it is there torch's functions are shielded from it as torch wants."""

from __future__ import annotations

from tests.support.processes import run_code

PROGRAM = """
import sys
import torch
import torch.nn.functional as F
import lazytpu

device = lazytpu.device()
x = torch.randn(3, 4).to(device)
w = torch.randn(5, 4, device=device, requires_grad=True)
y = F.layer_norm(F.gelu(x @ w.t()).softmax(-1), (5,)).pow(2).where(x[:, :1] > 0, 0.5).clamp(-1, 1)
(F.cross_entropy(y, torch.tensor([0, 1, 2]).to(device)) + y.std() + y.exp().rsqrt().mean()).backward()
w.grad.cpu()
print("torch._dynamo" in sys.modules)

import torch._dynamo
from lazytpu.torch_backend import shields

print(torch.compile(lambda a: (a + 1).softmax(-1), backend="lazytpu")(x).shape)
z = x.tanh() + 1
print(any(getattr(f, "__dynamo_disable", None) is f for f in shields._shielded()))
"""


def test_dynamo_is_imported_by_those_who_use_it() -> None:
    done = run_code(PROGRAM)
    assert done.stdout.splitlines() == ["False", "torch.Size([3, 4])", "False"], done.stderr
