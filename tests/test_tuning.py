"""Tables of measured choices: files, the user's cache, and what becomes of bad ones."""

import dataclasses
import json
import os
import subprocess
import sys
import warnings

import filelock
import pytest

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.selection import tables
from jax_tcgemm.system.switches import cache_folder

DEVICE = tables.DeviceKey("cuda", "NVIDIA Test 1", 90, 4)
DENSE = Operand("bf16", False, 64)
PROBLEM = Problem(1, 1, 64, 64, 64, DENSE, DENSE, "bf16", "f32")
KEY = "64x64x64 NN bf16->bf16 (f32)"


def entry(us=2.5, config="small"):
    return tables.Entry("wgmma", config, us, "0.1.0", 1)


def table(**entries):
    return tables.Table(DEVICE, {key: entry(us) for key, us in entries.items()}, "a test")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The path of DEVICE's table in an empty cache folder."""
    monkeypatch.setenv("TCGEMM_CACHE_DIR", str(tmp_path / "cache"))
    tables.reset()
    yield tmp_path / "cache" / "cuda-nvidia-test-1-90-4.json"
    tables.reset()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, KEY),
        ({"a": dataclasses.replace(DENSE, ld=72)}, f"{KEY} a=72,0,0"),
        ({"alpha": 2.0}, f"{KEY} alpha=2 beta=0"),
        ({"out_dtype": "f32"}, "64x64x64 NN bf16->f32 (f32)"),
        (
            {"batch": 6, "batch_inner": 6, "b": Operand("bf16", False, 64, 0, 4096)},
            f"6 x {KEY} a=64,0,0",
        ),
        (
            {
                "batch": 6,
                "batch_inner": 3,
                "a": Operand("bf16", False, 64, 3 * 4096, 4096),
                "b": Operand("bf16", False, 64, 3 * 4096, 4096),
            },
            f"2x3 x {KEY}",
        ),
    ],
    ids=["packed", "padded rows", "alpha", "output", "broadcast", "two levels"],
)
def test_keys_tell_problems_apart(changes, key):
    assert tables.problem_key(dataclasses.replace(PROBLEM, **changes)) == key


def test_round_trip(tmp_path):
    path = tmp_path / "folder" / "table.json"
    written = tables.Table(DEVICE, {KEY: entry(), "b": entry(3.0, "large")}, "a test")
    tables.write_table(path, written)
    assert tables.read_table(path) == written
    assert os.listdir(path.parent) == ["table.json"]
    assert len(path.read_text().splitlines()) == 14


def test_merging_keeps_what_others_wrote(tmp_path):
    path = tmp_path / "table.json"
    tables.merge_table(path, table(a=1.0, b=2.0))
    tables.merge_table(path, table(b=3.0, c=4.0))
    us = {key: found.us for key, found in tables.read_table(path).entries.items()}
    assert us == {"a": 1.0, "b": 3.0, "c": 4.0}
    other = dataclasses.replace(table(d=5.0), device=dataclasses.replace(DEVICE, name="other"))
    with pytest.warns(UserWarning, match="which is of 'NVIDIA Test 1', by one of 'other'"):
        tables.merge_table(path, other)
    assert list(tables.read_table(path).entries) == ["d"]


def valid():
    device = dataclasses.asdict(DEVICE)
    return {"format": 1, "device": device, "entries": {KEY: dataclasses.asdict(entry())}}


def with_time(us):
    fields = dataclasses.asdict(entry()) | {"us": us}
    return json.dumps(valid() | {"entries": {KEY: fields}})


BAD = {
    "empty": "",
    "cut short": json.dumps(valid())[:-30],
    "not JSON": "\x00\x01",
    "a list": "[1, 2]",
    "another format": json.dumps(valid() | {"format": 2}),
    "no entries": json.dumps({k: v for k, v in valid().items() if k != "entries"}),
    "entries of text": json.dumps(valid() | {"entries": {"a": "b"}}),
    "a field too many": json.dumps(valid() | {"device": {"more": 1}}),
    "time as text": with_time("fast"),
    "time that is none": with_time(float("nan")),
    "time beyond float": with_time(10**400),
    "a number of 5000 digits": with_time(0).replace('"us": 0', '"us": 1' + "0" * 5000),
    "true for a number": with_time(True),
    "lists in lists": "[" * 200_000,
    "a device of lists": json.dumps(valid() | {"device": {key: [] for key in valid()["device"]}}),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_a_corrupt_cache_is_survived_with_one_warning_and_replaced(text, cache):
    cache.parent.mkdir()
    cache.write_text(text)
    with pytest.warns(UserWarning, match="a table of tuned choices is not used"):
        assert list(tables.lookup(PROBLEM, DEVICE)) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(tables.lookup(dataclasses.replace(PROBLEM, m=32), DEVICE)) == []
    with pytest.raises(ValueError, match="tuning: the table must be JSON of format 1, got"):
        jax_tcgemm.tuning.load(cache)
    with pytest.warns(UserWarning, match="replacing a table"):
        assert tables.save_to_cache(table(**{KEY: 2.5})) == cache
    tables.reset()
    ((found, source),) = tables.lookup(PROBLEM, DEVICE)
    assert (found, source) == (entry(), f"user cache {cache}")


def test_bytes_that_are_no_text_are_a_corrupt_cache(cache):
    cache.parent.mkdir()
    cache.write_bytes(b"\xff\xfe\xfa")
    with pytest.warns(UserWarning, match=f"a table of tuned choices is not used: .*{cache}"):
        assert list(tables.lookup(PROBLEM, DEVICE)) == []


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["a FIFO", "a folder"])
def test_what_is_no_file_is_neither_read_nor_replaced(make, cache):
    cache.parent.mkdir()
    make(cache)
    with pytest.warns(UserWarning, match=f"table must be a regular file, got {cache}"):
        assert list(tables.lookup(PROBLEM, DEVICE)) == []
    with pytest.warns(UserWarning, match="hold for this process only: .* must be a regular file"):
        assert tables.save_to_cache(table(a=1.0)) is None
    for write in (tables.write_table, tables.merge_table):
        with pytest.raises(OSError, match=f"table must be a regular file, got {cache}"):
            write(cache, table(a=1.0))
    assert not cache.is_file()


