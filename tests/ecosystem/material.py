"""Data that scripts read, made here instead of downloaded: digits, pictures, a text, a graph, weights of a network."""

from __future__ import annotations

import json
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tests.ecosystem.case import Missing

SEED = 0


def digits(root: Path, train: int = 3000, test: int = 1000) -> None:
    """Lay out ``root/MNIST/raw`` in IDX format, from scikit-learn's digits enlarged and shifted."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise Missing("scikit-learn is not installed") from None
    rng = np.random.default_rng(SEED)
    source = load_digits()
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, count, rows in (("train", train, slice(0, 1400)), ("t10k", test, slice(1400, None))):
        pick = rng.integers(0, len(source.target[rows]), count)
        large = torch.tensor(source.images[rows][pick])[:, None].float() * (255 / 16)
        large = torch.nn.functional.interpolate(large, size=(20, 20), mode="bilinear")[:, 0].clamp(0, 255).byte()
        images = np.zeros((count, 28, 28), np.uint8)
        for image, digit, (y, x) in zip(images, large.numpy(), rng.integers(0, 9, (count, 2)), strict=True):
            image[y : y + 20, x : x + 20] = digit
        labels = source.target[rows][pick].astype(np.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())


def pictures(folder: Path, count: int, size: int, label: int = 0) -> None:
    """Write smooth pictures of random colors, brighter for a larger label."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED + label)
    for number in range(count):
        coarse = torch.tensor(rng.random((1, 3, 6, 6), np.float32))
        smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic")[0].clamp(0, 1)
        pixels = (smooth * (0.5 + 0.5 * label)).mul(255).byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / f"{number:03}.jpg")


