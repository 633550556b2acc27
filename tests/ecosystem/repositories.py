"""Scripts of further repositories, each of which takes a device as an option or leaves it to Accelerate."""

from __future__ import annotations

from tests.ecosystem.case import NUMBER, Script

MAKEMORE, LLAMA, TIMM = "karpathy/makemore", "karpathy/llama2.c", "huggingface/pytorch-image-models"
DIFFUSERS, TRL = "huggingface/diffusers", "huggingface/trl"
GANS, WORDS, AGENTS = "eriklindernoren/PyTorch-GAN", "graykode/nlp-tutorial", "vwxyzjn/cleanrl"


def _names(model: str) -> Script:
    return Script(
        MAKEMORE,
        "",
        tuple(f"makemore.py --type {model} --max-steps 101 -n 0 --n-layer 2 -o out-{model}".split()),
        f"{model}: 100 steps, names sampled",
        rf"step 100 \| loss {NUMBER}",
        on_cpu=("--device=cpu",),
        on_device=("--device=tpu",),
        needs=("tensorboard",),
        label=model,
    )


def _pictures(label: str, script: str, arguments: str, tried: str, result: str, before: str = "") -> Script:
    common = ("tiny", *"--num-classes 2 --img-size 64 -b 8 --workers 1".split())
    return Script(
        TIMM,
        "",
        (script, *common, *arguments.split()),
        tried,
        result,
        rtol=2e-2,
        before=(("train.py", *common, *before.split()),) if before else (),
        on_cpu=("--device=cpu",),
        on_device=("--device=tpu",),
        data=("labelled",),
        needs=("torchvision", "timm"),
        label=label,
    )


def _tuned(script: str, data: str, tried: str) -> Script:
    arguments = (
        f"{script}.py --model_name_or_path net --dataset_name {data} --output_dir out-{script} --max_steps 6 "
        "--per_device_train_batch_size 4 --max_length 16 --gradient_checkpointing False --bf16 False --report_to none "
        "--logging_steps 2 --save_strategy no --learning_rate 1e-3 --seed 0"
    )
    return Script(
        TRL, "trl/scripts", tuple(arguments.split()), tried, rf"'train_loss': '?{NUMBER}", rtol=1e-2, data=("chats",),
        needs=("trl", "datasets", "accelerate"), label=script,
    )  # fmt: skip


def _words(folder: str, name: str, tried: str) -> Script:
    """Return a script that names no device and ends when its few sentences are learned."""
    cost = rf"cost =\s+{NUMBER}"
    return Script(WORDS, folder, (f"{name}.py",), tried, cost, rtol=0.1, options=("--default-device",), label=name)


def _agent(name: str, arguments: str, tried: str) -> Script:
    needs = ("tyro", "gymnasium", "tensorboard")
    return Script(
        AGENTS,
        "",
        (f"cleanrl/{name}.py", *arguments.split()),
        tried,
        r"(SPS:)",
        options=("--cuda",),
        needs=needs,
        label=name,
    )


_TRAIN = "--epochs 2 --lr 0.02 --seed 1 --log-interval 1 --drop-path 0 --no-prefetcher"

SCRIPTS = [
    *map(_names, ("transformer", "bow", "mlp", "rnn", "gru", "bigram")),
    Script(
        LLAMA,
        "",
        tuple(
            "train.py --compile=False --dtype=float32 --vocab_source=custom --vocab_size=128 --dim=32 --n_layers=2 "
            "--n_heads=4 --n_kv_heads=2 --max_seq_len=32 --batch_size=8 --gradient_accumulation_steps=2 --max_iters=40 "
            "--warmup_iters=5 --eval_interval=20 --eval_iters=2".split()
        ),
        "train.py: a small Llama, 40 steps of two batches, evaluation, checkpoints and the export",
        rf"40 \| loss {NUMBER}",
        on_cpu=("--device=cpu",),
        on_device=("--device=tpu",),
        data=("tokens",),
        needs=("sentencepiece", "requests"),
        label="train",
    ),
    _pictures(
        "resnet",
        "train.py",
        f"{_TRAIN} --model resnet10t --opt sgd --model-ema --model-ema-decay 0.9 --mixup 0.2 --reprob 0.25",
        "train.py: resnet10t, 2 epochs with mixup, random erasing and an average",
        rf"Train: 1 .*Loss:\s+{NUMBER}",
    ),
    _pictures(
        "vit",
        "train.py",
        f"{_TRAIN} --model vit_tiny_patch16_224 --model-kwargs img_size=64 --opt adamw --lr 1e-4 --clip-grad 1.0 --amp "
        "--amp-dtype bfloat16 --sched cosine",
        "train.py: a ViT, 2 epochs in bfloat16 with clipping",
        rf"Train: 1 .*Loss:\s+{NUMBER}",
    ),
    _pictures(
        "validate",
        "validate.py",
        "--model resnet10t --split validation --checkpoint out/one/last.pth.tar",
        "validate.py: the checkpoint of a training run",
        rf"Loss:\s+{NUMBER}",
        before=f"{_TRAIN} --model resnet10t --opt sgd --device cpu --output out --experiment one",
    ),
    Script(
        DIFFUSERS,
        "examples/unconditional_image_generation",
        tuple(
            "train_unconditional.py --train_data_dir tiny --model_config_name_or_path net --resolution 16 "
            "--train_batch_size 4 --num_epochs 3 --lr_warmup_steps 2 --ddpm_num_steps 50 --ddpm_num_inference_steps 4 "
            "--use_ema --save_images_epochs 3 --save_model_epochs 3 --output_dir out --dataloader_num_workers 0".split()
        ),
        "a U-Net trained on noise, 3 epochs with an average, pictures sampled",
        rf"loss={NUMBER}",
        rtol=0.3,
        data=("unlabelled",),
        needs=("diffusers", "accelerate", "datasets", "tensorboard"),
    ),
    Script(
        GANS,
        "implementations/gan",
        tuple("gan.py --n_epochs 2 --batch_size 32 --n_cpu 0 --sample_interval 7".split()),
        "a script for CUDA, run with --cuda: 16 steps of both networks, pictures of samples",
        rf"\[D loss: {NUMBER}\] \[G loss: {NUMBER}\]",
        rtol=0.3,
        options=("--cuda",),
        data=("gans",),
        needs=("torchvision", "scikit-learn"),
    ),
    _words("1-1.NNLM", "NNLM", "the first neural language model, 5,000 steps, on the default device"),
    _words("2-1.TextCNN", "TextCNN", "convolutions over words, 5,000 steps, on the default device"),
    _agent("ppo", "--total-timesteps 1024 --num-envs 2 --num-steps 128", "PPO with --cuda, 1,024 steps of CartPole"),
    _agent(
        "dqn",
        "--total-timesteps 600 --learning-starts 200 --buffer-size 1000 --target-network-frequency 50",
        "DQN with --cuda, 600 steps of CartPole",
    ),
    _tuned("sft", "tiny", "sft.py: a small Llama, 6 steps"),
    _tuned("dpo", "pairs", "dpo.py: a small Llama, 6 steps"),
]