def test_the_file_behind_a_link_is_written(tmp_path):
    path, link = tmp_path / "table.json", tmp_path / "link.json"
    link.symlink_to(path)
    tables.write_table(link, table(a=1.0))
    tables.merge_table(link, table(b=2.0))
    assert link.is_symlink()
    assert tables.read_table(path).entries.keys() == {"a", "b"}


def test_a_broken_shipped_table_is_survived_with_a_warning(cache, tmp_path, monkeypatch):
    (tmp_path / "broken.json").write_text("{")
    monkeypatch.setattr(tables, "SHIPPED", tmp_path)
    tables.merge_table(cache, table(**{KEY: 1.0}))
    with pytest.warns(UserWarning, match="a table of tuned choices is not used: .*broken.json"):
        assert [found.us for found, _ in tables.lookup(PROBLEM, DEVICE)] == [1.0]


def test_a_folder_that_cannot_be_written_is_survived_with_one_warning(cache):
    cache.parent.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="tuned choices hold for this process only"):
        assert tables.save_to_cache(table(a=1.0)) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tables.save_to_cache(table(b=1.0)) is None
        assert list(tables.lookup(PROBLEM, DEVICE)) == []


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    tables.write_table(path, table(a=1.0))

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        tables.write_table(path, table(b=2.0))
    assert os.listdir(tmp_path) == ["table.json"]
    assert list(tables.read_table(path).entries) == ["a"]


WRITER = """
import sys
from jax_tcgemm.selection import tables
from jax_tcgemm.system.switches import cache_folder
path, name = sys.argv[1:]
device = tables.DeviceKey("cuda", "NVIDIA Test 1", 90, 4)
for i in range(20):
    found = {f"{name}-{i}": tables.Entry("wgmma", "small", float(i), "0.1.0", 1)}
    tables.merge_table(path, tables.Table(device, found))
"""


def test_a_writer_waits_as_long_as_others_write(tmp_path, monkeypatch):
    """Where many write a large table, each may have to wait for longer than any fixed time."""
    path, turns = tmp_path / "table.json", []

    class Busy(filelock.FileLock):
        def acquire(self, *args, **kwargs):
            if len(turns) < 3:
                turns.append(f"other-{len(turns)}")
                others = dict.fromkeys(turns, 1.0)
                tables.write_table(path, table(**others))
                raise filelock.Timeout(self.lock_file)
            return super().acquire(*args, **kwargs)

    monkeypatch.setattr(filelock, "FileLock", Busy)
    tables.merge_table(path, table(mine=2.0))
    assert tables.read_table(path).entries.keys() == {"mine", *turns}


def test_a_lock_that_nobody_gives_back_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    tables.write_table(path, table(a=1.0))
    monkeypatch.setattr(tables, "_LOCK_TIMEOUT_S", 0.05)
    with filelock.FileLock(f"{path}.lock"), pytest.raises(OSError, match="table.json.lock"):
        tables.merge_table(path, table(b=1.0))
    assert tables.read_table(path).entries.keys() == {"a"}


def test_concurrent_writers_lose_nothing_and_readers_see_whole_files(tmp_path):
    path = tmp_path / "table.json"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, path, name], cwd=tmp_path)
        for name in ("a", "b", "c")
    ]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            seen.add(len(tables.read_table(path).entries))
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert len(tables.read_table(path).entries) == 60
    assert len(seen) > 1


def test_tables_are_read_once_in_a_process(cache):
    tables.merge_table(cache, table(**{KEY: 1.0}))
    assert [found.us for found, _ in tables.lookup(PROBLEM, DEVICE)] == [1.0]
    tables.merge_table(cache, table(**{KEY: 9.0}))
    assert [found.us for found, _ in tables.lookup(PROBLEM, DEVICE)] == [1.0]
    tables.reset()
    assert [found.us for found, _ in tables.lookup(PROBLEM, DEVICE)] == [9.0]


def test_the_last_table_wins(cache, tmp_path):
    tables.merge_table(cache, table(**{KEY: 1.0}))
    path = tmp_path / "mine.json"
    tables.write_table(path, table(**{KEY: 2.0}))
    jax_tcgemm.tuning.load(path)
    tables.adopt(table(**{KEY: 3.0}), "autotune")
    found = [(known.us, source.split()[0]) for known, source in tables.lookup(PROBLEM, DEVICE)]
    assert found == [(3.0, "autotune"), (2.0, "table"), (1.0, "user")]


def test_the_cache_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("TCGEMM_CACHE_DIR", "off")
    assert cache_folder() is None
    assert tables.save_to_cache(table(a=1.0)) is None
    monkeypatch.delenv("TCGEMM_CACHE_DIR")
    assert cache_folder().name == "jax_tcgemm"


def test_the_shipped_table_is_read_without_a_warning():
    tables.reset()
    square = dataclasses.replace(DENSE, ld=4096)
    large = dataclasses.replace(PROBLEM, m=4096, n=4096, k=4096, a=square, b=square)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ((found, source),) = tables.lookup(large, selection.ASSUMED_GPU.key)
    assert source == "shipped table h200.json"
    assert found.us > 100
