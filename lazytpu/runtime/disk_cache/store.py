"""The disk cache: a folder of files that hold compiled programs, so that the next process need not compile them.

The folder is in the user's cache folder and only this user can write to it.  A file is one program: a header in
JSON and the bytes XLA made of it, under a checksum.  Nothing in a file is Python code or a pickle.  Whatever is
wrong with the folder or a file is counted and logged, and the program is compiled.

This module only keeps the bytes; ``lazytpu.runtime.disk_cache.serialized`` gives them meaning.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazytpu.config import config
from lazytpu.observe import logs, metrics

_SUFFIX = ".lazytpu"
_TEMPORARY = ".tmp"
_LIST = ".list"  # of the programs a script used
_MOST_LISTS = 200
_KEY = re.compile("[0-9a-f]{64}")
_MAGIC = b"lazytpu executable 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LENGTH_BYTES = 8
_START = len(_MAGIC) + _DIGEST_BYTES

# A temporary file that is older was left by a writer that was killed.
_ABANDONED_S = 3600

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

# Marks a folder as one that backups may leave out: https://bford.info/cachedir/
_TAG_NAME = "CACHEDIR.TAG"
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Compiled programs of lazytpu; safe to delete.\n"

_logged: set[str] = set()


class _Rejected(Exception):
    """A file or folder that must not be used, and why."""


@dataclass(frozen=True, slots=True)
class Info:
    """The state of the disk cache, as `info` returns it.

    Attributes:
        folder: where the files are; empty where there is none.
        enabled: whether ``lazytpu.config.disk_cache`` is on.
        problem: why the folder is not used; empty where it is.
        files: how many programs it holds.
        bytes: their size together.
        limit_bytes: ``lazytpu.config.disk_cache_bytes``.
    """

    folder: str
    enabled: bool
    problem: str
    files: int
    bytes: int
    limit_bytes: int


def folder() -> Path:
    """Return the folder of the cache: ``lazytpu.config.disk_cache_dir``, else ``lazytpu`` in the user's cache folder.

    Raises:
        RuntimeError: the user has no home folder.
    """
    if config.disk_cache_dir:
        return Path(config.disk_cache_dir).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "lazytpu"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "lazytpu" / "Cache"
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache") / "lazytpu"


def info() -> Info:
    """Return where the cache is, whether it is used, and how much it holds.

    Example:
        >>> lazytpu.cache.info().files  # doctest: +SKIP
        12
    """
    problem, place, sizes = "", "", []
    try:
        place = str(folder())
        if os.path.isdir(place):
            _check_folder(place)
            sizes = [status.st_size for _, status in _files(place)]
    except (_Rejected, OSError, RuntimeError) as error:
        problem = str(error)
    return Info(place, config.disk_cache, problem, len(sizes), sum(sizes), config.disk_cache_bytes)


def clear() -> int:
    """Delete every program of the cache, and nothing else in its folder.

    Returns:
        How many were deleted.

    Raises:
        OSError: the folder belongs to somebody else or a file cannot be deleted.
    """
    place = str(folder())
    if not os.path.isdir(place):
        return 0
    try:
        _check_folder(place)
    except _Rejected as error:
        raise PermissionError(str(error)) from None
    deleted = 0
    for path, _ in _files(place, others=True):
        with suppress(FileNotFoundError):
            os.unlink(path)
            deleted += path.endswith(_SUFFIX)
    return deleted


def read_entry(key: str) -> tuple[dict[str, Any], bytes] | None:
    """Return the header and the bytes kept under a key, or None, counted as ``disk_miss``.

    A file that is damaged, or not this user's alone, is counted as ``disk_rejected``, too.
    """
    if not config.disk_cache:
        return None
    try:
        return read(key)
    except FileNotFoundError:
        metrics.count("disk_miss")
    except _Rejected as problem:
        metrics.count("disk_miss")
        metrics.count("disk_rejected")
        _log(f"nothing was taken from the disk cache: {problem}")
    except (OSError, RuntimeError) as error:
        metrics.count("disk_miss")
        metrics.count("disk_error")
        _log_error("nothing was taken from", error)
    return None


def read(key: str) -> tuple[dict[str, Any], bytes]:
    """Do as `read_entry`, but count nothing.

    Raises:
        Exception: there is no such file, or it must not be used.
    """
    place = str(folder())
    if os.path.exists(place):
        _check_folder(place)
    path = _path(place, key)
    found = _unpack(_contents(path), key)
    with suppress(OSError):  # somebody has just evicted it, or the disk is read-only
        os.utime(path)  # the time of last use, by which `_evict` chooses
    return found


def note(name: str, keys: list[str]) -> None:
    """Keep a list of keys under a name, if possible."""
    with suppress(_Rejected, OSError, RuntimeError):
        place = str(folder())
        _make_folder(place)
        _write(place, name + _LIST, json.dumps(keys).encode())
        lists = sorted(Path(place).glob("*" + _LIST), key=os.path.getmtime)
        for path in lists[:-_MOST_LISTS]:
            path.unlink()


def noted(name: str) -> list[str]:
    """Return the list of keys under a name; empty where there is none that can be used."""
    try:
        place = str(folder())
        _check_folder(place)
        keys = json.loads(_contents(os.path.join(place, name + _LIST)))
    except (_Rejected, OSError, RuntimeError, ValueError):
        return []
    return [key for key in keys if isinstance(key, str) and _KEY.fullmatch(key)] if isinstance(keys, list) else []


def akin(key: str, digits: int) -> list[dict[str, object]]:
    """Return the headers of the programs whose keys begin with the same ``digits`` digits, the last used first.

    Files that cannot be read are left out.
    """
    found: list[tuple[int, dict[str, Any]]] = []
    with suppress(OSError, RuntimeError):
        for path, status in _files(str(folder())):
            other = os.path.basename(path).removesuffix(_SUFFIX)
            if other != key and other[:digits] == key[:digits]:
                with suppress(_Rejected, OSError):
                    found.append((status.st_mtime_ns, _unpack(_contents(path), other)[0]))
    return [header for _, header in sorted(found, key=lambda f: -f[0])]


def reject(key: str, problem: str) -> None:
    """Delete what is kept under a key, because it cannot be used."""
    metrics.count("disk_rejected")
    _log(f"a program in the disk cache is ignored: {problem}")
    with suppress(OSError, RuntimeError):
        os.unlink(_path(str(folder()), key))


def store(key: str, header: dict[str, object], payload: bytes) -> None:
    """Keep bytes under a key, for this and other processes; does nothing where the cache is off or cannot be used.

    Args:
        header: what JSON can hold.
    """
    if not config.disk_cache:
        return
    data = _pack(key, header, payload)
    if len(data) > config.disk_cache_bytes:
        metrics.count("disk_too_large")
        return
    try:
        place = str(folder())
        _make_folder(place)
        _evict(place, config.disk_cache_bytes - len(data), keep=key)
        _write(place, key + _SUFFIX, data)
    except _Rejected as problem:
        metrics.count("disk_rejected")
        _log(f"nothing was kept in the disk cache: {problem}")
    except (OSError, RuntimeError) as error:
        metrics.count("disk_error")
        _log_error("nothing was kept in", error)
    else:
        metrics.count("disk_write")


def open_claim(key: str) -> int | None:
    """Open the file that a process locks while it compiles a program; return None where it cannot be opened."""
    try:
        place = str(folder())
        _make_folder(place)
        return os.open(_claim(place, key), os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except (_Rejected, OSError, RuntimeError):  # which `store` reports
        return None


def remove_claim(key: str) -> None:
    """Remove the file of `open_claim`."""
    with suppress(OSError, RuntimeError):
        os.unlink(_claim(str(folder()), key))


def _claim(place: str, key: str) -> str:
    return os.path.join(place, f".{key}{_TEMPORARY}")


def _path(place: str, key: str) -> str:
    return os.path.join(place, key + _SUFFIX)


def _make_folder(place: str) -> None:
    if not os.path.exists(place):
        os.makedirs(place, mode=0o700, exist_ok=True)
    _check_folder(place)
    tag = os.path.join(place, _TAG_NAME)
    if not os.path.exists(tag):
        with suppress(OSError):
            Path(tag).write_text(_TAG)


def _check_folder(place: str) -> None:
    status = os.stat(place)
    if not stat.S_ISDIR(status.st_mode):
        raise _Rejected(f"{place} is not a folder")
    _check_owner(place, status)


def _check_owner(path: str, status: os.stat_result) -> None:
    """Refuse what another user owns or may write to: whoever can write a program there could run anything here."""
    if not hasattr(os, "geteuid"):
        return  # Windows: the profile folder's access list says who may write
    if status.st_uid != os.geteuid():
        raise _Rejected(f"{path} belongs to another user")
    if status.st_mode & _OTHERS_MAY_WRITE:
        raise _Rejected(f"other users may write to {path}")


def _contents(path: str) -> bytes:
    """Return the bytes of a regular file of this user."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except NotADirectoryError:
        raise _Rejected(f"{os.path.dirname(path)} is not a folder") from None
    except OSError as error:
        raise _Rejected(f"{path} cannot be opened: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise _Rejected(f"{path} is not a file")
        _check_owner(path, status)
        return file.read()


def _pack(key: str, header: dict[str, object], payload: bytes) -> bytes:
    """Return a file: magic, SHA-256 of all that follows, length of the header, header, compressed payload."""
    head = json.dumps({**header, "key": key}).encode()
    body = len(head).to_bytes(_LENGTH_BYTES, "little") + head + zlib.compress(payload, 1)
    return _MAGIC + hashlib.sha256(body).digest() + body


def _unpack(data: bytes, key: str) -> tuple[dict[str, object], bytes]:
    if not data.startswith(_MAGIC):
        raise _Rejected(f"{key}{_SUFFIX} is not a program of this lazytpu")
    body = data[_START:]
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : _START]:
        raise _Rejected(f"{key}{_SUFFIX} is damaged")
    end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
    try:
        header = json.loads(body[_LENGTH_BYTES:end])
        payload = zlib.decompress(body[end:])
    except (ValueError, zlib.error) as error:
        raise _Rejected(f"{key}{_SUFFIX} cannot be read: {error}") from None
    if not isinstance(header, dict) or header.pop("key", None) != key:
        raise _Rejected(f"{key}{_SUFFIX} holds another program than its name says")
    return header, payload


