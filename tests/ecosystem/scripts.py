"""Public scripts, run as they are; `--scripts DIR` has checkouts of their repositories."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.ecosystem import material, repositories
from tests.ecosystem.case import NUMBER, Missing, Outcome, Script, judge, version

EXAMPLES, NANO, MINI = "pytorch/examples", "karpathy/nanoGPT", "karpathy/minGPT"
LIMIT_S = 900  # seconds a script may take
ROOT = Path(__file__).parents[2]

_TINY_GPT = tuple(
    f"--{option}"
    for option in (
        "dtype=float32 compile=False eval_iters=4 eval_interval=40 log_interval=10 block_size=64 batch_size=8 "
        "n_layer=3 n_head=4 n_embd=64 dropout=0.0 max_iters=80 lr_decay_iters=80 warmup_iters=10"
    ).split()
)
_CONFIG = ("train.py", "config/train_shakespeare_char.py")
_PREPARE = ("data/shakespeare_char/prepare.py",)
_VISION = ("torchvision", "scikit-learn")


def _language(model: str) -> Script:
    arguments = f"main.py --accel --model {model} --epochs 2 --emsize 64 --nhid 64 --log-interval 10 --lr 2".split()
    return Script(
        EXAMPLES,
        "word_language_model",
        tuple(arguments),
        f"{model}, 2 epochs, saved and loaded",
        rf"End of training \| test loss\s+{NUMBER}",
        rtol=0.1,
        data=("sentences",),
        label=model.lower(),
    )


SCRIPTS = [
    Script(
        EXAMPLES,
        "mnist",
        ("main.py", "--epochs", "2"),
        "2 epochs with a worker process",
        rf"Average loss: {NUMBER}",
        rtol=0.3,
        data=("mnist",),
        needs=_VISION,
    ),
    Script(
        EXAMPLES,
        "mnist_forward_forward",
        tuple("main.py --epochs 30 --train_size 500 --test_size 300".split()),
        "30 epochs of each layer",
        rf"Loss:\s+{NUMBER}\s+train error",
        rtol=0.05,
        data=("mnist beside",),
        needs=_VISION,
    ),
    Script(
        EXAMPLES,
        "vae",
        ("main.py", "--epochs", "2"),
        "2 epochs, pictures of samples",
        rf"Test set loss: {NUMBER}",
        rtol=0.05,
        data=("mnist",),
        needs=_VISION,
    ),
    Script(
        EXAMPLES,
        "siamese_network",
        tuple("main.py --epochs 1 --batch-size 32 --test-batch-size 200 --log-interval 40".split()),
        "1 epoch",
        rf"Average loss: {NUMBER}",
        rtol=0.15,
        data=("mnist",),
        needs=_VISION,
    ),
    Script(
        EXAMPLES,
        "dcgan",
        tuple(
            "main.py --dataset mnist --dataroot ../data --accel --imageSize 64 --ngf 16 --ndf 16 --niter 1 "
            "--manualSeed 1".split()
        ),
        "1 epoch of both networks, checkpoints and pictures",
        rf"Loss_D: {NUMBER}",
        rtol=0.1,
        data=("mnist",),
        needs=_VISION,
    ),
    Script(
        EXAMPLES,
        "imagenet",
        tuple("main.py tiny --epochs 2 --batch-size 8 --workers 1 --print-freq 1 --seed 1 --lr 0.01".split()),
        "ResNet-18, 2 epochs of pictures in folders, validation and checkpoints",
        rf"\*\s+Acc@1\s+{NUMBER}",
        rtol=0.25,
        data=("folders",),
        needs=_VISION,
    ),
    Script(
        EXAMPLES,
        "super_resolution",
        tuple("main.py --upscale_factor 3 --batchSize 4 --testBatchSize 2 --nEpochs 2 --accel --threads 1".split()),
        "2 epochs, the model saved whole",
        rf"Avg\. PSNR: {NUMBER}",
        rtol=0.02,
        data=("super resolution",),
        needs=("torchvision", "six"),
    ),
    Script(
        EXAMPLES,
        "fast_neural_style",
        tuple(
            "neural_style/neural_style.py train --dataset tiny --save-model-dir out --epochs 1 --batch-size 2 "
            "--image-size 64 --style-image tiny/style/000.jpg --log-interval 1".split()
        ),
        "a style trained against VGG-16 of random weights",
        rf"total: {NUMBER}",
        rtol=0.02,
        on_device=("--accel",),
        data=("styles",),
        needs=("torchvision",),
    ),
    Script(
        EXAMPLES,
        "gat",
        ("main.py", "--epochs", "8", "--val-every", "4", "--hidden-dim", "16", "--num-heads", "2"),
        "8 epochs on a graph of 2,000 nodes",
        rf"Test set results: loss {NUMBER}",
        rtol=0.1,
        data=("cora",),
        needs=("requests",),
    ),
    Script(
        EXAMPLES,
        "gcn",
        ("main.py", "--epochs", "40"),
        "40 epochs on a graph of 2,000 nodes, with sparse tensors",
        rf"Test set results: loss {NUMBER}",
        rtol=0.15,
        data=("cora",),
    ),
    Script(
        EXAMPLES,
        "regression",
        ("main.py",),
        "a polynomial, until it fits; the script names no device",
        rf"Loss: {NUMBER} after",
        options=("--default-device",),
    ),
    Script(
        EXAMPLES,
        "reinforcement_learning",
        ("reinforce.py",),
        "REINFORCE, until CartPole is solved; on the CPU: the script names no device, its data is numpy's",
        r"(Solved)",
        needs=("gymnasium",),
        label="reinforce",
    ),
    Script(
        EXAMPLES,
        "reinforcement_learning",
        ("actor_critic.py",),
        "an actor and a critic, until CartPole is solved; on the CPU, as above",
        r"(Solved)",
        needs=("gymnasium",),
        label="actor_critic",
    ),
    Script(
        EXAMPLES,
        "time_sequence_prediction",
        ("train.py", "--steps", "1"),
        "a step of L-BFGS; on the CPU: the script names no device, its data is numpy's",
        rf"test loss: {NUMBER}",
        before=(("generate_sine_wave.py",),),
        needs=("matplotlib",),
    ),
    Script(
        EXAMPLES,
        "mnist_rnn",
        ("main.py", "--epochs", "1"),
        "1 epoch of an LSTM",
        rf"Average loss: {NUMBER}",
        rtol=0.2,
        on_device=("--accel",),
        data=("mnist",),
        needs=_VISION,
    ),
    *map(_language, ("Transformer", "LSTM", "GRU", "RNN_TANH", "RNN_RELU")),
    Script(
        NANO,
        "",
        (*_CONFIG, *_TINY_GPT, "--always_save_checkpoint=True"),
        "train.py: a small GPT, 80 steps, evaluation and a checkpoint",
        rf"iter 80: loss {NUMBER}",
        on_cpu=("--device=cpu",),
        on_device=("--device=tpu",),
        before=(_PREPARE,),
        data=("shakespeare",),
        needs=("tiktoken", "transformers", "datasets", "requests"),
        label="train",
    ),
    Script(
        NANO,
        "",
        (*_CONFIG, *_TINY_GPT, "--init_from=resume", "--max_iters=120"),
        "train.py: resumed from that checkpoint, 40 steps more",
        rf"iter 120: loss {NUMBER}",
        on_cpu=("--device=cpu",),
        on_device=("--device=tpu",),
        before=(_PREPARE, (*_CONFIG, *_TINY_GPT, "--always_save_checkpoint=True", "--device=cpu")),
        data=("shakespeare",),
        label="resume",
    ),
    Script(
        NANO,
        "",
        tuple("sample.py --out_dir=out-shakespeare-char --num_samples=2 --max_new_tokens=100 --dtype=float32".split()),
        "sample.py: 2 texts of 100 characters",
        r"(?s)(-{15}).*-{15}",
        on_cpu=("--device=cpu",),
        on_device=("--device=tpu",),
        before=(_PREPARE, (*_CONFIG, *_TINY_GPT, "--always_save_checkpoint=True", "--device=cpu")),
        data=("shakespeare",),
        needs=("tiktoken",),
        label="sample",
    ),
    Script(
        MINI,
        "projects/adder",
        ("adder.py", "--trainer.max_iters=201", "--trainer.num_workers=0", "--data.ndigit=2"),
        "200 steps, the greedy decoding of all sums",
        rf"iter 200: train loss {NUMBER}",
        rtol=0.15,
        on_device=("--trainer.device=tpu",),
        label="adder",
    ),
    Script(
        MINI,
        "projects/chargpt",
        tuple(
            "chargpt.py --trainer.max_iters=41 --trainer.num_workers=0 --data.block_size=32 --trainer.batch_size=16 "
            "--model.model_type=gpt-nano".split()
        ),
        "40 steps, 500 characters sampled",
        rf"iter 40: train loss {NUMBER}",
        rtol=0.1,
        on_device=("--trainer.device=tpu",),
        data=("chargpt",),
        label="chargpt",
    ),
    *repositories.SCRIPTS,
]


def run(script: Script, folder: Path | None, work: Path) -> Outcome:
    """Run a script on the CPU, then on the device, in a copy of its repository.

    Args:
        folder: has the checkouts of the repositories.
        work: for the copies, which stay.
    """
    outcome = Outcome(script.key, "skipped", "")
    try:
        repository = _copy(script, folder, work)
        outcome.version = _commit(folder, script)
        for name in script.needs:
            version(name)
        material.lay_out(work, script.data)
    except Missing as missing:
        outcome.detail = str(missing)
        return outcome
    where = repository / script.folder
    plain, ours = (sys.executable,), (sys.executable, "-m", "lazytpu", "run")
    seen = work / f"{script.key}.jsonl"
    numbers, seconds = [], []
    on_cpu = True
    try:
        for command in (
            (*plain, *script.arguments, *script.on_cpu),
            (*ours, *script.options, *script.arguments, *script.on_device),
        ):
            for first in script.before:
                _call((*plain, *first), where, work, seen)
            start = time.monotonic()
            printed = _call(command, where, work, seen)
            seconds.append(time.monotonic() - start)
            numbers.append(numbers_of(script, printed))
            on_cpu = False
    except Failed as failed:
        outcome.result = "skipped" if on_cpu else "fails"
        outcome.detail = f"the CPU's run fails: {failed}" if on_cpu else str(failed)
        return outcome
    outcome.result, outcome.detail = judge(*numbers, script.rtol)
    outcome.seconds = (round(seconds[0], 1), round(seconds[1], 1))
    if seen.exists():
        last = json.loads(seen.read_text())
        outcome.compiles, outcome.fallbacks = last["compiles"], last["fallbacks"]
    return outcome


class Failed(Exception):
    """A script ended with an error; the message has the end of what it printed."""


def _copy(script: Script, folder: Path | None, work: Path) -> Path:
    name = script.repository.rpartition("/")[2]
    if folder is None or not (folder / name).exists():
        raise Missing(f"no checkout of {script.repository} (--scripts)")
    if not (work / name).exists():
        shutil.copytree(folder / name, work / name, ignore=shutil.ignore_patterns(".git"))
    return work / name


def _commit(folder: Path | None, script: Script) -> str:
    command = ["git", "-C", f"{folder}/{script.repository.rpartition('/')[2]}", "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def _call(command: tuple[str, ...], where: Path, work: Path, seen: Path) -> str:
    """Return what a script prints.

    Raises:
        Failed: its exit code is not 0, or it took too long.
    """
    paths = (ROOT / "tests/ecosystem/startup", ROOT, work / "minGPT", work / "cleanrl")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TORCH_HOME": str(work / "torch"),
        "MPLBACKEND": "agg",
        "PYTHONUNBUFFERED": "1",
        "LAZYTPU_DISK_CACHE": "0",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # scripts that load what they have saved, arrays of numpy among it
        "LAZYTPU_ECOSYSTEM_SEEN": str(seen),
    }
    try:
        done = subprocess.run(
            command, cwd=where, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=LIMIT_S, stdin=subprocess.DEVNULL, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Failed(f"{command[1:5]}: more than {LIMIT_S} s") from None
    if done.returncode:
        raise Failed(f"exit code {done.returncode}: {_error(done.stdout)}")
    return done.stdout


def _error(printed: str) -> str:
    """Return the line of an output that says what went wrong, or its end."""
    lines = re.sub(r"\x1b\[[\d;]*m", "", printed).strip().splitlines()  # without the colours of a terminal
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return raised[-1] if raised else " | ".join(lines[-4:])


def numbers_of(script: Script, printed: str) -> dict[str, float]:
    found = re.findall(script.result, printed)
    if not found:
        raise Failed(f"prints nothing like {script.result!r}: {printed[-300:]!r}")
    last = found[-1] if isinstance(found[-1], tuple) else (found[-1],)
    return {f"number {n}": _number(text) for n, text in enumerate(last, 1)}


def _number(text: str) -> float:
    """Return a number, or the 1 that stands for a text that is there."""
    try:
        return float(text)
    except ValueError:
        return 1.0
