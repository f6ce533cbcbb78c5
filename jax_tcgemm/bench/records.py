"""Benchmark records: what is written for one measured case, and on what machine.

A file of records is JSON lines. One record is one implementation on one case, with the peers
that were interleaved with it::

    schema, kind     the version of this list; "product" or "workload"
    time, revision   when, and of what source
    suite, label, batch, m, n, k, dtype, out, layout, epilogue
    implementation   what was asked for: a name, or "auto" for the library's own choice
    suite, label, dtype, shape, sizes, implementation   of a workload, instead of these two lines
    forced_config    the config that was asked for, or null
    ran, config, why what ran and why it was chosen
    us               {"p10", "p50", "p90"} of the calls
    tflops, gbps     at the median; bytes count A, B and D once each
    error            max |D - reference| / max |reference|
    peak_bytes       device memory of the call as XLA accounts for it, operands and results included
    temp_bytes       of that, what is neither operand nor result; peers and parts have it, too
    peers            {name: {"us": {...}, "ratio": ..., "error": ..., "peak_bytes": ...}}
    ratio            the least of the peers' ratios: a peer's time / ours in each turn, of these the
                     median; above 1, ours is faster. Where peers have none: of their medians
    parts            {name: {"us": {...}, "ratio": ..., "peak_bytes": ...}} of what computes a part
                     of a workload only, such as the product alone; where there is any
    timer, samples, kernels
    machine          GPU, driver, CUDA, JAX, Python, clocks and power around the measurement

A record of kind "overhead" holds host microseconds a step of tiny products; see overhead.py. One
of kind "parallel" holds a layer over several devices; see parallel.py. One of kind "decode" holds
decode steps over several devices; see decode.py. One of kind "program" holds products inside a loop
beside plain JAX; see programs.py. One of kind "sweep" holds a random problem by the default choice
beside plain JAX; see sweep.py. One of kind "training" is what examples/train_gpt.py wrote.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jaxlib

from jax_tcgemm.inspect.info import CUDA_IMPLEMENTATIONS
from jax_tcgemm.selection import target_device

SCHEMA = 1

_SMI_FIELDS = {
    "gpu": ("name", str),
    "driver": ("driver_version", str),
    "sm_mhz": ("clocks.sm", float),
    "sm_mhz_max": ("clocks.max.sm", float),
    "memory_mhz": ("clocks.mem", float),
    "power_w": ("power.draw", float),
    "power_limit_w": ("power.limit", float),
    "temperature_c": ("temperature.gpu", float),
}


def gpu_state() -> dict:
    """Name, driver, clocks, power and temperature of the first GPU; {} without nvidia-smi."""
    query = ",".join(field for field, _ in _SMI_FIELDS.values())
    try:
        line = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", "0"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_gpu_state(line)


def parse_gpu_state(line: str) -> dict:
    """Reads one line of nvidia-smi's answer; a field it does not know is left out."""
    state = {}
    values = [value.strip() for value in line.strip().split(",")]
    for (key, (_, convert)), value in zip(_SMI_FIELDS.items(), values, strict=False):
        try:
            state[key] = convert(value)
        except ValueError:
            continue
    return state


