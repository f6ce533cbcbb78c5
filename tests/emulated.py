"""Builds the emulator of tests/emulator with kernels of csrc and runs them: see its README.md."""

import ctypes
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import numpy as np
from emulated_units import Source, units_of
from emulated_units import carried as carried
from kernel_instances import MMA_SYNC_INSTRUCTIONS, WGMMA_INSTRUCTIONS
from mistakes import Mistake, plant

from jax_tcgemm.device.fusion.results import result_arrays
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.selection import tables
from jax_tcgemm.selection.configs import WgmmaConfig

REPOSITORY = Path(__file__).resolve().parents[1]

_MACHINE = tuple(
    f"emulator/{name}.cc" for name in ("machine", "instructions", "wgmma", "tensor_map", "runtime")
)

# Host code that each implementation needs, and the kernels that it launches besides those that
# multiply.
_COMMON = ["core/problem.cc", "core/ragged_problem.cc", "kernels/common/kernel.cc"]
_REDUCTIONS = [
    "kernels/common/split_reduction.cc",
    "kernels/common/function_launch.cc",
    "emulator/instances/split_reduction.cc",
]


def _of(family: str, *names: str) -> list[str]:
    return [f"kernels/{family}/{name}.cc" for name in names]


SOURCES = {
    "simt": [*_COMMON, *_of("simt", "simt", "launch")],
    "batched": [*_COMMON, *_of("batched", "batched", "launch", "tiling")],
    "wmma": [*_COMMON, *_REDUCTIONS, *_of("wmma", "wmma", "launch")],
    "mma_sync": [
        *_COMMON,
        *_REDUCTIONS,
        *_of("mma_sync", "mma_sync", "ragged", "launch", "ragged_launch"),
        "kernels/common/tensor_map.cc",
    ],
    "rows": [
        *_COMMON,
        "core/rows_problem.cc",
        *_of("rows", "rows", "launch"),
        "emulator/instances/rows.cc",
    ],
    "packed": [
        *_COMMON,
        "core/packed_problem.cc",
        "kernels/common/tensor_map.cc",
        *_of("packed", "packed", "launch", "wide_launch"),
    ],
    "quantize": [*_COMMON, "core/quantize_problem.cc", *_of("quantize", "quantize", "launch")],
    "split": [*_COMMON, "core/split_problem.cc", *_of("split", "split", "launch")],
    "wgmma": [
        *_COMMON,
        *_REDUCTIONS,
        "kernels/common/operand_copy.cc",
        "emulator/instances/operand_copy.cc",
        *_of("wgmma", "wgmma", "ragged", "tensor_map", "launch", "ragged_launch"),
        "kernels/common/tensor_map.cc",
    ],
}

# Bytes around each array that no kernel may write, and that are NaN when it reads them: more than a
# row of any, so that a kernel that is a row off writes nowhere else.
_GUARD = 8192


def wgmma_table(dtype: str, layout: str, *configs: str) -> Source:
    """The kernels of some of wgmma's configs; `layout`: "0" for K-major, "1" for M- or N-major."""
    return Source(
        "emulator/instances/wgmma.cc",
        (
            ("EMULATED_TABLE", f"{dtype}_{layout}"),
            *_wgmma_types(dtype, layout),
            ("EMULATED_CONFIGS", ",".join(f'"{config}"' for config in configs)),
        ),
    )


@dataclasses.dataclass(frozen=True, order=True)
class TunedProduct:
    """A kernel that a shipped table of choices names: its config, and what it multiplies."""

    config: str
    layout: str
    dtype: str  # of the operands

    @property
    def table(self) -> tuple[str, str]:
        """The instruction and its operands' layout, as `wgmma_table` takes them."""
        name = "tf32" if self.dtype == "f32" else self.dtype
        a, b = str(int(self.layout[0] == "T")), str(int(self.layout[1] == "N"))
        if WgmmaConfig.parse(self.config).swap_ab:
            a, b = b, a
        # A copy makes an operand K-major that has to be.
        return name, a + (b if WGMMA_INSTRUCTIONS[name].b_mn else "0")


def tuned_products() -> list[TunedProduct]:
    """What shipped tables run by wgmma, each but once."""
    found = set()
    for path in tables.SHIPPED.glob("*.json"):
        for problem, entry in json.loads(path.read_text())["entries"].items():
            match = re.search(r"x\d+ ([NT]{2}) (\w+)->", problem)
            if entry["implementation"] == "wgmma":
                found.add(TunedProduct(entry["config"], *match.groups()))
    return sorted(found)


def tuned_tables() -> list[Source]:
    """The kernels of `tuned_products`."""
    configs = {}
    for product in tuned_products():
        names = configs.setdefault(product.table, {})
        names[WgmmaConfig.parse(product.config).unsplit] = True
    return [wgmma_table(*table, *names) for table, names in configs.items()]


