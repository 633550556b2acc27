"""Models of transformers of many kinds, and what trains, tunes and samples them."""

from __future__ import annotations

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch

import lazytpu
from tests.ecosystem.case import Library, Numbers
from tests.ecosystem.steps import drawn, fit

WORDS = "<pad> <s> </s> <unk> the cat dog sat ran on mat a red blue is happy sad yes no user assistant : . what why"
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_GROUPED = {"vocab_size": 64, "num_key_value_heads": 2, **_SIZES}
_WAVES = {
    "vocab_size": 16, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0, "final_dropout": 0.0,
}  # fmt: skip
_BOTH_SIDES = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0,
}  # fmt: skip
_BERT = {"vocab_size": 64, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
         "attention_probs_dropout_prob": 0.0, **_SIZES}  # fmt: skip

# A model of transformers, what its configuration is given, and which inputs it gets.
_KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
         "decoder_start_token_id": 0},
        "text",
    ),
    "BartForConditionalGeneration": ("BartConfig", {**_BOTH_SIDES, "max_position_embeddings": 32}, "text"),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", {"vocab_size": 64, **_SIZES}, "text"),
    "Qwen3ForCausalLM": ("Qwen3Config", {"head_dim": 8, **_GROUPED}, "text"),
    "Qwen3MoeForCausalLM": (
        "Qwen3MoeConfig",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "output_router_logits": True, **_GROUPED},
        "text",
    ),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 4, **_GROUPED}, "text"),
    "MistralForCausalLM": ("MistralConfig", {"sliding_window": 4, **_GROUPED}, "text"),
    "Phi3ForCausalLM": ("Phi3Config", {"pad_token_id": 0, **_GROUPED}, "text"),
    "MambaForCausalLM": (
        "MambaConfig", {"vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}, "text",
    ),
    "RwkvForCausalLM": (
        "RwkvConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32,
         "context_length": 16},
        "text",
    ),
    "RobertaForMaskedLM": ("RobertaConfig", _BERT, "text"),
    "DebertaV2ForMaskedLM": (
        "DebertaV2Config", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, **_BERT},
        "text",
    ),
    "ViTForImageClassification": ("ViTConfig", {"image_size": 16, "patch_size": 4, **_SIZES}, "picture"),
    "SwinForImageClassification": (
        "SwinConfig",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
         "drop_path_rate": 0.0},
        "picture",
    ),
    "ConvNextForImageClassification": (
        "ConvNextConfig", {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}, "picture",
    ),
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", {**_WAVES, **_SIZES}, "sound"),
}  # fmt: skip


def _inputs(kind: str, device: torch.device) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (2, 12), generator=draw)
    given = {
        "text": {"input_ids": ids, "labels": ids},
        "picture": {"pixel_values": drawn(0, 2, 3, 16, 16), "labels": torch.tensor([0, 1])},
        "sound": {"input_values": drawn(0, 2, 800), "labels": ids[:, :6] % 13 + 3},
    }
    return {name: part.to(device) for name, part in given[kind].items()}


def kinds(device: torch.device) -> Numbers:
    """Train models of many kinds for two steps."""
    import transformers

    found = {}
    for name, (config, options, inputs) in _KINDS.items():
        torch.manual_seed(0)
        model = getattr(transformers, name)(getattr(transformers, config)(**options)).to(device)
        batch = _inputs(inputs, device)
        found[name.partition("For")[0]] = fit(model, lambda model=model, batch=batch: model(**batch).loss, steps=2)
    return found


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=64, **tokens, **_GROUPED, **changes))


