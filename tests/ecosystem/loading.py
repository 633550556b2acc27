"""Libraries that load data, log and show progress: what they read must wait for nothing newer."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lazytpu
from tests.ecosystem.case import Library, Numbers


class _Points(IterableDataset[Any]):
    """Numbered points, each worker its share of them."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for n in range(start, 64, step):
            x = torch.sin(torch.arange(8.0) * (n + 1))
            yield x, x.sum()[None]


def _data() -> TensorDataset:
    return TensorDataset(*[torch.stack(part) for part in zip(*_Points(), strict=True)])


def _train(
    device: torch.device,
    batches: Iterable[Any],
    log: Callable[[int, torch.Tensor], None] = lambda step, loss: None,
) -> dict[str, float]:
    """Train on batches, hand each loss to a logger, and return the last loss and what a step cost on the device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step, loss = 0, torch.tensor(math.nan)
    before = lazytpu.metrics.counter("execute")
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        lazytpu.mark_step()
        log(step, loss.detach())
        step += 1
    programs = lazytpu.metrics.counter("execute") - before
    if device.type != "cpu":  # a graph for the step; reading the loss after it needs no other
        assert programs <= step + 1, f"{programs} programs in {step} steps\n{lazytpu.explain()}"
    return {"loss": loss.item(), "steps": step}


def board(device: torch.device) -> Numbers:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with TemporaryDirectory() as folder:
        weights = torch.linspace(-1, 1, 20).to(device)
        with SummaryWriter(folder) as writer:
            found = _train(device, DataLoader(_data(), 8), lambda n, loss: writer.add_scalar("loss", loss, n))
            writer.add_histogram("weights", weights, 0)
            writer.add_image("picture", torch.rand(3, 8, 8).to(device), 0)
        events = EventAccumulator(folder).Reload()
        rows = events.Scalars("loss")
        return {**found, "logged": rows[-1].value, "rows": len(rows)}


def weights_and_biases(device: torch.device) -> Numbers:
    import wandb

    with TemporaryDirectory() as folder:
        run = wandb.init(project="sweep", dir=folder, mode="offline")
        logged: list[float] = []

        def log(step: int, loss: torch.Tensor) -> None:
            run.log({"loss": loss}, step=step)
            logged.append(float(loss))

        found = _train(device, DataLoader(_data(), 8), log)
        summary = dict(run.summary)
        run.log({"weights": wandb.Histogram(torch.linspace(-1, 1, 20).to(device).cpu().numpy())})
        run.finish()
        return {**found, "summary": float(summary["loss"]), "mean": sum(logged) / len(logged)}


def progress(device: torch.device) -> Numbers:
    from tqdm import tqdm

    shown = io.StringIO()
    bar = tqdm(DataLoader(_data(), 8), file=shown, mininterval=0, desc="train")
    found = _train(device, bar, lambda n, loss: bar.set_postfix(loss=loss.item(), refresh=n % 2 == 0))
    text = shown.getvalue().rpartition("loss=")[2].partition("]")[0]
    return {**found, "shown": float(text)}


def stateful(device: torch.device) -> Numbers:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        return StatefulDataLoader(_data(), 8, shuffle=True, generator=torch.Generator().manual_seed(3))

    first = loader()
    batches = iter(first)
    for _ in range(3):
        next(batches)
    state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    rest = [batch[0].sum() for batch in second]
    same = all(torch.equal(x.sum(), y) for (x, _), y in zip(batches, rest, strict=True))
    return {**_train(device, lazytpu.DeviceLoader(loader()) if device.type != "cpu" else loader()), "resumed": same}


def nodes(device: torch.device) -> Numbers:
    from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper

    pipeline = Mapper(Batcher(IterableWrapper(_Points()), 8), torch.utils.data.default_collate)
    return _train(device, Loader(pipeline))


def shards(device: torch.device) -> Numbers:
    import webdataset

    with TemporaryDirectory() as folder:
        path = str(Path(folder) / "points-000000.tar")
        with webdataset.TarWriter(path) as writer:
            for n, (x, y) in enumerate(_Points()):
                writer.write({"__key__": f"{n:04}", "x.pth": x, "y.pth": y})
        data = webdataset.WebDataset(path, shardshuffle=False).decode().to_tuple("x.pth", "y.pth").batched(8)
        return _train(device, webdataset.WebLoader(data, batch_size=None, num_workers=0))


def workers(device: torch.device) -> Numbers:
    loader = DataLoader(
        _Points(), 8, num_workers=2, persistent_workers=True, pin_memory=True, prefetch_factor=2, drop_last=True
    )
    first = _train(device, loader)
    return {**_train(device, loader), "first": first["loss"]}


LIBRARIES = [
    Library("tensorboard", "SummaryWriter: the loss of each step, a histogram, a picture", board),
    Library("wandb", "offline run: the loss tensor of each step, a histogram", weights_and_biases),
    Library("tqdm", "a bar with the loss of each step", progress),
    Library("torchdata", "StatefulDataLoader: stopped and resumed; through DeviceLoader", stateful),
    Library("torchdata", "nodes: batches, a mapper, a loader", nodes),
    Library("webdataset", "a shard written, read in batches", shards),
    Library("torch", "IterableDataset with two persistent workers and pinned memory", workers),
]