def git_revision() -> str | None:
    """Revision of the checkout the command runs in, ``+`` when it has changes; None outside one."""
    root = pathlib.Path.cwd()
    if not (root / "jax_tcgemm").is_dir():
        return None
    try:
        revision, changes = (
            subprocess.run(
                ["git", *arguments],
                capture_output=True,
                text=True,
                timeout=20,
                check=True,
                cwd=root,
            ).stdout.strip()
            for arguments in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return revision + ("+" if changes else "")


def machine() -> dict:
    """Where the records of this process come from."""
    device = jax.devices()[0]
    state = gpu_state() if device.platform == "gpu" else {}
    return {
        "platform": device.platform,
        "device": target_device("cpu").name if device.platform == "cpu" else device.device_kind,
        "driver": state.get("driver"),
        "backend": device.client.platform_version.replace("\n", "; "),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def best_peer(record: dict) -> tuple[str, float] | None:
    """The fastest peer of a record and its median in microseconds."""
    peers = {name: peer["us"]["p50"] for name, peer in record["peers"].items()}
    if not peers:
        return None
    name = min(peers, key=peers.__getitem__)
    return name, peers[name]


def read_trainings(folder: pathlib.Path) -> list[dict]:
    """Read what `examples/train_gpt.py` wrote to a folder, as records of kind "training"."""
    found = []
    for path in sorted(folder.glob("*train_gpt*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        own = {"kind": "training", "name": path.stem, "time": ""}
        found.append(own | record | {"machine": {"device": record["device"]}})
    return found


def contender_name(record: dict) -> str:
    """The implementation that was asked for; with its config, where one was forced."""
    forced = record.get("forced_config")
    return f"{record['implementation']}/{forced}" if forced else record["implementation"]


def shape(record: dict) -> str:
    """The shape of a record's case for people, with its layout where it is a product."""
    if record["kind"] != "product":
        return record["shape"]
    batch = f"{record['batch']}×" if record["batch"] > 1 else ""
    return f"{batch}{record['m']}×{record['n']}×{record['k']} {record['layout']}"


def record_tflops(record: dict, peer: str) -> float:
    """TFLOP/s of a peer at its median, from the flops that the record's own numbers imply."""
    return record["tflops"] * record["us"]["p50"] / record["peers"][peer]["us"]["p50"]


def products(records: Iterable[dict]) -> list[dict]:
    """The records of products; of several with the same case and contender, the newest."""
    keys = ("suite", "batch", "m", "n", "k", "dtype", "layout")
    return _newest_of_contenders(records, "product", keys)


def workloads(records: Iterable[dict]) -> list[dict]:
    """The records of workloads; of several with the same workload and contender, the newest."""
    return _newest_of_contenders(records, "workload", ("suite", "label", "shape", "dtype"))


def sweeps(records: Iterable[dict]) -> list[dict]:
    """The records of random problems; sweep.py describes them."""
    return [record for record in records if record["kind"] == "sweep"]


def _newest_of_contenders(records, kind: str, keys: Sequence[str]) -> list[dict]:
    def case(record):
        of_case = tuple(record[key] for key in keys)
        return (*of_case, record["machine"]["device"], contender_name(record))

    return list(newest(records, kind, case).values())


def newest(records: Iterable[dict], kind: str, case: Callable[[dict], Any]) -> dict[Any, dict]:
    """Return the newest record of each case among those of a kind, the oldest first."""
    found: dict[Any, dict] = {}
    for record in sorted(records, key=lambda r: r["time"]):
        if record["kind"] == kind:
            found.pop(key := case(record), None)
            found[key] = record
    return found


def grouped(records: Iterable[dict]) -> dict[tuple[str, str], list[dict]]:
    """Records by suite and dtype, in order of first appearance."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for record in records:
        groups.setdefault((record["suite"], record["dtype"]), []).append(record)
    return groups


def contenders(records: Iterable[dict]) -> list[str]:
    """The names of ours that were measured: our choice first, then up the ladder."""

    def rung(record):
        name = record["implementation"]
        return CUDA_IMPLEMENTATIONS.index(name) if name in CUDA_IMPLEMENTATIONS else -1

    return list(dict.fromkeys(map(contender_name, sorted(records, key=rung))))


def append_records(path: pathlib.Path, records: Iterable[dict]) -> None:
    """Adds records to a JSON-lines file, creating it and its folder where needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_records(paths: Iterable[pathlib.Path]) -> list[dict]:
    """All records of JSON-lines files, in order.

    Raises:
      ValueError: for a line that is no record of this schema.
    """
    records = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"bench: {path}:{number} must be JSON, got {error}; remove the line"
                ) from error
            if record.get("schema") != SCHEMA:
                raise ValueError(
                    f"bench: {path}:{number} must have schema {SCHEMA}, got "
                    f"{record.get('schema')}; measure it again"
                )
            records.append(record)
    return records