def pictures_and_text(device: torch.device) -> Numbers:
    """Train CLIP and LLaVA-NeXT, and let LLaVA say something of a picture."""
    import transformers as T

    seen = {"image_size": 8, "patch_size": 4, **_SIZES}
    torch.manual_seed(0)
    text = {"max_position_embeddings": 16, "eos_token_id": 2, "vocab_size": 64, **_SIZES}
    clip = T.CLIPModel(T.CLIPConfig(text_config=text, vision_config=seen, projection_dim=16)).to(device)
    ids, picture = _inputs("text", device)["input_ids"], drawn(0, 2, 3, 8, 8).to(device)
    both = {"input_ids": ids, "pixel_values": picture, "return_loss": True}
    torch.manual_seed(0)
    config = T.LlavaNextConfig(
        vision_config=T.CLIPVisionConfig(**seen), text_config=T.LlamaConfig(**_GROUPED), image_token_index=1,
        image_grid_pinpoints=[[8, 8], [8, 16]], vision_feature_select_strategy="default",
    )  # fmt: skip
    llava = T.LlavaNextForConditionalGeneration(config).to(device)
    said = torch.tensor([[1] * 10 + [5, 6, 7]], device=device)
    shown = {"pixel_values": drawn(1, 1, 2, 3, 8, 8).to(device), "image_sizes": torch.tensor([[8, 8]], device=device)}
    return {
        "CLIP": fit(clip, lambda: clip(**both).loss, steps=2),
        "LLaVA-NeXT": fit(llava, lambda: llava(input_ids=said, labels=said, **shown).loss, steps=2),
    }


def experts(device: torch.device) -> Numbers:
    """Train Mixtral in each implementation of its experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    batch, found = _inputs("text", device), {}
    for way in ("eager", "batched_mm", "grouped_mm"):
        torch.manual_seed(0)
        model = MixtralForCausalLM(MixtralConfig(num_local_experts=4, output_router_logits=True, **_GROUPED))
        model.set_experts_implementation(way)
        model.to(device)
        found[way] = fit(model, lambda model=model: model(**batch).loss, steps=2)
    return found


def decoded(device: torch.device) -> Numbers:
    """Decode in twelve ways that draw nothing, and count the programs of 40 tokens with a static cache."""
    model, ids = llama().eval(), torch.tensor([[1, 5, 9, 3, 7], [1, 7, 7, 4, 6]])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)  # so that not every token is the same
    model, ids = model.to(device), ids.to(device)
    ways: dict[str, dict[str, Any]] = {
        "plain": {}, "beams": {"num_beams": 3, "length_penalty": 0.5}, "repetition": {"repetition_penalty": 1.3},
        "n-grams": {"no_repeat_ngram_size": 2}, "words": {"bad_words_ids": [[5], [7, 8]]}, "length": {"min_length": 14},
        "biases": {"sequence_bias": [[[6], 2.0], [[7, 9], -3.0]]}, "guidance": {"guidance_scale": 1.5},
        "suppressed": {"suppress_tokens": [3, 9]}, "no cache": {"use_cache": False},
        "static": {"cache_implementation": "static"}, "chunks": {"prefill_chunk_size": 3},
    }  # fmt: skip
    found = {}
    for name, options in ways.items():
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, **options)
        found[name] = float((text.cpu() * torch.arange(1.0, text.shape[1] + 1)).sum())
    looked_up = model.generate(ids[:1], max_new_tokens=12, prompt_lookup_num_tokens=2, do_sample=False)
    helped = model.generate(ids[:1], max_new_tokens=12, assistant_model=llama().eval().to(device), do_sample=False)
    found |= {"looked up": float(looked_up.sum()), "assisted": float(helped.sum())}
    before = lazytpu.metrics.counter("compile")
    model.generate(ids, max_new_tokens=40, min_new_tokens=40, do_sample=False, cache_implementation="static")
    return found | {"few programs": float(lazytpu.metrics.counter("compile") - before <= 4)}


def seeds(device: torch.device) -> Numbers:
    """Sample text twice with one seed."""
    model, ids = llama().eval().to(device), torch.tensor([[1, 5, 9, 2]], device=device)
    texts, drawing = [], {"do_sample": True, "top_k": 20, "top_p": 0.9}
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts.append(model.generate(ids, max_new_tokens=12, eos_token_id=None, **drawing).cpu())
    return {"same": float(torch.equal(texts[0], texts[1])), "other": float(not torch.equal(texts[0], texts[2]))}


def _rows(count: int = 32, length: int = 12) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, 64, (count, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row.clone(), "attention_mask": torch.ones_like(row)} for row in ids]


def _arguments(kind: Any, device: torch.device, folder: str, **more: Any) -> Any:
    return kind(
        output_dir=folder, per_device_train_batch_size=4, num_train_epochs=1, report_to=[], disable_tqdm=True,
        save_strategy="no", seed=0, use_cpu=device.type == "cpu", **more,
    )  # fmt: skip


def checkpointed(device: torch.device) -> Numbers:
    """Train with gradient checkpointing, label smoothing and clipping; and with ``torch_compile``."""
    from transformers import Trainer, TrainingArguments

    found = {}
    smooth = {"gradient_checkpointing": True, "label_smoothing_factor": 0.1, "max_grad_norm": 0.5, "warmup_steps": 2}
    compiled = {} if device.type == "cpu" else {"torch_compile": True}
    with TemporaryDirectory() as folder:
        for name, options in (("checkpointed", smooth), ("compiled", compiled)):
            arguments = _arguments(TrainingArguments, device, folder, **options)
            trainer = Trainer(llama(), arguments, train_dataset=_rows(), eval_dataset=_rows(8))
            found[name] = trainer.train().training_loss
            found[f"test, {name}"] = trainer.evaluate()["eval_loss"]
    return found


def halves(device: torch.device) -> Numbers:
    """Train in float16 with a gradient scaler; the CPU does without it."""
    from transformers import Trainer, TrainingArguments

    with TemporaryDirectory() as folder:
        arguments = _arguments(TrainingArguments, device, folder, fp16=device.type != "cpu", logging_steps=6)
        return {"loss": Trainer(llama(), arguments, train_dataset=_rows()).train().training_loss}


def summaries(device: torch.device) -> Numbers:
    """Train T5, and evaluate it by what it generates."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    def score(predicted: Any) -> dict[str, float]:
        return {"score": float((predicted.predictions * (predicted.predictions >= 0)).sum())}

    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "eos_token_id": 1}
    model = T5ForConditionalGeneration(T5Config(**_KINDS["T5ForConditionalGeneration"][1], **tokens))
    rows = [{"input_ids": row["input_ids"], "labels": row["labels"][:6]} for row in _rows(16, 10)]
    with TemporaryDirectory() as folder:
        options = {"predict_with_generate": True, "generation_max_length": 8, "learning_rate": 1e-2}
        arguments = _arguments(Seq2SeqTrainingArguments, device, folder, **options)
        trainer = Seq2SeqTrainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8], compute_metrics=score)
        loss = trainer.train().training_loss
        return {"loss": loss, "generated": trainer.evaluate()["eval_score"]}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS.split())}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.chat_template = "{% for m in messages %}{{m['role']}} : {{m['content']}} {% endfor %}"
    return made


