"""Times the products of suites by two installations of the package, in turns on one GPU.

    python benchmarks/compare.py BEFORE AFTER --out compared.csv [--suites squares,llama,...]

BEFORE and AFTER are folders that `pip install --target` has filled. Each has a process of its own;
of these one runs at a time, by the profiler's device time. A case's ratio is the median over
the turns of its device time before to that after: over 1 is faster.
"""

import argparse
import csv
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

SUITES = "squares,llama,decode,unaligned,fused,gated,mlp,moe"
REPEATS, UNCOUNTED = 15, 3
CASES_AT_ONCE = 20
# Two sets of operands, which take turns, are needed where one may stay in the cache.
LARGE_BYTES = 2**30


class Side:
    """One installation's process."""

    def __init__(self, folder: str, suites: str):
        path = os.pathsep.join([os.path.abspath(folder), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", suites],
            # Each process keeps what memory it has had.
            env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"}
            | os.environ
            | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what: str = "") -> dict:
        """Tells the process to go on, and gives what it says."""
        if what:
            print(what, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended, by {self.process.wait()}")
        return json.loads(line)


def compare(arguments) -> None:
    """Runs both sides in turns, writes the record and prints a line for each suite."""
    before, after = (Side(folder, arguments.suites) for folder in arguments.folders)
    cases = before.ask()
    if cases != after.ask():
        raise SystemExit("compare: both installations must have the same suites")
    turns = []
    for turn in range(arguments.turns):
        order = (before, after) if turn % 2 == 0 else (after, before)
        times = {side: side.ask("turn") for side in order}
        turns.append((times[before], times[after]))
        # What is there stays, should a later turn fail.
        rows = summarise(cases, turns)
        with open(arguments.out, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("suite", "case", "before_us", "after_us", "ratio", "spread"))
            writer.writerows(rows)
        print(f"turn {turn + 1} of {arguments.turns}", file=sys.stderr, flush=True)
    for suite in dict.fromkeys(row[0] for row in rows):
        own = sorted((float(row[4]), row[1]) for row in rows if row[0] == suite)
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in own))
        least, name = own[0]
        print(f"{suite:12} {len(own):4} cases, geomean {mean:.4f}, least {least:.3f}: {name}")


def summarise(cases: list[str], turns: list[tuple[dict, dict]]) -> list[tuple[str, ...]]:
    """A row for each case: its medians, their ratio, and by how much a side's own turns differ."""
    rows = []
    for name in cases:
        pairs = [(a[name], b[name]) for a, b in turns if name in a and name in b]
        if not pairs:
            print(f"not measured: {name}", file=sys.stderr)
            continue
        sides = list(zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        spread = max(max(side) / min(side) for side in sides) - 1
        numbers = (*map(statistics.median, sides), ratio, spread)
        rows.append((name.split()[0], name, *(f"{x:.3f}" for x in numbers)))
    return rows


def work(suites: str) -> None:
    """In a process of its own: compiles every case, then times all of them whenever told to."""
    import jax

    from jax_tcgemm.bench import contenders
    from jax_tcgemm.bench.suites import load_suite

    out, sys.stdout = sys.stdout, sys.stderr

    def prepare(indexed):
        index, (suite, case) = indexed
        title = f"{suite} {case.label} {case.dtype} {getattr(case, 'layout', '')} {case.shape}"
        ours = getattr(case, "ours", None)
        if ours is None:
            made = [contenders.build(case, "auto", None, f"tcgemm_compare_{index}")]
        else:
            made = [
                contenders._build_workload(case, name, function, f"tcgemm_compare_{index}_{i}")
                for i, (name, function) in enumerate(ours.items())
            ]
        compiled = [x.function.lower(*case.operands).compile() for x in made]
        names = [" ".join(f"{title} {'' if ours is None else x.name}".split()) for x in made]
        modules = [x.module for x in made]
        return case, dict(zip(names, zip(modules, compiled, strict=True), strict=True))

    every = [(name, case) for name in suites.split(",") for case in load_suite(name).cases]
    with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        prepared = list(pool.map(prepare, enumerate(every)))
    print(json.dumps([name for _, made in prepared for name in made]), file=out, flush=True)
    for _ in sys.stdin:
        times = {}
        for first in range(0, len(prepared), CASES_AT_ONCE):
            times |= _times(jax, prepared[first : first + CASES_AT_ONCE])
        print(json.dumps(times), file=out, flush=True)


def _times(jax, prepared) -> dict[str, float]:
    """Median device time of the contenders of some cases, in microseconds, by one trace."""
    from jax_tcgemm.bench import reference
    from jax_tcgemm.tuning import timing

    cache_bytes = timing.cache_bytes()
    modules = {}
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = options.python_tracer_level = 0
        jax.profiler.start_trace(folder, profiler_options=options)
        for case, made in prepared:
            set_bytes = sum(x.size * x.dtype.itemsize for x in case.operands)
            sets = reference.make_inputs(case, 2 if set_bytes < LARGE_BYTES else 1)
            num_bytes = sum(x.nbytes for own in sets for x in jax.tree.leaves(own))
            flush = timing._flush(2 * cache_bytes) if num_bytes < 2 * cache_bytes else None
            for name, (module, function) in made.items():
                modules[name] = module
                done = None
                for call in range(UNCOUNTED + REPEATS):
                    if flush is not None:
                        flush()
                    done = function(*sets[call % len(sets)])
                jax.block_until_ready(done)
            # The memory that the next case takes may be these arrays'.
            del sets, done
        jax.profiler.stop_trace()
        (trace,) = pathlib.Path(folder).glob("**/*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(trace))
    found = {}
    for name, module in modules.items():
        try:
            own = timing.device_times(data, {module: UNCOUNTED + REPEATS})[module]
            found[name] = statistics.median(own.us[UNCOUNTED:])
        except timing.TraceError as error:
            print(f"{name}: {error}", file=sys.stderr)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="BEFORE and AFTER")
    parser.add_argument("--suites", default=SUITES, help="comma-separated")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--out", default="compared.csv")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.worker:
        work(parsed.worker)
    elif len(parsed.folders) == 2:
        compare(parsed)
    else:
        parser.error("two folders must be named: that of before, then that of after")
