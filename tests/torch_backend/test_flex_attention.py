"""``flex_attention`` on the device, in all that its programs do with scores, against the same in plain ops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own: it is not compiled

SLOPES = torch.linspace(0.1, 0.4, 4)
Score = Callable[..., torch.Tensor]


def capped(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.tanh(score / 2) * 2


def causal(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q >= k


def operands(device: str) -> list[torch.Tensor]:
    """Return a query of four heads, a key and a value of two, and slopes of the heads; each wants a gradient."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, heads, 6, 4) for heads in (4, 2, 2)]
    return [t.to(device).requires_grad_() for t in (*tensors, SLOPES.clone())]


def plain(score: Score | None) -> list[torch.Tensor]:
    """Return the result and the gradients of what ``flex_attention`` computes, on the CPU."""
    query, key, value, slopes = operands("cpu")
    scores = query @ key.repeat_interleave(2, 1).mT * query.shape[-1] ** -0.5
    if score is capped:
        scores = torch.tanh(scores / 2) * 2
    elif score is not None:
        scores = scores + slopes[:, None, None] * (torch.arange(6)[:, None] - torch.arange(6))
    scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
    result = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    result.square().sum().backward()
    return [result, query.grad, key.grad, value.grad]


@pytest.mark.parametrize("kind", ["plain", "capped", "biased"])
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_and_its_gradients(kind: str, compiled: bool) -> None:
    torch._dynamo.reset()
    query, key, value, slopes = operands("tpu")

    def biased(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return score + slopes[h] * (q - k)

    score = {"plain": None, "capped": capped, "biased": biased}[kind]
    mask = create_block_mask(causal, None, None, 6, 6, device="tpu")
    attend = torch.compile(flex_attention) if compiled else flex_attention
    result = attend(query, key, value, score_mod=score, block_mask=mask, enable_gqa=True)
    result.square().sum().backward()
    found = [x.detach().cpu() for x in (result, query.grad, key.grad, value.grad)]
    torch.testing.assert_close(found, [x.detach() for x in plain(score)], rtol=1e-4, atol=1e-5)
    assert (slopes.grad is not None) == (kind == "biased")


def test_without_gradients_it_is_what_the_cpu_gives() -> None:
    tensors = [x.detach() for x in operands("cpu")[:3]]
    mask = create_block_mask(causal, None, None, 6, 6, device="cpu")
    expected = flex_attention(*tensors, block_mask=mask, enable_gqa=True)
    with torch.inference_mode():
        found = flex_attention(*(x.to("tpu") for x in tensors), block_mask=mask.to("tpu"), enable_gqa=True)
    torch.testing.assert_close(found.cpu(), expected)
    assert found.stride() == expected.stride()


def test_transformers_takes_it() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = torch.arange(10).reshape(2, 5)
    scores = []
    for device, kind in (("cpu", "eager"), ("tpu", "flex_attention")):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(vocab_size=16, num_key_value_heads=2, attn_implementation=kind, **sizes)
        scores.append(transformers.LlamaForCausalLM(config).to(device)(ids.to(device)).logits.detach().cpu())
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-4, atol=1e-5)


def test_a_compiled_function_that_makes_its_tensors_is_the_devices() -> None:
    torch._dynamo.reset()

    @torch.compile
    def made() -> torch.Tensor:
        return torch.arange(4, device="tpu") * 2

    assert made().tolist() == [0, 2, 4, 6]