def preferences(device: torch.device) -> Numbers:
    """Tune with SFT, DPO and GRPO of TRL."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    texts = Dataset.from_dict({"text": ["the cat sat on a mat", "a red dog ran", "a dog is happy", "a cat is sad"] * 4})
    asked = {"prompt": ["what is the cat", "why is the dog"] * 4}
    pairs = Dataset.from_dict({**asked, "chosen": ["happy", "red"] * 4, "rejected": ["sad", "blue"] * 4})
    plain = {"bf16": False, "gradient_checkpointing": False}
    words = {"processing_class": tokenizer()}
    with TemporaryDirectory() as folder:
        llama().save_pretrained(folder)
        model = type(llama()).from_pretrained(folder)  # DPO loads its reference from there
        sft = SFTTrainer(
            llama(), _arguments(SFTConfig, device, folder, max_length=16, **plain), train_dataset=texts, **words
        ).train()
        dpo = DPOTrainer(
            model, args=_arguments(DPOConfig, device, folder, max_length=32, **plain), train_dataset=pairs, **words
        ).train()
        drawing = {"num_generations": 2, "max_completion_length": 6, **plain}
        grpo = GRPOTrainer(
            llama(), reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
            args=_arguments(GRPOConfig, device, folder, **drawing), train_dataset=Dataset.from_dict(asked), **words,
        ).train()  # fmt: skip
    return {"SFT": sft.training_loss, "DPO": dpo.training_loss, "GRPO": float(grpo.training_loss is not None)}


def contrast(device: torch.device) -> Numbers:
    """Train CLIP of open_clip with its loss."""
    from open_clip import ClipLoss
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    torch.manual_seed(0)
    vision = CLIPVisionCfg(layers=2, width=32, head_width=8, patch_size=8, image_size=32)
    model = CLIP(16, vision, CLIPTextCfg(context_length=12, vocab_size=64, width=32, heads=4, layers=2)).to(device)
    pictures, loss = drawn(0, 4, 3, 32, 32).to(device), ClipLoss()
    ids = torch.randint(1, 64, (4, 12), generator=torch.Generator().manual_seed(0)).to(device)
    adam: Callable[..., torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, 1e-3)  # noqa: E731
    return {"loss": fit(model, lambda: loss(*model(pictures, ids)[:3]), make=adam)}


def pipelines(device: torch.device) -> Numbers:
    """Run two pipelines."""
    from transformers import BertConfig, BertForSequenceClassification, pipeline

    words = tokenizer()
    text = pipeline("text-generation", model=llama(), tokenizer=words, device=device)("the cat", max_new_tokens=5,
                                                                                     do_sample=False)  # fmt: skip
    torch.manual_seed(0)
    bert = BertForSequenceClassification(BertConfig(num_labels=3, pad_token_id=0, **_BERT)).eval()
    scores = pipeline("text-classification", model=bert, tokenizer=words, device=device)(["the cat", "a red dog ran"])
    return {"text": float(sum(map(ord, text[0]["generated_text"]))), "score": sum(row["score"] for row in scores)}


def sentences(device: torch.device) -> Numbers:
    """Train a SentenceTransformer, and encode with it."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.base.modules.transformer import Transformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules.pooling import Pooling
    from transformers import BertConfig, BertModel

    with TemporaryDirectory() as folder:
        torch.manual_seed(0)
        BertModel(BertConfig(**_BERT)).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        model = SentenceTransformer(modules=[Transformer(folder), Pooling(32)], device=str(device))
        rows = {"anchor": ["the cat sat", "a red dog ran"] * 8, "positive": ["a cat sat on a mat", "a dog is red"] * 8}
        loss = SentenceTransformerTrainer(
            model, _arguments(SentenceTransformerTrainingArguments, device, folder),
            train_dataset=Dataset.from_dict(rows), loss=MultipleNegativesRankingLoss(model),
        ).train().training_loss  # fmt: skip
    return {"loss": loss, "encoded": float(model.encode(["the cat sat"]).sum())}


