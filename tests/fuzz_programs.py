"""Mutated exported programs: artefacts of jax.export whose calls say something else, read and run.

A program may fail to load or to compile, be refused as an invalid argument, or run. What it must
not do is end the process or report an internal error of ours.

    python tests/fuzz_programs.py --seed 0 --count 1000 [--first 0]

runs so many in one process and prints what became of them as JSON. The number of the program being
run is kept in the file that --progress names, for whoever finds the process dead.
"""

import argparse
import collections
import dataclasses
import functools
import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxlib.mlir.dialects import stablehlo

import jax_tcgemm
from jax_tcgemm import blas

TARGETS = ("tcgemm_gemm", "tcgemm_ragged", "tcgemm_rows", "tcgemm_blas")
_CHECKS = [export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]

_INTEGERS = [0, 1, 2, 3, 5, 8, 100, -1, -7, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63)]
_REALS = ["0.0", "1.0", "-1.0", "2.5", "1.0e300", "0x7FF8000000000000", "0x7FF0000000000000"]
_WORDS = ["", "magic", "host", "auto", "portable", "f16", "f32", "f64", "s32", "none", "n", "m"]
_WORDS += ["relu", "silu", "N", "T", "C", "rows", "contraction", "sums", "dots", "gemm", "gemv"]
_WORDS += ["dot", "scal", "trsv", "trsm", "axpy", "swap", "iamax", "default", "pedantic"]
_DTYPES = {"f16": np.float16, "bf16": jnp.bfloat16, "f32": np.float32, "f64": np.float64}
_DTYPES |= {"i1": np.bool_, "i4": jnp.int4, "ui4": jnp.uint4, "i8": np.int8, "ui8": np.uint8}
_DTYPES |= {"i32": np.int32, "i64": np.int64, "f8E4M3FN": jnp.float8_e4m3fn}
_DTYPES |= {"complex<f32>": np.complex64, "complex<f64>": np.complex128}


def _ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


def _programs() -> dict:
    """Functions and operands; together they have every target and most attributes."""
    a, b, x = _ones(4, 6), _ones(6, 8), _ones(8)
    experts, sizes = _ones(3, 6, 8), jnp.array([2, 0, 2])
    host = {"implementation": "host"}
    linear = functools.partial(jax_tcgemm.linear, activation="gelu", **host)
    routed = functools.partial(jax_tcgemm.ragged_dot, **host)

    def grad(f, *at):
        return jax.grad(lambda *args: jnp.sum(f(*args)), at)

    return {
        "matmul": (functools.partial(jax_tcgemm.matmul, **host), (a, b)),
        "matmul_f16": (
            functools.partial(jax_tcgemm.matmul, **host),
            (_ones(2, 4, 6, dtype="float16"), b.astype("float16")),
        ),
        "linear": (linear, (a, b, x)),
        "linear'": (grad(linear, 0, 1, 2), (a, b, x)),
        "gated": (functools.partial(jax_tcgemm.gated_linear, **host), (a, (b, b))),
        "gated'": (
            grad(lambda a, b, c: jax_tcgemm.gated_linear(a, (b, c), **host), 0, 1),
            (a, b, b),
        ),
        "ragged": (routed, (a, experts, sizes)),
        "ragged'": (grad(lambda a, b: routed(a, b, sizes), 0, 1), (a, experts)),
        "gemv": (functools.partial(blas.gemv, **host), (b, x, _ones(6))),
        "gemm": (functools.partial(blas.gemm, **host), (a, b, _ones(4, 8))),
        "trsm": (functools.partial(blas.trsm, **host), (jnp.eye(4), a)),
        "trsv": (functools.partial(blas.trsv, **host), (jnp.eye(8), x)),
        "dot": (functools.partial(blas.dot, **host), (x, x)),
        "iamax": (functools.partial(blas.iamax, **host), (x,)),
        "axpy": (functools.partial(blas.axpy, **host), (2.0, x, x)),
        "swap": (functools.partial(blas.swap, **host), (x, x)),
    }


@functools.cache
def exported() -> list[tuple[str, export.Exported, tuple]]:
    """Every program as an artefact, with its operands."""
    found = []
    for name, (f, args) in _programs().items():
        made = export.export(jax.jit(f), disabled_checks=_CHECKS)(*args)
        assert any(target in made.mlir_module() for target in TARGETS), name
        found.append((name, made, args))
    return found


_NUMBER = re.compile(r"(?<=[ =])-?\d+(?= : i64)|-?\d+\.\d+[eE+\-\d]*(?= : f64)|\btrue\b|\bfalse\b")
_STRING = re.compile(r'(?<= = )"[^"]*"')
_TENSOR = re.compile(r"tensor<((?:\d+x)*)((?!index)[a-zA-Z]\w*(?:<\w+>)?)>")
_MAIN = re.compile(r"func\.func public @main\((.*?)\) -> (.*?) \{$", re.MULTILINE)


