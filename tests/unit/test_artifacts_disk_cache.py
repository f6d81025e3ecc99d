# SPDX-License-Identifier: Apache-2.0
"""DiskCache: whole entries or none, one writer, bounded, private, and never in the way."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from cudnn_blocks.artifacts import CACHE_VARIABLE, DiskCache, disk_cache

DATA = bytes(range(256)) * 64
WAIT_S = 60

PROGRAM = """
import os, resource, signal, sys, warnings
from pathlib import Path
from cudnn_blocks.artifacts import DiskCache
cache = DiskCache(Path(sys.argv[1]))
data = bytes(range(256)) * 64
warnings.simplefilter("always")
"""


@pytest.fixture
def cache(tmp_path) -> DiskCache:
    return DiskCache(tmp_path / "kernels")


def writer(data: bytes):
    return lambda path: path.write_bytes(data)


def run(cache: DiskCache, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + program, str(cache.folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )


def files_of(cache: DiskCache, folder: str) -> list[Path]:
    return [path for path in (cache.folder / folder).rglob("*") if path.is_file()]


def test_what_was_put_is_found(cache):
    assert cache.find("a") is None
    assert cache.put("a", writer(DATA))
    assert cache.find("a").read_bytes() == DATA
    assert cache.find("b") is None
    assert cache.stats().entries == 1
    assert files_of(cache, "making") == []


def test_a_second_put_replaces(cache):
    cache.put("a", writer(b"old"))
    cache.put("a", writer(DATA))
    assert cache.find("a").read_bytes() == DATA


def test_files_are_private_whatever_the_umask(cache):
    old = os.umask(0)
    try:
        cache.put("a", writer(DATA))
        with cache.lock("a"):
            pass
    finally:
        os.umask(old)
    for path in (cache.folder, *cache.folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("suffix", [".o", ".json"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "one bit", "longer"])
def test_a_damaged_entry_is_none_and_can_be_replaced(cache, suffix, damage):
    cache.put("a", writer(DATA))
    path = cache.find("a").with_suffix(suffix)
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        changed = {
            "truncated": data[: len(data) // 2],
            "empty": b"",
            "one bit": flipped,
            "longer": data + b"x",
        }
        path.write_bytes(changed[damage])
    assert cache.find("a") is None
    assert cache.put("a", writer(DATA))
    assert cache.find("a").read_bytes() == DATA


def test_an_entry_under_another_key_is_not_taken(cache):
    cache.put("a", writer(DATA))
    cache.put("b", writer(DATA[1:]))
    a, b = cache.find("a"), cache.find("b")
    for suffix in (".o", ".json"):
        os.replace(a.with_suffix(suffix), b.with_suffix(suffix))
    assert cache.find("b") is None


@pytest.mark.parametrize("kills_at", ["the object", "the rename", "between the renames"])
def test_killed_in_mid_write(cache, kills_at):
    nth = {"the rename": 0, "between the renames": 1}.get(kills_at)
    died = run(
        cache,
        f"""
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def write(path):
    path.write_bytes(data[:1000])
    if {nth} is None:
        die()
    path.write_bytes(data)
replace, calls = os.replace, []
def counted(*paths):
    if len(calls) == {nth}:
        die()
    calls.append(paths)
    replace(*paths)
os.replace = counted
with cache.lock("a"):
    cache.put("a", write)
""",
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert cache.find("a") is None
    left = files_of(cache, "making")
    assert left
    with cache.lock("a"):  # the dead process holds it no longer
        assert cache.put("a", writer(DATA))
    assert cache.find("a").read_bytes() == DATA
    for path in left:
        os.utime(path, (0, 0))  # long ago
    cache.put("b", writer(DATA))
    assert files_of(cache, "making") == []


def test_one_holder_at_a_time(cache):
    """A counter that is read, waited for and written loses no step."""
    counter = cache.folder.parent / "counter"
    counter.write_text("0")
    program = f"""
import time
counter = Path({str(counter)!r})
for _ in range(5):
    with cache.lock("a"):
        count = int(counter.read_text())
        time.sleep(0.005)
        counter.write_text(str(count + 1))
"""
    command = [sys.executable, "-c", PROGRAM + program, str(cache.folder)]
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait(WAIT_S) for process in processes] == [0] * 4
    assert counter.read_text() == "20"


READ_ONLY = """
if os.geteuid() == 0:
    os.setuid(65534)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for key in ("b", "c"):
        assert cache.find(key) is None
        with cache.lock(key):
            assert not cache.put(key, lambda path: path.write_bytes(data))
