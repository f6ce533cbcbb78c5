"""Tables of measured choices: the fastest implementation and config of a problem on a device.

A table is a JSON file::

    {"format": 1,
     "device": {"platform": "cuda", "name": "NVIDIA H200",
                "compute_capability": 90, "num_sms": 132},
     "provenance": "where the figures come from",
     "entries": {"512x512x512 NN bf16->bf16 (f32)": {
         "implementation": "wgmma", "config": "64x64x64_c1x1x1_pp", "us": 4.0,
         "version": "0.1.0", "abi": 1}}}

Tables come from three places, and the last one that has a problem wins: the tables that ship with
the package, the user's cache folder, and tables given to `adopt`. Files are read once in a process,
when the first product is lowered, so that a running program always makes the same choices.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.system.switches import cache_folder

FORMAT = 1
SHIPPED = Path(__file__).parents[1] / "data/tuned"
_LOCK_TIMEOUT_S = 10.0


@dataclasses.dataclass(frozen=True)
class Entry:
    """Fastest implementation and config of one problem, with the measured time.

    Attributes:
      implementation: name of the implementation, which may be "xla".
      config: name of the config.
      us: measured time in microseconds.
      version: version of jax_tcgemm that measured the entry.
      abi: ABI number of the implementation's module; an entry with another number is not used.
    """

    implementation: str
    config: str
    us: float
    version: str
    abi: int


@dataclasses.dataclass(frozen=True)
class DeviceKey:
    """Key of a table's devices, which must be equal in every attribute."""

    platform: str
    name: str
    compute_capability: int
    num_sms: int

    @property
    def slug(self) -> str:
        """File name of the device's table, without the suffix."""
        words = f"{self.platform}-{self.name}-{self.compute_capability}-{self.num_sms}"
        return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


@dataclasses.dataclass(frozen=True)
class Table:
    """Entries of one device, by problem (see `problem_key`)."""

    device: DeviceKey
    entries: Mapping[str, Entry]
    provenance: str = ""


def problem_key(problem: Problem) -> str:
    """Return all that selection depends on as text; strides appear where they are not packed."""
    p = problem
    key = str(p)
    for name, operand, rows, columns in (("a", p.a, p.m, p.k), ("b", p.b, p.k, p.n)):
        if operand.transposed:
            rows, columns = columns, rows
        packed = rows * columns if p.batch > 1 else 0
        is_inner_only = p.batch_inner in (0, p.batch)
        strides = (operand.ld, operand.outer_stride, operand.inner_stride)
        if strides != (columns, 0 if is_inner_only else p.batch_inner * packed, packed):
            key += f" {name}={operand.ld},{operand.outer_stride},{operand.inner_stride}"
    if (p.alpha, p.beta) != (1.0, 0.0):
        key += f" alpha={p.alpha:g} beta={p.beta:g}"
    if p.epilogue.up_offset:
        key += f" up={p.epilogue.up_offset}"
    return key


def make_entry(implementation: str, config: str, us: float, abi: int) -> Entry:
    """Return an entry measured by this version of the package."""
    return Entry(implementation, config, round(float(us), 3), package_version(), abi)


def package_version() -> str:
    """Return the version of jax_tcgemm."""
    return importlib.metadata.version("jax_tcgemm")


# --- files --------------------------------------------------------------------------------------