def wgmma_ragged_table(dtype: str, layout: str) -> Source:
    """The kernels of wgmma's grouped products; tokens of form rows are K-major."""
    types = _wgmma_types(dtype, layout)
    return Source(
        "emulator/instances/wgmma_ragged.cc", (("EMULATED_TABLE", f"{dtype}_{layout}"), *types)
    )


def _wgmma_types(dtype: str, layout: str) -> tuple[tuple[str, str], ...]:
    types = WGMMA_INSTRUCTIONS[dtype]
    return (
        ("EMULATED_MMA", types.mma_type),
        ("EMULATED_OPERANDS", types.operands_type(layout)),
    )


def mma_sync_table(dtype: str, *tiles: str) -> Source:
    """The kernels of some of mma_sync's tiles, each "<tile M>x<tile N>"."""
    return Source(
        "emulator/instances/mma_sync.cc",
        (
            *_mma_sync_types(dtype),
            ("EMULATED_CONFIGS", ",".join(f'"{tile}"' for tile in tiles)),
        ),
    )


def mma_sync_ragged_table(dtype: str) -> Source:
    """The kernels of mma_sync's grouped products."""
    return Source("emulator/instances/mma_sync_ragged.cc", _mma_sync_types(dtype))


def _mma_sync_types(dtype: str) -> tuple[tuple[str, str], ...]:
    types = MMA_SYNC_INSTRUCTIONS[dtype]
    return (
        ("EMULATED_TABLE", dtype),
        ("EMULATED_A", types.a),
        ("EMULATED_B", types.b),
        ("EMULATED_MMA", types.mma_type),
    )


def load_script(path: str):
    """A script of the build, as a module; `path`: below the repository."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, REPOSITORY / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def cuda_root() -> Path | None:
    """The toolkit that the build would use."""
    return load_script("build_backend/find_cuda.py").find_cuda()


def cuda_include() -> Path | None:
    """Its headers, with all that they include."""
    include = cuda_root() and cuda_root() / "include"
    has_all = include and all((include / x).exists() for x in ("cuda_bf16.h", "nv/target"))
    return include if has_all else None


def nvcc() -> Path | None:
    """Its compiler."""
    path = cuda_root() and cuda_root() / "bin" / "nvcc"
    return path if path and path.exists() else None


def reason() -> str:
    """Why nothing can be emulated here; empty when it can."""
    if shutil.which("g++") is None:
        return "there is no g++"
    if cuda_include() is None:
        return "there are no CUDA headers"
    return ""


def as_host_code(text: str) -> str:
    """The source without the syntax that only nvcc knows."""

    def dynamic(match):
        alignment, kind, name = match.groups()
        return f"{kind}* const {name} = emulator::dynamic_shared({alignment or 16});"

    text = re.sub(r"extern __shared__ (?:__align__\((\d+)\) )?(.*?) (\w+)\[\];", dynamic, text)
    return re.sub(r"__shared__ ((?:alignas|__align__)\(\d+\) )?", r"\1static ", text)


def _write(path: Path, text: str) -> None:
    """Leaves a file as it is that holds the text: what was made of it is not made again."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@functools.cache
def _staged(path: Path, target: str) -> str:
    """What is compiled of a file of csrc or of the emulator, which tests do not change."""
    text = path.read_text()
    return as_host_code(text) if target == "csrc" else text


def _stage(directory: Path, mistakes: Sequence[Mistake]) -> None:
    """Copies the sources as host code, with mistakes."""
    planted = {}
    for mistake in mistakes:
        planted.setdefault(mistake.file, []).append(mistake)
    for root, target in (
        (REPOSITORY / "csrc", "csrc"),
        (Path(__file__).parent / "emulator", "emulator"),
    ):
        for path in root.rglob("*"):
            if path.suffix not in (".h", ".cuh", ".cc"):
                continue
            relative = path.relative_to(root)
            own = planted.pop(str(relative), [])
            text = as_host_code(plant(path.read_text(), own)) if own else _staged(path, target)
            _write(directory / target / relative, text)
    if planted:
        raise ValueError(f"mistakes must be in files of csrc, got {sorted(planted)}")


def _run(command: list[str], directory: Path) -> str:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr[:8000]}")
    return done.stdout


