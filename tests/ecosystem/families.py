"""Further families of models of transformers: decoders, mixtures, states, encoders, vision; each trained two steps."""

from __future__ import annotations

from typing import Any

import torch

from tests.ecosystem.case import Library, Numbers
from tests.ecosystem.steps import drawn, fit

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_GROUPED = {"vocab_size": 64, "num_key_value_heads": 2, **_SIZES}
_GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BERT = {"vocab_size": 64, "max_position_embeddings": 64, **_SIZES, **_STILL}
_PLAIN = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
_STAGES = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
_PATCHES: dict[str, Any] = {
    "depths": [1, 1], "hidden_sizes": [8, 16], "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2],
    "drop_path_rate": 0.0,
}  # fmt: skip
_SQUARE = {"image_size": 32, "patch_size": 8}

# The name of a class and of its configuration differ after "For", but for a few.
_Table = dict[str, tuple[str, dict[str, Any]]]

_DECODERS: _Table = {
    "GPT2LMHeadModel": ("GPT2Config", _GPT),
    "OPTForCausalLM": (
        "OPTConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64,
         "dropout": 0.0, "word_embed_proj_dim": 32},
    ),
    "BloomForCausalLM": ("BloomConfig", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "FalconForCausalLM": ("FalconConfig", {"alibi": True, "num_attention_heads": 4, **_PLAIN}),
    "MptForCausalLM": ("MptConfig", {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32}),
    "GPTJForCausalLM": ("GPTJConfig", {"rotary_dim": 4, **_GPT}),
    "Cohere2ForCausalLM": ("Cohere2Config", {"head_dim": 8, "sliding_window": 4, **_GROUPED}),
    "Starcoder2ForCausalLM": ("Starcoder2Config", {"residual_dropout": 0.0, "embedding_dropout": 0.0, **_GROUPED}),
    "StableLmForCausalLM": ("StableLmConfig", _GROUPED),
    "Gemma2ForCausalLM": ("Gemma2Config", {"head_dim": 8, "sliding_window": 4, **_GROUPED}),
    "XLNetLMHeadModel": (
        "XLNetConfig", {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "dropout": 0.0},
    ),
}  # fmt: skip

_STATES: _Table = {
    "Mamba2ForCausalLM": (
        "Mamba2Config", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4, **_PLAIN},
    ),
    "JambaForCausalLM": (
        "JambaConfig",
        {"mamba_d_state": 4, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
         "expert_layer_period": 2, "expert_layer_offset": 1, **_GROUPED},
    ),
    "RecurrentGemmaForCausalLM": (
        "RecurrentGemmaConfig",
        {**_GROUPED, "num_hidden_layers": 3, "num_key_value_heads": 1, "intermediate_size": 96, "lru_width": 32,
         "attention_window_size": 8, "head_dim": 8},
    ),
    "BambaForCausalLM": (
        "BambaConfig",
        {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4, "attn_layer_indices": [1],
         **_GROUPED},
    ),
    "Qwen3NextForCausalLM": (
        "Qwen3NextConfig",
        {"head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
         "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"], **_GROUPED},
    ),
}  # fmt: skip

_MIXTURES: _Table = {
    "DeepseekV3ForCausalLM": (
        "DeepseekV3Config",
        {**_GROUPED, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 2,
         "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1, "q_lora_rank": 16, "kv_lora_rank": 8,
         "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1},
    ),
    "OlmoeForCausalLM": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, **_GROUPED}),
    "Llama4ForCausalLM": (
        "Llama4TextConfig",
        {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 8, **_GROUPED},
    ),
    "GptOssForCausalLM": (
        "GptOssConfig",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, **_GROUPED},
    ),
}  # fmt: skip

