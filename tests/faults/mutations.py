"""Cache files, packages and dumps of which a byte was changed or a part was cut off: refused or compiled again."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

import lazytpu
from lazytpu.debug.folder import NotADump, open_dump, open_graph
from lazytpu.debug.report import write_report
from lazytpu.errors import ArtifactError
from lazytpu.runtime.disk_cache import lookup, store
from tests.faults.children import folder, in_child, say
from tests.faults.results import Result, timed


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Contents with a change: a byte, a bit, a part cut off, taken out, zeroed, repeated or put in."""
    at, length = chance.randrange(len(data)), chance.choice((1, 2, 8, 64, 1000))
    match chance.randrange(8):
        case 0 | 1:
            made = data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
        case 2:
            made = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        case 3:
            made = data[:at]
        case 4:
            made = data[:at] + data[at + length :]
        case 5:
            made = data[:at] + bytes(len(data[at : at + length])) + data[at + length :]
        case 6:
            made = data[: at + length] + data[at:]
        case _:
            made = data[:at] + chance.randbytes(length) + data[at:]
    return made if made != data else data[:-1]


def _steps() -> None:
    """Three graphs on the device, with the right values."""
    for n in (2, 3, 4):
        x = torch.arange(float(n)).to(lazytpu.device())
        assert ((x + 1) * 2 - x).tolist() == [i + 2.0 for i in range(n)]
        lazytpu.mark_step()
    lookup.settle()


def _train(place: Path) -> None:
    lazytpu.config.disk_cache, lazytpu.config.disk_cache_dir = True, str(place)
    lazytpu.config.compile_after = 1
    _steps()


def _train_with_damage(place: Path) -> None:
    damaged = len(list(place.glob("*.lazytpu")))
    lazytpu.metrics.reset()
    _train(place)
    count = lazytpu.metrics.counter
    assert count("disk_hit") == 0 and count("disk_rejected") == count("disk_write") == damaged, (
        lazytpu.metrics.counters()
    )


def _of_cache(count: int, chance: random.Random, place: Path) -> Iterator[str]:
    cache = place / "cache"
    if problem := in_child(_train, cache).problem:
        yield problem
    files = {path: path.read_bytes() for path in sorted(cache.glob("*.lazytpu"))}
    lazytpu.config.disk_cache, lazytpu.config.disk_cache_dir = True, str(cache)
    for n in range(count):
        path, whole = chance.choice([*files.items()])
        path.write_bytes(mutated(whole, chance))
        if store.read_entry(path.stem) is not None:
            yield f"cache {n}: {path.name} was not refused"
        path.write_bytes(whole)
    lists = cache / f"{'a' * 64}.list"  # keys to read ahead
    store.note(lists.stem, [path.stem for path in files])
    whole = lists.read_bytes()
    for n in range(count // 10):
        lists.write_bytes(mutated(whole, chance))
        if any(len(key) != 64 for key in store.noted(lists.stem)):
            yield f"cache {n}: a list has a key that is none"
    for n in range(max(1, count // 2000)):  # the whole way: compiled again, and kept anew
        for path, whole in files.items():
            path.write_bytes(mutated(whole, chance))
        for work in (_train_with_damage, _train):
            if problem := in_child(work, cache).problem:
                yield f"cache {n}: {problem}"


def _make_package(place: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
    lazytpu.export.package(net.eval(), (torch.ones(2, 3),), place / "p.ltz")
    lazytpu.export.stablehlo(torch.export.export(net.eval(), (torch.ones(2, 3),))).save(place / "folder")


def _load_packages(path: Path, count: int, seed: int) -> None:
    whole, chance = path.read_bytes(), random.Random(seed)
    for n in range(count):
        path.write_bytes(mutated(whole, chance))
        try:
            lazytpu.load(path)
        except ArtifactError:
            continue
        say(f"package {n}: was not refused")


def _load_folders(place: Path, count: int, seed: int) -> None:
    chance, expected = random.Random(seed), lazytpu.export.load(place)(torch.ones(2, 3))
    files = {path: path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}
    for n in range(count):
        path, whole = chance.choice([*files.items()])
        path.write_bytes(mutated(whole, chance))
        with contextlib.suppress(ArtifactError):
            made = lazytpu.export.load(place)
            if path.name != "module.mlir" and not torch.equal(made(torch.ones(2, 3)), expected):
                say(f"folder {n}: {path.name}")
        path.write_bytes(whole)


def _make_dump(place: Path) -> None:
    lazytpu.config.dump, lazytpu.config.compile_after = str(place), 1
    _steps()
    from lazytpu.debug import dump

    lazytpu.config.dump = ""
    dump.end()


def _show(place: Path, page: Path) -> None:
    """All that reads a dump."""
    from lazytpu.cli import tables

    with contextlib.redirect_stdout(io.StringIO()):
        dump = open_dump(place)
        tables.show_dump(dump)
        for graph in dump.graphs:
            tables.show_graph(dump, open_graph(graph.folder) or graph, 3)
        write_report(dump, page)


def _of_dump(count: int, chance: random.Random, place: Path) -> Iterator[str]:
    dump = place / "dump"
    if problem := in_child(_make_dump, dump).problem:
        yield problem
    _show(dump, place / "page.html")
    files = {path: path.read_bytes() for path in sorted(dump.rglob("*")) if path.is_file()}
    for n in range(count):
        path, whole = chance.choice([*files.items()])
        path.write_bytes(mutated(whole, chance))
        try:
            (_show if n % 20 == 0 or path.suffix == ".jsonl" else _read)(dump, place / "page.html")
        except NotADump:
            pass
        except Exception as error:
            yield f"dump {n}: {path.relative_to(dump)}: {type(error).__name__}: {error}"
        path.write_bytes(whole)


def _read(place: Path, page: Path) -> None:
    dump = open_dump(place)
    tables = [(dump.compiles, dump.steps, dump.summary, dump.sources())]
    for graph in dump.graphs:
        tables += [graph.text(file) for file in graph.manifest["files"]]


@timed
def mutations(count: int, seed: int) -> Result:
    """Files of the disk cache, packages, exported programs and dumps with a byte changed or a part cut off"""
    place, chance, found = folder(), random.Random(seed), []
    try:
        with _settings():
            found += _of_cache(count, chance, place)
        found += _of_dump(count, chance, place)
        made = in_child(_make_package, place)
        loaded = in_child(_load_packages, place / "p.ltz", count, seed, timeout_s=1200)
        folders = in_child(_load_folders, place / "folder", count, seed, timeout_s=1200)
        for ended in (made, loaded, folders):
            found += [*map(str, ended.said), *filter(None, [ended.problem])]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return Result(4 * count, "mutations of files of the cache, of packages, of exported programs and of dumps", found)


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    before = lazytpu.config.disk_cache, lazytpu.config.disk_cache_dir, lazytpu.config.log
    lazytpu.config.log = "error"  # each refusal warns
    yield
    lazytpu.config.disk_cache, lazytpu.config.disk_cache_dir, lazytpu.config.log = before