print(cache.find("a") is not None, len(told), told[0].category.__name__, told[0].message)
"""


def test_a_read_only_cache_is_read_and_warns_once(cache):
    cache.put("a", writer(DATA))
    owner = 65534 if os.geteuid() == 0 else os.geteuid()
    paths = [cache.folder, *cache.folder.rglob("*")]
    for path in reversed(paths):
        os.chown(path, owner, -1)
        path.chmod(0o500 if path.is_dir() else 0o400)
    for path in cache.folder.parents:  # the test's folders are private to its user
        if path.stat().st_uid == os.geteuid() and not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)
    try:
        done = run(cache, READ_ONLY)
    finally:
        for path in paths:
            path.chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True 1 RuntimeWarning the kernel cache in ")
    assert "Permission denied" in done.stdout


def test_a_write_that_the_kernel_cuts_short_stores_nothing(cache):
    done = run(
        cache,
        """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for key in ("a", "b"):
        assert not cache.put(key, lambda path: path.write_bytes(data))
assert [one.category for one in told] == [RuntimeWarning], told
assert "File too large" in str(told[0].message)
""",
    )
    assert done.returncode == 0, done.stderr
    assert cache.find("a") is None
    assert files_of(cache, "making") == files_of(cache, "objects") == []


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_full_disk_at_any_step(cache, monkeypatch, at):
    """At the object, at the first rename, at the second."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    replace, calls = os.replace, []

    def replace_once(*paths):
        if len(calls) == at - 1:
            full()
        calls.append(paths)
        replace(*paths)

    monkeypatch.setattr(os, "replace", replace_once)
    with pytest.warns(RuntimeWarning, match="No space left on device.*this process only"):
        assert not cache.put("a", full if at == 0 else writer(DATA))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cache.put("a", full)
    assert cache.find("a") is None
    assert files_of(cache, "making") == []
    monkeypatch.undo()
    assert cache.put("a", writer(DATA))


def test_a_file_in_the_way_of_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "kernels")
    with pytest.warns(RuntimeWarning, match="Not a directory|File exists"), cache.lock("a"):
        assert not cache.put("a", writer(DATA))
    assert cache.find("a") is None
    assert cache.stats().entries == cache.clear().entries == 0


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_can_write_is_neither_read_nor_written(cache, mode):
    cache.put("a", writer(DATA))
    cache.folder.chmod(mode)
    assert cache.find("a") is None
    with pytest.warns(RuntimeWarning, match="can be written by others"):
        assert not cache.put("b", writer(DATA))


def test_a_link_in_place_of_the_folder_is_not_followed(cache):
    cache.put("a", writer(DATA))
    link = DiskCache(cache.folder.parent / "link")
    link.folder.symlink_to(cache.folder)
    assert link.find("a") is None
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        assert not link.put("b", writer(DATA))


def test_the_least_recently_used_go_first(cache):
    for key in "abcd":
        cache.put(key, writer(DATA))
    for i, key in enumerate("abcd"):
        for suffix in (".o", ".json"):
            os.utime(cache._path(key).with_suffix(suffix), (i, i))
    one = cache.stats().size_bytes // 4
    cache.find("a")  # a use
    cache.limit_bytes = 4 * one + one // 2
    cache.put("e", writer(DATA))
    assert [key for key in "abcde" if cache.find(key)] == ["a", "c", "d", "e"]
    assert cache.stats().size_bytes <= cache.limit_bytes


def test_what_is_over_the_limit_alone_is_not_kept(cache):
    cache.put("a", writer(b"small"))
    cache.limit_bytes = 1000
    assert not cache.put("b", writer(DATA))
    assert cache.find("a") is not None


def test_clear(cache):
    cache.put("a", writer(DATA))
    cache.put("b", writer(DATA))
    assert cache.clear().entries == 2
    assert cache.stats().entries == 0
    assert cache.find("a") is None
    assert cache.put("a", writer(DATA))


@pytest.mark.parametrize("value", ["", "off", "OFF", " off "])
def test_the_variable_disables(monkeypatch, value):
    monkeypatch.setenv(CACHE_VARIABLE, value)
    assert disk_cache() is None


def test_the_variable_moves(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert disk_cache().folder.parent == tmp_path
    assert disk_cache() is disk_cache()
    assert list(tmp_path.iterdir()) == []  # asking makes nothing


def test_on_by_default_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk_cache().folder.parent == tmp_path / "cudnn_blocks"