def read_table(path: str | os.PathLike) -> Table:
    """Read a table.

    Args:
      path: a file that `write_table` or `merge_table` wrote.

    Returns:
      The table.

    Raises:
      OSError: when the file cannot be read or is not a regular file.
      ValueError: when the file is not a table of this format.
    """
    path = Path(path)
    _check_regular(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}, not {FORMAT}")
        entries = {key: _typed(Entry, fields, key) for key, fields in data["entries"].items()}
        device = _typed(DeviceKey, data["device"], "device")
        return Table(device, entries, str(data.get("provenance", "")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"tuning: the table must be JSON of format {FORMAT}, got {path}: {error}; "
            "delete it, or write it again with `python -m jax_tcgemm tune`"
        ) from error


def _typed(kind: type, fields: Mapping, key: str) -> Entry | DeviceKey:
    """Return an Entry or a DeviceKey from the fields that a file has for `key`."""
    made = kind(**fields)
    for name, wanted in kind.__annotations__.items():
        value = getattr(made, name)
        accepted = (int, float) if wanted is float else wanted
        if not isinstance(value, accepted) or isinstance(value, bool):
            raise ValueError(f"{name} of {key!r} must be of type {wanted.__name__}")
        if wanted is float and not 0 <= value <= sys.float_info.max:
            raise ValueError(f"{name} of {key!r} must be finite and not negative")
    return made


def _check_regular(path: Path) -> None:
    """Raise OSError for a folder, FIFO or device, which is neither read nor replaced."""
    if path.exists() and not path.is_file():
        raise OSError(f"tuning: the table must be a regular file, got {path}; take another path")


def write_table(path: str | os.PathLike, table: Table) -> None:
    """Write a table atomically: a reader sees the whole new table or the previous file.

    Args:
      path: the file, or a link to it; a missing folder is created.
      table: the table.

    Raises:
      OSError: when the table cannot be written; the file is then unchanged.
    """
    path = Path(path).resolve()
    _check_regular(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "format": FORMAT,
        "device": dataclasses.asdict(table.device),
        "provenance": table.provenance,
        "entries": {key: dataclasses.asdict(table.entries[key]) for key in sorted(table.entries)},
    }
    # One line per entry, so that a diff shows the changed entries.
    text = json.dumps({k: v for k, v in data.items() if k != "entries"}, indent=1)
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in data["entries"].items()]
    body = ",\n".join(lines)
    text = f'{text[:-2]},\n "entries": {{\n{body}\n }}\n}}\n'
    handle, temporary = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def check_writable(path: str | os.PathLike) -> None:
    """Raise OSError where `write_table` would, as far as a test without a table can tell."""
    path = Path(path).resolve()
    _check_regular(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def merge_table(path: str | os.PathLike, table: Table) -> None:
    """Add a table's entries to a file, and keep entries of other, also concurrent, writers.

    The file is locked by `<path>.lock`, which is left in place. A file that is not a table, or is a
    table of another device, is replaced with a warning.

    Args:
      path: the file, or a link to it; created where missing.
      table: the entries to add.

    Raises:
      OSError: when the file cannot be written, or when it stays locked for ten seconds without
        being replaced.
    """
    path = Path(path).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        entries, provenance = {}, table.provenance
        try:
            found = read_table(path)
        except FileNotFoundError:
            pass
        except ValueError as error:
            warnings.warn(f"jax_tcgemm: replacing a table: {error}", stacklevel=2)
        else:
            if found.device == table.device:
                entries, provenance = found.entries, table.provenance or found.provenance
            else:
                warnings.warn(
                    f"jax_tcgemm: replacing the table {path}, which is of {found.device.name!r}, "
                    f"by one of {table.device.name!r}",
                    stacklevel=2,
                )
        merged = {**entries, **table.entries}
        write_table(path, dataclasses.replace(table, entries=merged, provenance=provenance))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file; waiting continues for as long as other writers replace the file."""
    import filelock

    lock = filelock.FileLock(f"{path}.lock", timeout=_LOCK_TIMEOUT_S, poll_interval=0.01)
    while True:
        before = _version_of(path)
        try:
            lock.acquire()
        except filelock.Timeout:
            if _version_of(path) == before:
                raise
        else:
            break
    try:
        yield
    finally:
        lock.release()


def _version_of(path: Path) -> tuple[int, int] | None:
    """Return a file's inode and modification time, which change with it; None if missing."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


# --- the tables of this process -----------------------------------------------------------------

_lock = threading.RLock()
# For each device, tables in ascending order of precedence.
_tables: dict[DeviceKey, list[tuple[str, Mapping[str, Entry]]]] = {}
_loaded: list[tuple[str, Table]] = []
_revision = 0
# True inside a block of `unused`.
_is_unused = False
_warned: set[str] = set()


def cache_file(device: DeviceKey) -> Path | None:
    """Return the path of the user's table of a device; None when TCGEMM_CACHE_DIR is "off"."""
    folder = cache_folder()
    return None if folder is None else folder / f"{device.slug}.json"


_SHIPPED = "shipped table"


def lookup(problem: Problem, device: DeviceKey) -> Iterator[tuple[Entry, str]]:
    """Return the entries of a problem in descending precedence, each with its table's name."""
    if _is_unused:
        return iter(())
    with _lock:
        if device not in _tables:
            _tables[device] = list(_read_all(device))
        key = problem_key(problem)
        found = [(table[key], source) for source, table in _tables[device] if key in table]
    return reversed(found)


@contextlib.contextmanager
def unused() -> Iterator[None]:
    """Ignore all tables in every thread, so that selection treats each problem as unmeasured."""
    global _is_unused, _revision
    before, _is_unused, _revision = _is_unused, True, _revision + 1
    try:
        yield
    finally:
        _is_unused, _revision = before, _revision + 1


def is_tuned(problem: Problem, device: DeviceKey) -> bool:
    """Return whether the user's cache or an adopted table has an entry for a problem."""
    return any(not source.startswith(_SHIPPED) for _, source in lookup(problem, device))


def _read_all(device: DeviceKey) -> Iterator[tuple[str, Mapping[str, Entry]]]:
    places = [(f"{_SHIPPED} {path.name}", path) for path in sorted(SHIPPED.glob("*.json"))]
    if (path := cache_file(device)) is not None:
        places.append((f"user cache {path}", path))
    for source, path in places:
        try:
            table = read_table(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            _warn_once(f"a table of tuned choices is not used: {error}")
            continue
        if table.device == device:
            yield source, table.entries
    for source, table in _loaded:
        if table.device == device:
            yield source, table.entries


def revision() -> int:
    """Return a number that changes whenever the results of `lookup` may change."""
    return _revision


def adopt(table: Table, source: str) -> None:
    """Give a table precedence over all present ones in this process.

    Args:
      table: the table.
      source: name of the table in the reason of a choice.
    """
    global _revision
    with _lock:
        _revision += 1
        _loaded.append((source, table))
        if table.device in _tables:
            _tables[table.device].append((source, table.entries))


def save_to_cache(table: Table) -> Path | None:
    """Merge a table into the user's cache folder.

    If the folder cannot be written, a warning is given once in a process.

    Args:
      table: the entries to add.

    Returns:
      The file, or None when it was not written.
    """
    if (path := cache_file(table.device)) is None or not table.entries:
        return None
    try:
        merge_table(path, table)
    except OSError as error:
        _warn_once(f"tuned choices hold for this process only: {error}")
        return None
    return path


def reset() -> None:
    """Forget every table, so that the files are read again when the next product is lowered."""
    global _revision
    with _lock:
        _revision += 1
        _tables.clear()
        _loaded.clear()
        _warned.clear()


def _warn_once(text: str) -> None:
    with _lock:
        is_new = text not in _warned
        _warned.add(text)
    if is_new:
        warnings.warn(f"jax_tcgemm: {text}", stacklevel=3)