_ENCODERS: _Table = {
    "BertForMaskedLM": ("BertConfig", _BERT),
    "AlbertForMaskedLM": ("AlbertConfig", {"embedding_size": 16, **_BERT}),
    "ElectraForMaskedLM": ("ElectraConfig", {"embedding_size": 16, **_BERT}),
    "DistilBertForMaskedLM": (
        "DistilBertConfig",
        {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "dropout": 0.0,
         "attention_dropout": 0.0},
    ),
    "LongformerForMaskedLM": ("LongformerConfig", {"attention_window": 4, **_BERT}),
    "BigBirdForMaskedLM": ("BigBirdConfig", {"block_size": 2, "num_random_blocks": 1, **_BERT}),
    "ModernBertForMaskedLM": (
        "ModernBertConfig",
        {"vocab_size": 64, "pad_token_id": 0, "local_attention": 4, "global_attn_every_n_layers": 2, **_SIZES},
    ),
    "FNetForMaskedLM": ("FNetConfig", {"intermediate_size": 64, "hidden_dropout_prob": 0.0, **_PLAIN}),
    "NystromformerForMaskedLM": ("NystromformerConfig", {"num_landmarks": 4, "segment_means_seq_len": 12, **_BERT}),
}  # fmt: skip

_PICTURES: _Table = {
    "BeitForImageClassification": ("BeitConfig", {"use_relative_position_bias": True, **_SQUARE, **_SIZES, **_STILL}),
    "Dinov2ForImageClassification": (
        "Dinov2Config", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **_SQUARE},
    ),
    "RegNetForImageClassification": ("RegNetConfig", {"groups_width": 8, **_STAGES}),
    "BitForImageClassification": ("BitConfig", {"layer_type": "preactivation", "num_groups": 4, **_STAGES}),
    "PoolFormerForImageClassification": ("PoolFormerConfig", {"padding": [2, 1], "sr_ratios": [2, 1], **_PATCHES}),
    "FocalNetForImageClassification": (
        "FocalNetConfig",
        {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "hidden_sizes": [8, 16], "focal_levels": [2, 2],
         "focal_windows": [3, 3], "drop_path_rate": 0.0},
    ),
    "Swinv2ForImageClassification": (
        "Swinv2Config",
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4,
         "drop_path_rate": 0.0},
    ),
}  # fmt: skip


def _trained(table: _Table, batch: dict[str, torch.Tensor]) -> Numbers:
    """Train each model of a table for two steps, and measure its first output."""
    import transformers

    found, device = {}, next(iter(batch.values())).device
    for name, (config, options) in table.items():
        torch.manual_seed(0)
        model = getattr(transformers, name)(getattr(transformers, config)(**options)).to(device)
        short = name.partition("For")[0].partition("LMHead")[0]
        found[short] = fit(model, lambda model=model: model(**batch).loss, steps=2)
    return found


def _words(device: torch.device) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0)).to(device)
    return {"input_ids": ids, "labels": ids}


def decoders(device: torch.device) -> Numbers:
    return _trained(_DECODERS, _words(device))


def states(device: torch.device) -> Numbers:
    return _trained(_STATES, _words(device))


def mixtures(device: torch.device) -> Numbers:
    return _trained(_MIXTURES, _words(device))


def encoders(device: torch.device) -> Numbers:
    return _trained(_ENCODERS, _words(device))


def pictures(device: torch.device) -> Numbers:
    batch = {"pixel_values": drawn(0, 2, 3, 32, 32).to(device), "labels": torch.tensor([0, 1], device=device)}
    return _trained(_PICTURES, batch)


LIBRARIES = [
    Library("transformers", "11 decoders more, from GPT-2 and BLOOM to Gemma 2 and XLNet", decoders, rtol=1e-3),
    Library("transformers", "models with states: Mamba 2, Jamba, RecurrentGemma, Bamba, Qwen3-Next", states, rtol=1e-3),
    Library("transformers", "mixtures of experts: DeepSeek V3, OLMoE, Llama 4, gpt-oss", mixtures, rtol=1e-3),
    Library("transformers", "9 encoders, from ALBERT to Longformer, BigBird and FNet", encoders, rtol=1e-3),
    Library("transformers", "7 vision models, from BEiT and DINOv2 to FocalNet and Swin v2", pictures, rtol=1e-3),
]
