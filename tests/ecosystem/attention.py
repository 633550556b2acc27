"""Libraries of transformers whose attention is cheaper."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.ecosystem.case import Library, Numbers
from tests.ecosystem.steps import drawn, fit


def _tokens(device: torch.device) -> torch.Tensor:
    return torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(0)).to(device)


def _trained(model: nn.Module, x: torch.Tensor, **options: Any) -> float:
    return fit(model, lambda: model(x, **options).square().mean(), 2)


def cheaper(device: torch.device) -> Numbers:
    """Train five models whose attention costs less than the square of the length."""
    from colt5_attention import ConditionalRoutedAttention
    from linear_attention_transformer import LinearAttentionTransformerLM
    from linformer import LinformerLM
    from perceiver_pytorch import Perceiver
    from performer_pytorch import PerformerLM

    sizes: dict[str, Any] = {"num_tokens": 32, "dim": 32, "depth": 1, "heads": 2}
    makers = {
        "Performer": lambda: PerformerLM(
            max_seq_len=16, causal=False, nb_features=8, dim_head=16, feature_redraw_interval=None, **sizes
        ),
        "Linformer": lambda: LinformerLM(seq_len=16, k=4, **sizes),
        "linear": lambda: LinearAttentionTransformerLM(
            max_seq_len=16, causal=True, blindspot_size=1, n_local_attn_heads=0, **sizes
        ),
    }
    found = {}
    for name, make in makers.items():
        torch.manual_seed(0)
        found[name] = _trained(make().to(device), _tokens(device))
    torch.manual_seed(0)
    perceiver = Perceiver(
        input_channels=3, input_axis=2, num_freq_bands=3, max_freq=10.0, depth=1, num_latents=8, latent_dim=16,
        cross_heads=1, latent_heads=2, cross_dim_head=8, latent_dim_head=8, num_classes=4,
    ).to(device)  # fmt: skip
    found["Perceiver"] = _trained(perceiver, drawn(0, 2, 8, 8, 3).to(device))
    torch.manual_seed(0)
    routed = ConditionalRoutedAttention(
        dim=16, light_dim_head=8, light_heads=2, light_window_size=8, heavy_dim_head=8, heavy_heads=2,
        num_heavy_tokens_q=4, num_heavy_tokens_kv=4,
    ).to(device)  # fmt: skip
    mask = torch.ones(2, 16, dtype=torch.bool, device=device)
    return found | {"CoLT5": _trained(routed, drawn(0, 2, 16, 16).to(device), mask=mask)}


LIBRARIES = [
    Library("performer-pytorch", "with Linformer, linear attention, Perceiver and CoLT5: trained", cheaper, rtol=1e-3,
            needs=("linformer", "linear-attention-transformer", "perceiver-pytorch", "CoLT5-attention")),
]  # fmt: skip