def _compile(command: list[str], output: str, directory: Path, objects=()) -> str:
    """The output's path; made unless that was done with the same command and files before.

    By one process at a time, so that another finds it made.
    """
    command = [*command, "-MMD", "-MF", f"{output}.d", "-o", output]
    made, record = directory / output, directory / f"{output}.command"
    with filelock.FileLock(directory / f"{output}.lock"):
        if made.exists() and record.exists() and record.read_text() == " ".join(command):
            rule = (directory / f"{output}.d").read_text().replace("\\\n", " ")
            files = [*rule.split(":", 1)[1].split(), *objects]
            if all((directory / f).stat().st_mtime < made.stat().st_mtime for f in files):
                return str(made)
        record.unlink(missing_ok=True)
        _run(command, directory)
        record.write_text(" ".join(command))
    return str(made)


def _stubs(symbols: str) -> str:
    """Functions for those of the project that are called but were not compiled: they throw."""
    defined, used = set(), set()
    for line in symbols.splitlines():
        match = re.match(r"(_ZN6tcgemm\S*) (\w)", line)
        if match:
            (used if match[2] in "Uu" else defined).add(match[1])
    lines = ["void emulate_missing(const char*);"]
    for i, name in enumerate(sorted(used - defined)):
        lines.append(f'void stub{i}(void) __asm__("{name}");')
        lines.append(f'void stub{i}(void) {{ emulate_missing("{name}"); }}')
    return "\n".join(lines) + "\n"


class Emulator:
    """Kernels compiled for the CPU.

    Args:
      directory: where to build the library; what an earlier one has left there, of this process or
        another, is used again. Objects of sources that nothing changes lie beside it, where others
        find them.
      sources: what to compile besides what `families` need: files of csrc with kernels, mostly.
      families: keys of SOURCES.
      compute_capability: 80 or 90, as which the kernels are compiled.
      mistakes: planted in files of csrc; with `like`.
      like: another one of the same families and compute capability, from which all but `sources`
        is taken as it is.
      sanitize: find accesses that are not aligned, where a GPU would fault, and indices out of
        bounds; takes a third more time to compile.
    """

    def __init__(
        self,
        directory: Path,
        *sources: Source | str,
        families=("wgmma",),
        compute_capability: int = 90,
        mistakes: Sequence[Mistake] = (),
        like: "Emulator | None" = None,
        sanitize: bool = False,
    ):
        self.mutant = 0  # The number of the mistake of `as_mutants` that is made.
        place = directory if mistakes else directory.parent / "emulated_objects"
        for folder in (directory, place):
            folder.mkdir(parents=True, exist_ok=True)
        # Kernels run as fast by -O1, which takes a fifth more time to compile.
        flags = ["-std=c++17", "-Og", "-fPIC", "-fno-strict-aliasing", "-fno-gnu-unique", "-w"]
        flags += [
            "-Iemulator",
            "-Icsrc",
            "-isystem",
            str(cuda_include()),
            f"-DTCGEMM_EMULATED_ARCH={compute_capability}0",
        ]

        def compile_one(source: Source) -> str:
            is_machine = source.path in _MACHINE
            checks = ["-fsanitize=alignment,bounds"] if sanitize else []
            prefix = [] if is_machine else ["-include", self._prefix, *checks]
            fast = ["-O3", "-march=native"] if source.path == "emulator/wgmma.cc" else []
            defines = [f"-D{name}={value}" for name, value in source.defines]
            in_csrc = not source.path.startswith("emulator/")
            path = f"csrc/{source.path}" if in_csrc else source.path
            command = ["g++", *flags, *prefix, *fast, *defines, "-x", "c++", "-c", path]
            digest = hashlib.sha256(" ".join(command).encode()).hexdigest()[:16]
            return _compile(command, f"{Path(path).stem}_{digest}.o", place)

        chosen = units_of([Source(s) if isinstance(s, str) else s for s in sources])
        with filelock.FileLock(place / "lock"):
            _stage(place, mistakes)
            for source in chosen:
                if source.text:
                    _write(place / source.path, as_host_code(source.text))
        with filelock.FileLock(directory / "lock"), ThreadPoolExecutor(os.cpu_count()) as pool:
            if like is None:
                # The headers that every file begins with take most of the time.
                header = ["g++", *flags, "-x", "c++-header", "emulator/prefix.h"]
                sm = f"sm_{compute_capability}"
                self._prefix = str(place / f"{sm}/prefix.h")
                _write(Path(self._prefix), "#error it is not compiled for this\n")
                _compile(header, f"{sm}/prefix.h.gch", place)
                common = dict.fromkeys(path for family in families for path in SOURCES[family])
                common = [Source(path) for path in (*_MACHINE, "emulator/calls.cc", *common)]
                self._objects = list(pool.map(compile_one, common))
            else:
                self._prefix, self._objects = like._prefix, like._objects
            objects = [*self._objects, *pool.map(compile_one, chosen)]
            _write(directory / "stubs.c", _stubs(_run(["nm", "-P", *objects], directory)))
            link = ["g++", "-shared", "-fPIC", "-fexceptions", "-Wl,-Bsymbolic", *objects]
            link += ["-x", "c", "stubs.c"]
            self._library = ctypes.CDLL(_compile(link, "emulator.so", directory, objects))

    def run(
        self,
        problem,
        arrays: dict[str, np.ndarray],
        *,
        implementation: str,
        config: str,
        seed: int = 0,
        num_sms: int = 4,
        loose_warpgroups: bool = False,
        last_cluster_first: bool = False,
        in_place_of: str | None = None,
        same: dict[str, str] | None = None,
    ) -> list[np.ndarray]:
        """The results of one call, D first; RuntimeError with what the machine found wrong.

        `arrays` are flat or not, by the names of the FFI operands. Before the call, results are
        NaN, and so is what lies around operands. What lies around results must stay as it is.
        D takes the place of the operand `in_place_of` in memory; operands in `same` take those of
        others. Clusters run one after another, with `last_cluster_first` in the reverse order.
        """
        outputs = _outputs(problem)
        places = {name: _guarded(array) for name, array in arrays.items()}
        for name, (shape, dtype) in outputs.items():
            poison = np.full(shape, _poison(np.dtype(dtype)), dtype)
            places[name] = _guarded(poison)
        places |= {name: places[other] for name, other in (same or {}).items()}
        if in_place_of is not None:
            places["d"] = places[in_place_of]
        fields = problem.query() | {
            "implementation": implementation,
            "config": config,
            "seed": seed,
            "num_sms": num_sms,
            "loose_warpgroups": loose_warpgroups,
            "last_cluster_first": last_cluster_first,
            "mutant": self.mutant,
        }
        fields |= {f"{name}_array": held.ctypes.data for name, (_, held) in places.items()}
        fields |= {f"{name}_bytes": held.nbytes for name, (_, held) in places.items()}
        for name, value in fields.items():
            if isinstance(value, np.ndarray):
                fields[name] = " ".join(map(str, value))
        text = "\n".join(f"{name}={value}" for name, value in fields.items())
        call = getattr(self._library, f"emulate_{problem.kind}")
        call.restype = ctypes.c_char_p
        if error := call(text.encode()):
            raise RuntimeError(error.decode())
        for name, (memory, held) in places.items():
            around = memory[:_GUARD], memory[_GUARD + held.nbytes :]
            if not all((part == 0xFF).all() for part in around):
                raise RuntimeError(f"the kernel wrote outside {name}")
        return [places[name][1].copy() for name in outputs]


