"""The files of the disk cache: nothing wrong with one, with the folder or with the disk hurts."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazytpu.config import config
from lazytpu.observe import metrics
from lazytpu.runtime.disk_cache import store
from tests.support.disk_cache import KEY, again, counted, files, train
from tests.support.logged import Logged

needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives a file to another user")
needs_permissions = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions are those of POSIX")


# --- damaged and foreign files -----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_is_noticed(folder: Path, data: st.DataObject) -> None:
    store.store(KEY, {"a": 1}, random.Random(0).randbytes(300))
    path = folder / f"{KEY}.lazytpu"
    whole = path.read_bytes()
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(whole) - 1))
        changed = whole[at] ^ data.draw(st.integers(1, 255))
        damaged = whole[:at] + bytes([changed]) + whole[at + 1 :]
    else:
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    path.write_bytes(damaged)
    before = metrics.counter("disk_rejected")
    assert store.read_entry(KEY) is None
    assert metrics.counter("disk_rejected") == before + 1
    path.write_bytes(whole)
    assert store.read_entry(KEY) is not None


def test_damaged_programs_are_compiled_again(folder: Path, caplog: Logged) -> None:
    first = train()
    for path in files(folder):
        path.write_bytes(path.read_bytes()[:-1])
    assert again() == first
    assert counted("disk_hit") == [0] and metrics.counter("disk_rejected") == metrics.counter("compile") > 0
    assert "is damaged" in caplog.text
    assert again() == first  # and written anew
    assert metrics.counter("compile") == 0


@pytest.mark.parametrize("payload", [b"", b"\x80\x04."])
def test_a_sound_file_that_xla_refuses(folder: Path, payload: bytes) -> None:
    first = train()
    for path in files(folder):
        key = path.name.removesuffix(".lazytpu")
        found = store.read_entry(key)
        assert found is not None
        store.store(key, found[0], payload)
    assert again() == first
    assert metrics.counter("disk_rejected") == metrics.counter("compile") > 0
    assert again() == first and metrics.counter("compile") == 0


@pytest.mark.parametrize("header", [{"kept": [99], "outputs": [], "name": "x"}, {"kept": "no", "outputs": 3}])
def test_a_header_that_does_not_fit(folder: Path, header: dict[str, object]) -> None:
    first = train()
    for path in files(folder):
        key = path.name.removesuffix(".lazytpu")
        found = store.read_entry(key)
        assert found is not None
        store.store(key, header, found[1])
    assert again() == first and metrics.counter("disk_hit") == 0


def test_a_file_under_another_name(folder: Path) -> None:
    store.store(KEY, {}, b"x")
    (folder / f"{KEY}.lazytpu").rename(folder / f"{'1' * 64}.lazytpu")
    assert store.read_entry("1" * 64) is None and metrics.counter("disk_rejected") == 1


def test_what_is_no_file(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / f"{KEY}.lazytpu").mkdir()
    assert store.read_entry(KEY) is None
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / f"{'1' * 64}.lazytpu")
        assert store.read_entry("1" * 64) is None  # without waiting for a writer
    (folder / f"{'2' * 64}.lazytpu").symlink_to("/etc/passwd")
    assert store.read_entry("2" * 64) is None
    assert metrics.counter("disk_hit") == 0


# --- who may have written it -------------------------------------------------------------------------------------


@needs_root
def test_files_of_other_users_are_not_trusted(folder: Path) -> None:
    first = train()
    for path in files(folder):
        os.chown(path, 12345, -1)
    assert again() == first
    assert metrics.counter("disk_hit") == 0 and metrics.counter("disk_rejected") > 0


@needs_root
def test_a_folder_of_another_user_is_not_used(folder: Path) -> None:
    first = train()
    os.chown(folder, 12345, -1)
    before = files(folder)
    assert again() == first
    assert counted("disk_hit", "disk_write") == [0, 0] and files(folder) == before
    assert "belongs to another user" in store.info().problem
    with pytest.raises(PermissionError, match="belongs to another user"):
        store.clear()


@needs_permissions
@pytest.mark.parametrize("bit", [stat.S_IWGRP, stat.S_IWOTH])
def test_where_others_may_write(folder: Path, bit: int) -> None:
    first = train()
    os.chmod(folder, 0o700 | bit)
    assert again() == first and counted("disk_hit", "disk_write") == [0, 0]
    os.chmod(folder, 0o700)
    for path in files(folder):
        os.chmod(path, 0o600 | bit)
    assert again() == first and metrics.counter("disk_hit") == 0


@needs_permissions
def test_only_the_user_may_read_what_is_kept(folder: Path) -> None:
    train()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(folder)} == {0o600}


# --- a disk that cannot be written -------------------------------------------------------------------------------


def test_no_place_for_a_folder(folder: Path, caplog: Logged) -> None:
    folder.write_text("a file is where the folder should be")
    first = train()
    assert len(first) == 3 and metrics.counter("disk_error") + metrics.counter("disk_rejected") > 0
    assert len({r.getMessage() for r in caplog.records}) == len(caplog.records) <= 2  # not for every graph


@pytest.mark.parametrize(
    ("call", "error"),
    [("open", OSError(30, "Read-only file system")), ("replace", OSError(28, "No space left on device"))],
)
def test_a_full_or_read_only_disk(folder: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, call: str) -> None:
    expected = train()
    real = getattr(os, call)

    def fails(path: object, *args: object, **kwargs: object) -> object:
        if str(path).endswith(".tmp"):
            raise error
        return real(path, *args, **kwargs)

    store.clear()
    monkeypatch.setattr(store.os, call, fails)
    assert again() == expected
    assert metrics.counter("disk_error") == metrics.counter("compile") > 0
    monkeypatch.undo()
    assert not [*folder.glob(".*")] and files(folder) == []


def test_a_disk_that_cannot_be_written_is_told_of_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: Logged
) -> None:
    folder.mkdir(mode=0o700)
    real = os.open

    def fails(path: str, *args: int) -> int:
        if path.endswith(".tmp"):
            raise PermissionError(13, "Permission denied", path)  # names another file each time
        return real(path, *args)

    monkeypatch.setattr(store.os, "open", fails)
    train()
    assert metrics.counter("disk_error") > 1
    assert caplog.text.count(f"nothing was kept in the disk cache in {folder}: Permission denied") == 1


def test_a_folder_that_cannot_be_written_is_still_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train()

    def refuses(*args: object, **kwargs: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(store.os, "utime", refuses)
    assert again() == first and metrics.counter("compile") == 0


def test_no_home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(config, "disk_cache_dir", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(store.Path, "home", homeless)
    store.store(KEY, {}, b"x")
    assert store.read_entry(KEY) is None and metrics.counter("disk_error") == 2
    assert "home" in store.info().problem


# --- its size ----------------------------------------------------------------------------------------------------


def test_the_least_recently_used_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [str(i) * 64 for i in range(4)]
    for i, key in enumerate(keys):
        store.store(key, {}, random.Random(i).randbytes(10_000))
        os.utime(folder / f"{key}.lazytpu", (1000 + i, 1000 + i))
    assert store.read_entry(keys[0]) is not None  # used, so the second is the oldest now
    monkeypatch.setattr(config, "disk_cache_bytes", 45_000)
    store.store("4" * 64, {}, random.Random(4).randbytes(10_000))
    assert [path.name[0] for path in files(folder)] == ["0", "2", "3", "4"]
    assert counted("disk_evicted") == [1] and store.info().bytes <= 45_000


def test_a_program_larger_than_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.store(KEY, {}, b"x")
    monkeypatch.setattr(config, "disk_cache_bytes", 5_000)
    store.store("1" * 64, {}, random.Random(0).randbytes(10_000))
    assert [path.name for path in files(folder)] == [f"{KEY}.lazytpu"] and counted("disk_too_large") == [1]


def test_info_and_clear(folder: Path) -> None:
    assert store.info().files == 0 and store.clear() == 0
    train()
    n = metrics.counter("disk_write")
    (folder / "notes.txt").write_text("the user's own")
    info = store.info()
    assert (info.folder, info.enabled, info.problem, info.files) == (str(folder), True, "", n)
    assert info.bytes == sum(path.stat().st_size for path in files(folder))
    assert store.clear() == n and files(folder) == [] and (folder / "notes.txt").exists()


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "/home/me/.cache/lazytpu"),
        ("linux", {"XDG_CACHE_HOME": "/scratch/me"}, "/scratch/me/lazytpu"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/lazytpu"),
        ("darwin", {}, "/home/me/Library/Caches/lazytpu"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/lazytpu/Cache"),
    ],
)
def test_the_users_cache_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(config, "disk_cache_dir", "")
    monkeypatch.setattr(store.sys, "platform", platform)
    monkeypatch.setattr(store.Path, "home", lambda: Path("/home/me"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(store.folder()) == expected