def _write(place: str, name: str, data: bytes) -> None:
    """Write a file that is complete or absent, whoever else writes it at the same time."""
    temporary = os.path.join(place, f".{name}.{os.getpid()}.{secrets.token_hex(4)}{_TEMPORARY}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(data)
        os.replace(temporary, os.path.join(place, name))
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _files(place: str, *, others: bool = False) -> Iterator[tuple[str, os.stat_result]]:
    """Return the programs of a folder; on request the lists of keys and the temporary files of writers, too."""
    with os.scandir(place) as entries:
        for entry in entries:
            rest = entry.name.endswith(_LIST) or (entry.name.startswith(".") and entry.name.endswith(_TEMPORARY))
            if entry.name.endswith(_SUFFIX) or (rest and others):
                with suppress(FileNotFoundError):
                    yield entry.path, entry.stat(follow_symlinks=False)


def _evict(place: str, limit: int, keep: str) -> None:
    """Delete the least recently used programs until the others fit into ``limit`` bytes."""
    kept, total = [], 0
    for path, status in _files(place, others=True):
        if path.endswith(_SUFFIX):
            kept.append((status.st_mtime_ns, path, status.st_size))
            total += status.st_size
        elif path.endswith(_TEMPORARY) and time.time() - status.st_mtime > _ABANDONED_S:
            with suppress(OSError):
                os.unlink(path)
    for _, path, size in sorted(kept):
        if total <= limit:
            break
        if path != _path(place, keep):
            with suppress(FileNotFoundError):
                os.unlink(path)
                metrics.count("disk_evicted")
        total -= size


def _log_error(what: str, error: Exception) -> None:
    """Log an error without the name of the file, which is another one for each program."""
    place, text = config.disk_cache_dir, str(error)
    if isinstance(error, OSError) and isinstance(error.filename, str):
        place, text = os.path.dirname(error.filename), error.strerror or text
    _log(f"{what} the disk cache{f' in {place}' if place else ''}: {text}")


def _log(text: str) -> None:
    """Log a text, once."""
    if text not in _logged:
        _logged.add(text)
        logs.note("compile", "%s", text, level=logs.LEVELS["warning"])


__all__ = ["Info", "clear", "folder", "info"]