def _poison(dtype: np.dtype):
    return np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else np.nan


def _guarded(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Memory full of NaN, and in the middle of it a copy of the array."""
    memory = np.full(array.nbytes + 2 * _GUARD + 256, 0xFF, np.uint8)
    memory = memory[-memory.ctypes.data % 256 :][: array.nbytes + 2 * _GUARD]
    held = memory[_GUARD : _GUARD + array.nbytes].view(array.dtype).reshape(array.shape)
    held[...] = array
    return memory, held


def _outputs(problem) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    out = DTYPES[problem.out_dtype]
    if problem.kind == "ragged":
        rows = problem.form == "rows"
        shape = (problem.batch, *(() if rows else (problem.groups,)), problem.m, problem.n)
        return {"d": (shape, out)} | _function_results(problem, problem.function)
    if problem.kind == "packed":
        if problem.function is not None:
            return _function_arrays(problem.function, out, problem.m, problem.d_columns)
        is_product = problem.form != "weight"
        return {"d": ((problem.m, problem.n) if is_product else (problem.n, problem.k), out)}
    if problem.kind in ("quantize", "split"):
        return {name: (x.shape, x.dtype) for name, x in problem.results().items()}
    if problem.kind == "rows":
        is_sums = problem.form == "sums"
        return {"d": ((problem.targets, problem.n) if is_sums else (problem.pairs,), out)}
    d, *others = result_arrays(problem)
    found = {"d": (d.shape, out)}
    return found | {f"function result {i}": (x.shape, x.dtype) for i, x in enumerate(others)}


def _function_arrays(function, out, m: int, n: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """The results of a product with a function, D among them."""
    found = {}
    for number, (_, x, has_two) in enumerate(function.arrays):
        *rows, columns = x.shape(1, m, n)
        name, dtype = (f"function result {number - 1}", x.dtype) if number else ("d", out)
        found[name] = (*rows, columns * (1 + has_two)), dtype
    return found


def _function_results(problem, function) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Those after D of a grouped product."""
    shape = problem.batch, problem.m, problem.n
    results = function.results[1:] if function else ()
    return {f"function result {i}": (x.shape(*shape), x.dtype) for i, x in enumerate(results)}
