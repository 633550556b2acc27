"""Run libraries and public scripts that train in several processes, under torchrun.

    python -m tests.distributed.libraries                                # accelerate, transformers, lightning, ours
    python -m tests.distributed.libraries --examples DIR --only FSDP2    # and a checkout of pytorch/examples

A library's script, or this project's example, runs on the CPU with Gloo and on the device, and the numbers that it
prints have to agree.  A public example refuses to run without an accelerator: it runs on the device only, unedited, and
has to end as it says.  What is not installed is skipped.  Rows of the table in docs/reference/distributed.md are
printed; the exit status is how many failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
_LIMIT_S = 500


@dataclass(frozen=True)
class Example:
    """A script of pytorch/examples.

    Attributes:
        path: from the root of the checkout.
        arguments: that make it small.
        ends: a pattern that what it prints has to have.
        ranks: processes.
        needs: packages.
    """

    path: str
    arguments: tuple[str, ...] = ()
    ends: str = ""
    ranks: int = 2
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Library:
    """A script that prints numbers.

    Attributes:
        script: its file.
        arguments: in which ``DEVICE`` stands for the device.
        ranks: processes.
        needs: packages.
    """

    script: Path
    arguments: tuple[str, ...]
    ranks: int = 2
    needs: tuple[str, ...] = ()


def _with(package: str, how: str) -> Library:
    return Library(HERE / f"with_{package}.py", (how, "DEVICE"), needs=(package,))


LIBRARIES = {
    "accelerate: DDP": _with("accelerate", "ddp"),
    "accelerate: FSDP2": _with("accelerate", "fsdp2"),
    "transformers Trainer: DDP": _with("transformers", "ddp"),
    "transformers Trainer: FSDP2": _with("transformers", "fsdp2"),
    "lightning: DDP": _with("lightning", "ddp"),
} | {
    f"train_gpt_torchrun: {how}{' (4)' if ranks == 4 else ''}": Library(
        ROOT / "examples" / "train_gpt_torchrun.py", ("--how", how, "--device", "DEVICE"), ranks
    )
    for ranks in (2, 4)
    for how in ("ddp", "fsdp", "tp", "fsdp_tp", "pp")
}
_GPT = (
    *("data_config.path=data/input.txt", "data_config.truncate=0.002", "data_config.block_size=32"),
    *("gpt_config.n_layer=2", "gpt_config.n_head=2", "gpt_config.n_embd=32", "trainer_config.batch_size=64"),
    *("trainer_config.max_epochs=1", "trainer_config.save_every=1", "trainer_config.data_loader_workers=1"),
)
EXAMPLES = {
    "ddp": Example("ddp/example.py", (), r"training completed in rank 1"),
    "FSDP2": Example("FSDP2/example.py", (), ""),
    "FSDP2: prefetching, mixed precision, DCP": Example(
        "FSDP2/example.py", ("--explicit-prefetching", "--mixed-precision", "--dcp-api"), ""
    ),
    "tensor_parallelism: TP": Example(
        "tensor_parallelism/tensor_parallel_example.py", (), r"Tensor Parallel training completed"
    ),
    "tensor_parallelism: sequence parallel": Example(
        "tensor_parallelism/sequence_parallel_example.py", (), r"Sequence Parallel training completed"
    ),
    "tensor_parallelism: FSDP x TP (4)": Example(
        "tensor_parallelism/fsdp_tp_example.py", (), r"2D training successfully completed", 4
    ),
    "minGPT-ddp": Example("minGPT-ddp/mingpt/main.py", _GPT, r"Eval Loss", 2, ("hydra", "boto3", "fsspec")),
}


def torchrun(script: Path, arguments: Sequence[str], ranks: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in so many processes on the device, as `python -m lazytpu run` does."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, "-m", "lazytpu", "run", str(script), *arguments],
        cwd=folder,
        env={**settings, **os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )


def of_library(name: str) -> str:
    """Return what is wrong with a library on the device, empty for nothing."""
    library, found = LIBRARIES[name], []
    for device in ("cpu", "tpu"):
        arguments = [device if word == "DEVICE" else word for word in library.arguments]
        with tempfile.TemporaryDirectory() as folder:
            done = torchrun(library.script, arguments, library.ranks, Path(folder))
        lines = re.findall(r"(?:RESULT \[|: loss )(.*)", done.stdout)
        if done.returncode or not lines:
            return f"on {device}: {done.stderr[-3000:]}"
        found.append([float(number) for number in re.findall(r"-?\d[\d.]*(?:e-?\d+)?", lines[0])])
    close = all(abs(a - b) <= 1e-4 * max(1, abs(b)) for a, b in zip(found[1], found[0], strict=True))
    return "" if close else f"{found[1]} on the device, {found[0]} on the CPU"


def of_example(name: str, checkout: Path) -> str:
    """Return what is wrong with an example on the device, empty for nothing."""
    example = EXAMPLES[name]
    with tempfile.TemporaryDirectory() as work:
        script = Path(work, Path(example.path).name)
        shutil.copytree((checkout / "distributed" / example.path).parent, work, dirs_exist_ok=True)
        done = torchrun(script, example.arguments, example.ranks, Path(work))
    said = done.stdout + done.stderr
    ran = done.returncode == 0 and "Unable to locate" not in said  # which is how they end without an accelerator
    return "" if ran and re.search(example.ends, said) else said[-4000:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words, joined by commas, of which a name has to have one")
    parser.add_argument("--examples", type=Path, help="a checkout of https://github.com/pytorch/examples")
    options = parser.parse_args(arguments)
    words = options.only.lower().split(",")
    failed = 0
    for name in (*LIBRARIES, *(EXAMPLES if options.examples else ())):
        if not any(word in name.lower() for word in words):
            continue
        needs = (LIBRARIES.get(name) or EXAMPLES[name]).needs
        if missing := [package for package in needs if importlib.util.find_spec(package) is None]:
            print(f"| {name} | skipped: {missing[0]} is not installed |", flush=True)
            continue
        try:
            wrong = of_library(name) if name in LIBRARIES else of_example(name, options.examples.resolve())
        except subprocess.TimeoutExpired as error:
            wrong = f"took more than {_LIMIT_S} s: {str(error.stderr)[-2000:]}"
        failed += bool(wrong)
        well = "same as on the CPU" if name in LIBRARIES else "runs to its end"
        print(f"| {name} | {'fails' if wrong else well} |", flush=True)
        if wrong:
            print(wrong, file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