LIBRARIES = [
    Library("transformers", "16 kinds of models trained, from T5 to Mamba, Swin and Wav2Vec2", kinds, rtol=1e-3),
    Library("transformers", "CLIP and LLaVA-NeXT trained", pictures_and_text, rtol=1e-3),
    Library("transformers", "Mixtral trained, in each implementation of its experts", experts, rtol=1e-3),
    Library("transformers", "generate: 14 ways of decoding, 40 tokens with a static cache", decoded),
    Library("transformers", "generate: sampling repeats with a seed", seeds),
    Library("transformers", "Trainer: fp16=True", halves, rtol=2e-2, needs=("accelerate",)),
    Library("transformers", "Trainer: gradient checkpointing, label smoothing; torch_compile=True", checkpointed,
            rtol=1e-3, needs=("accelerate",)),
    Library("transformers", "Seq2SeqTrainer: T5 evaluated by what it generates", summaries, rtol=1e-3,
            needs=("accelerate",)),
    Library("transformers", "pipelines: text generation, classification", pipelines),
    Library("trl", "SFT, DPO and GRPO of a small Llama", preferences, rtol=1e-2, needs=("datasets",)),
    Library("sentence-transformers", "trained with a ranking loss, encode", sentences, rtol=1e-3, needs=("datasets",)),
    Library("open_clip_torch", "CLIP trained with ClipLoss", contrast, rtol=1e-3),
]  # fmt: skip