def text(characters: int) -> str:
    """Return English text: what Python's ``help()`` says of the language."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))[:characters]


def _mnist(work: Path) -> None:
    digits(work / "examples/data")


def _gans(work: Path) -> None:
    digits(work / "PyTorch-GAN/data/mnist", 256, 64)


def _mnist_beside(work: Path) -> None:
    digits(work / "examples/mnist_forward_forward/data")


def _folders(work: Path) -> None:
    for part, count in (("train", 24), ("val", 8)):
        for label in range(2):
            pictures(work / f"examples/imagenet/tiny/{part}/class{label}", count, 240, label)


def _super_resolution(work: Path) -> None:
    for part, count in (("train", 16), ("test", 4)):
        pictures(work / f"examples/super_resolution/dataset/BSDS300/images/{part}", count, 280)


def _styles(work: Path) -> None:
    pictures(work / "examples/fast_neural_style/tiny/all", 12, 80)
    pictures(work / "examples/fast_neural_style/tiny/style", 1, 64, label=1)
    weights = work / "torch/hub/checkpoints/vgg16-397923af.pth"
    weights.parent.mkdir(parents=True, exist_ok=True)
    from torchvision.models import vgg16

    torch.manual_seed(SEED)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in vgg16().state_dict().items()}
    scale = {name: (2 / max(shape[1:].numel(), 1)) ** 0.5 for name, shape in shapes.items()}
    torch.save(  # the classifier is not used: one number stands for each of its weights
        {
            name: torch.zeros(1).expand(shape) if "classifier" in name else torch.randn(shape) * scale[name]
            for name, shape in shapes.items()
        },
        weights,
    )


def _sentences(work: Path) -> None:
    words = text(240_000).split()
    folder = work / "examples/word_language_model/data/wikitext-2"
    folder.mkdir(parents=True, exist_ok=True)
    ends = {"train": (0, 24_000), "valid": (24_000, 26_500), "test": (26_500, 29_000)}
    for part, (start, end) in ends.items():
        lines = [" ".join(words[at : at + 20]) for at in range(start, end, 20)]
        (folder / f"{part}.txt").write_text(" \n ".join(lines))


def _cora(work: Path) -> None:
    """Write a graph in the form of Cora: papers of seven kinds that use other words and cite their own kind."""
    papers, words, kinds = 2000, 160, 7
    rng = np.random.default_rng(SEED)
    kind = rng.integers(0, kinds, papers)
    likely = rng.random((kinds, words)) < 0.15
    has = rng.random((papers, words)) < np.where(likely[kind], 0.25, 0.03)
    has[:, 0] = True
    content = "".join(f"{n}\t{chr(9).join(map(str, row.astype(int)))}\tkind{kind[n]}\n" for n, row in enumerate(has))
    pairs = {(int(a), int(b)) for a, b in rng.integers(0, papers, (40_000, 2)) if a != b and kind[a] == kind[b]}
    cites = "".join(f"{a}\t{b}\n" for a, b in sorted(pairs)[::4])
    for folder in (work / "examples/gat/cora", work / "examples/gcn/cora"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cora.content").write_text(content)
        (folder / "cora.cites").write_text(cites)
    with tarfile.open(work / "examples/gcn/cora.tgz", "w:gz") as packed:
        packed.add(work / "examples/gcn/cora", "cora")
    (work / "examples/gcn/requests.py").write_text(_REQUESTS)  # the script downloads without looking


_REQUESTS = '''"""Serves what the script would download."""
import contextlib, types


@contextlib.contextmanager
def get(url, stream=False):
    with open(url.rpartition("/")[2], "rb") as raw:
        yield types.SimpleNamespace(raw=raw)
'''


def _shakespeare(work: Path) -> None:
    (work / "nanoGPT/data/shakespeare_char/input.txt").write_text(text(200_000))


def _chargpt(work: Path) -> None:
    (work / "minGPT/projects/chargpt/input.txt").write_text(text(200_000))


def _tokens(work: Path) -> None:
    """Write the two shards of letters that llama2.c reads."""
    folder = work / "llama2.c/data/tok128"
    folder.mkdir(parents=True, exist_ok=True)
    letters = np.frombuffer(text(60_000).encode("ascii", "replace"), np.uint8).astype(np.uint16)
    letters[:20_000].tofile(folder / "data00.bin")
    letters[20_000:].tofile(folder / "data01.bin")


def _labelled(work: Path) -> None:
    for part, count in (("train", 24), ("validation", 8)):
        for label in range(2):
            pictures(work / f"pytorch-image-models/tiny/{part}/class{label}", count, 80, label)


def _unlabelled(work: Path) -> None:
    folder = work / "diffusers/examples/unconditional_image_generation"
    pictures(folder / "tiny", 16, 40)
    net = {
        "sample_size": 16, "in_channels": 3, "out_channels": 3, "block_out_channels": [8, 16], "layers_per_block": 1,
        "norm_num_groups": 4, "attention_head_dim": 8, "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
        "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    }  # fmt: skip
    (folder / "net").mkdir(exist_ok=True)
    (folder / "net/config.json").write_text(json.dumps(net))


def _chats(work: Path) -> None:
    """Save a small Llama with its words, and texts to train it on."""
    from tests.ecosystem import language

    folder = work / "trl/trl/scripts"
    language.llama().save_pretrained(folder / "net")
    language.tokenizer().save_pretrained(folder / "net")
    said = ["the cat sat on a mat", "a red dog ran", "a dog is happy", "a cat is sad"] * 8
    (folder / "tiny").mkdir(exist_ok=True)
    (folder / "tiny/train.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in said))
    pairs = [{"prompt": "what is the cat", "chosen": " happy", "rejected": " sad"}] * 8
    pairs += [{"prompt": "why is the dog", "chosen": " red", "rejected": " blue"}] * 8
    (folder / "pairs").mkdir(exist_ok=True)
    (folder / "pairs/train.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


MATERIAL: dict[str, Callable[[Path], None]] = {
    "mnist": _mnist,
    "mnist beside": _mnist_beside,
    "gans": _gans,
    "folders": _folders,
    "super resolution": _super_resolution,
    "styles": _styles,
    "sentences": _sentences,
    "cora": _cora,
    "shakespeare": _shakespeare,
    "chargpt": _chargpt,
    "tokens": _tokens,
    "labelled": _labelled,
    "unlabelled": _unlabelled,
    "chats": _chats,
}


def lay_out(work: Path, names: tuple[str, ...]) -> None:
    """Make what a script reads, below the folder that has the repositories, unless it is there."""
    for name in names:
        mark = work / f".{name.replace(' ', '-')}"
        if not mark.exists():
            MATERIAL[name](work)
            mark.touch()