def mutated(rng, text: str) -> str:
    """The text of a program with some changes: in its custom calls, or of a type throughout."""
    for _ in range(int(rng.integers(1, 5))):
        if rng.random() < 0.15:
            old = _pick(rng, [match[0] for match in _TENSOR.finditer(text)])
            text = text.replace(old, _tensor(rng, old))
            continue
        lines = text.split("\n")
        i = _pick(rng, [i for i, line in enumerate(lines) if "custom_call @tcgemm" in line])
        pattern, change = _pick(rng, _CHANGES)
        if places := list(pattern.finditer(lines[i])):
            place = _pick(rng, places)
            lines[i] = lines[i][: place.start()] + change(rng, place[0]) + lines[i][place.end() :]
        text = "\n".join(lines)
    return text


def _avals(types: str) -> tuple[jax.core.ShapedArray, ...]:
    """The tensors in a piece of a program's signature."""
    found = []
    for match in _TENSOR.finditer(types):
        shape = tuple(int(dim) for dim in match[1].split("x")[:-1])
        found.append(jax.core.ShapedArray(shape, _DTYPES[match[2]]))
    return tuple(found)


def _pick(rng, values):
    return values[rng.integers(len(values))]


def _number(rng, old: str) -> str:
    if old in ("true", "false"):
        return "false" if old == "true" else "true"
    if "." in old:
        return _pick(rng, _REALS)
    if rng.random() < 0.5:
        return str(_pick(rng, _INTEGERS))
    return str(int(old) + int(rng.integers(-2, 3)))


def _tensor(rng, old: str) -> str:
    match = _TENSOR.fullmatch(old)
    dims, dtype = match[1].split("x")[:-1], match[2]
    kind = rng.integers(3)
    if kind == 0:
        dtype = _pick(rng, list(_DTYPES))
    elif kind == 1 and dims:
        dims[rng.integers(len(dims))] = str(_pick(rng, [0, 1, 2, 3, 7, 64, 1000]))
    else:
        dims = [*dims, "1"]
    return f"tensor<{''.join(dim + 'x' for dim in dims)}{dtype}>"


_CHANGES = [
    *[(_NUMBER, _number)] * 6,
    *[(_STRING, lambda rng, old: f'"{_pick(rng, _WORDS)}"')] * 2,
    (_TENSOR, _tensor),
    (re.compile(r"tcgemm_(?:gemm|ragged|rows|blas)"), lambda rng, old: _pick(rng, TARGETS)),
    (re.compile(r"operand_index = \d+"), lambda rng, old: f"operand_index = {rng.integers(6)}"),
    (re.compile(r"\w+ = [^,{}]+ : i64, "), lambda rng, old: ""),
]


def _bytes_changed(rng, data: bytes) -> bytes:
    """The bytes of a program with a letter or a digit of its attributes' text changed."""
    changed = bytearray(data)
    names = [m.start() for m in re.finditer(rb"host|none|f32|auto|rows|gemv|alpha_re", data)]
    for _ in range(int(rng.integers(1, 3))):
        start = int(_pick(rng, names))
        changed[start + int(rng.integers(4))] = int(rng.integers(97, 123))
    return bytes(changed)


def run(rng) -> tuple[str, str]:
    """Mutates and runs one program: which, and what became of it."""
    name, program, args = _pick(rng, exported())
    try:
        if rng.random() < 0.1:
            data = _bytes_changed(rng, program.mlir_module_serialized)
            changed = dataclasses.replace(program, mlir_module_serialized=data)
        else:
            text = mutated(rng, program.mlir_module())
            version = stablehlo.get_minimum_version()
            data = stablehlo.serialize_portable_artifact_str(text, version)
            operands, results = map(_avals, _MAIN.search(text).groups())
            changed = dataclasses.replace(
                program, mlir_module_serialized=data, in_avals=operands, out_avals=results
            )
            ones = [jnp.ones(aval.shape, aval.dtype) for aval in operands]
            args, _ = jax.tree.unflatten(program.in_tree, ones)
        restored = export.deserialize(changed.serialize())
        jax.block_until_ready(restored.call(*args))
    except (jax.errors.JaxRuntimeError, ValueError, RuntimeError, TypeError, KeyError) as error:
        return name, str(error) or repr(error)
    return name, ""


def kind(message: str) -> str:
    """What a message means: "ran", "refused" by us, "internal" error of ours, or "no program"."""
    if not message:
        return "ran"
    if "INVALID_ARGUMENT: jax_tcgemm: " in message or "INVALID_ARGUMENT: [execute]" in message:
        return "refused"
    return "internal" if "jax_tcgemm: " in message else "no program"


def main() -> None:
    """Runs many programs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--progress")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    # A program is compiled once.
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_disable_most_optimizations", True)
    exported()
    start = time.monotonic()
    counts, internal = collections.Counter(), []
    for index in range(options.first, options.first + options.count):
        if options.progress:
            with open(options.progress, "w") as file:
                file.write(str(index))
        name, message = run(np.random.default_rng([options.seed, index]))
        counts[kind(message)] += 1
        if options.show:
            print(index, name, kind(message), message[:200].replace("\n", " "))
        if kind(message) == "internal":
            internal.append(f"seed {options.seed}, program {index}, {name}: {message[:2000]}")
    figures = {"seed": options.seed, "programs": options.count, **counts, "internal": internal}
    print(json.dumps(figures | {"seconds": round(time.monotonic() - start, 1)}))


if __name__ == "__main__":
    main()
