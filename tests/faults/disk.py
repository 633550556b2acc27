"""Disks that are full, folders that cannot be written or that others can write."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import torch

import lazytpu
from lazytpu.debug.folder import NotADump, open_dump
from lazytpu.runtime.disk_cache import lookup, provenance, store
from tests.faults.children import folder, in_child, say
from tests.faults.results import Result, timed

NOBODY = 65534


def _fill_disk(limit: int) -> None:
    """No file of this process grows past a size from now on, as if the disk were full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # Python ignores the signal; writes raise


def _steps(count: int = 4) -> None:
    for n in range(2, 2 + count):
        x = torch.arange(float(n)).to(lazytpu.device())
        assert ((x + 1) * 2 - x).tolist() == [i + 2.0 for i in range(n)]
        lazytpu.mark_step()
    lookup.settle()


def _cache_on(place: Path) -> None:
    lazytpu.config.disk_cache, lazytpu.config.disk_cache_dir, lazytpu.config.compile_after = True, str(place), 1


def _full_cache(place: Path, limit: int) -> None:
    _cache_on(place)
    _fill_disk(limit)
    _steps()
    whole = sorted(place.glob("*.lazytpu"))
    for path in whole:
        store.read(path.stem)
    assert not list(place.glob(".*.tmp"))
    count = lazytpu.metrics.counter
    assert count("disk_write") == len(whole) and count("disk_error") == 4 - len(whole)


def _full_dump(place: Path, limit: int) -> None:
    lazytpu.config.dump, lazytpu.config.compile_after = str(place / "dump"), 1
    lazytpu.config.metrics_file = str(place / "steps.jsonl")
    _fill_disk(limit)
    _steps()
    try:
        for graph in open_dump(place / "dump").graphs:
            for file in graph.manifest["files"]:
                assert graph.text(file)
    except NotADump as error:
        assert "is not a dump" in str(error)
    for line in (place / "steps.jsonl").read_text().splitlines()[:-1]:
        json.loads(line)


def _full_checkpoint(place: Path, limit: int) -> None:
    x = torch.arange(1000.0).to(lazytpu.device()) + 1
    torch.save(x, place / "last.pt")
    kept = (place / "last.pt").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit % 3000, limits[1]))
    try:
        torch.save(x, place / "new.pt")
        raise AssertionError("a full disk was not noticed")
    except (OSError, RuntimeError):
        pass
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (place / "last.pt").read_bytes() == kept
    assert (x + 1).sum().item() == 501500
    torch.save(x, place / "new.pt")


def _full_package(place: Path, limit: int) -> None:
    path = lazytpu.export.package(lambda x: x + 1, (torch.ones(3),), place / "p.ltz")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit % 5000, limits[1]))
    try:
        lazytpu.export.package(lambda x: x + 2, (torch.ones(3),), place / "p.ltz")
        raise AssertionError("a full disk was not noticed")
    except OSError:
        pass
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert lazytpu.load(path)(torch.ones(3)).tolist() == [2.0] * 3
    assert [p.name for p in place.iterdir()] == ["p.ltz"]


FULL = {"cache": _full_cache, "dump": _full_dump, "checkpoint": _full_checkpoint, "package": _full_package}


def _in_folder(place: Path, prepare: str) -> None:
    """Use a cache that is prepared badly: right values, nothing written or read, and one warning says why."""
    cache = place / "cache"
    _steps(1)  # imports modules, which may be in a folder of this user alone
    provenance.sources_digest()
    _cache_on(cache)
    match prepare:
        case "read-only":
            cache.mkdir(mode=0o500)
            os.chown(cache, NOBODY, NOBODY)
            os.setuid(NOBODY)
        case "of another user":
            cache.mkdir(mode=0o700)
            os.chown(cache, NOBODY, NOBODY)
        case "written by a group":
            cache.mkdir()
            cache.chmod(0o770)
        case "written by all":
            cache.mkdir()
            cache.chmod(0o777)
        case "under a file":
            cache.write_text("a file")
        case "below a file":
            cache.write_text("a file")
            lazytpu.config.disk_cache_dir = str(cache / "below")
    _steps()
    assert cache.is_file() or not list(cache.iterdir())
    count: dict[str, Any] = lazytpu.metrics.counters()
    say(count.get("disk_rejected", 0) + count.get("disk_error", 0))


FOLDERS = ("read-only", "of another user", "written by a group", "written by all", "under a file", "below a file")


@timed
def disks(count: int, seed: int) -> Result:
    """Disks that are full at some byte; cache folders that are read-only, foreign, or writable by others"""
    found = []
    for n in range(count):
        name, place = [*FULL][n % len(FULL)], folder()
        ended = in_child(FULL[name], place, 100 + (seed + n) * 997 % 30_000)
        if ended.problem:
            found.append(f"{name} {n}: {ended.problem}")
        shutil.rmtree(place, ignore_errors=True)
    for prepare in FOLDERS if os.geteuid() == 0 else FOLDERS[2:]:
        place = folder()
        place.chmod(0o711)
        ended = in_child(_in_folder, place, prepare)
        warned = ended.printed.count("in the disk cache") + ended.printed.count("from the disk cache")
        if ended.problem or not ended.said or not ended.said[0] or not 1 <= warned <= 2:
            found.append(f"a folder {prepare}: {ended.said} {warned} {ended.problem or ended.printed}")
        shutil.rmtree(place, ignore_errors=True)
    return Result(count + len(FOLDERS), f"full disks ({', '.join(FULL)}) and bad folders", found)
