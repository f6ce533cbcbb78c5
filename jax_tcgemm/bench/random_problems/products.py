"""Random matrix products and einsums."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tcgemm
from jax_tcgemm.bench.random_problems.problem import Problem, Random, struct, tolerance_of


def _einsum(text: str, spec: str, sizes: dict[str, int], dtypes, out=None) -> Problem:
    """An einsum of two operands beside `jnp.einsum`."""
    inputs, _ = spec.split("->")
    operands = tuple(
        struct([sizes[name] for name in term], dtype)
        for term, dtype in zip(inputs.split(","), dtypes, strict=True)
    )
    how = {} if out is None else {"preferred_element_type": jnp.dtype(out)}
    out = jnp.promote_types(*(x.dtype for x in operands)) if out is None else jnp.dtype(out)
    contracted = math.prod(n for name, n in sizes.items() if name not in spec.partition("->")[2])
    is_tf32 = any(jnp.dtype(x.dtype).name in ("float32", "complex64") for x in operands)
    shown = " ".join(f"{name}={n}" for name, n in sizes.items())
    names = ",".join(dict.fromkeys(jnp.dtype(x).name for x in dtypes))
    return Problem(
        "",
        f"{text or spec} {shown} {names}{f' to {out}' if how else ''}",
        operands,
        functools.partial(jax_tcgemm.tensor.einsum, spec, **how),
        functools.partial(jnp.einsum, spec, **how),
        lambda *x: np.einsum(spec, *x, optimize=True),
        tolerance_of(operands[0].dtype, out, contracted, tf32=is_tf32),
        2.0 * math.prod(sizes.values()),
    )


def _product(m, n, k, dtypes, *, batch=1, layout="NN", out=None) -> Problem:
    """A matrix product in one of four layouts beside `lax.dot_general`."""
    lhs = (m, k) if layout[0] == "N" else (k, m)
    rhs = (k, n) if layout[1] == "N" else (n, k)
    lead = (batch,) if batch > 1 else ()
    dtypes = tuple(map(jnp.dtype, dtypes))
    operands = struct((*lead, *lhs), dtypes[0]), struct((*lead, *rhs), dtypes[1])
    first = len(lead)
    contract = (first + (layout[0] == "N"),), (first + (layout[1] == "T"),)
    numbers = contract, (tuple(range(first)),) * 2
    how = {} if out is None else {"preferred_element_type": jnp.dtype(out)}
    out = jnp.promote_types(*dtypes) if out is None else jnp.dtype(out)
    spec = f"{'b' * first}{'mk' if layout[0] == 'N' else 'km'},"
    spec += f"{'b' * first}{'kn' if layout[1] == 'N' else 'nk'}->{'b' * first}mn"
    is_tf32 = any(x.name in ("float32", "complex64") for x in dtypes)
    names = ",".join(dict.fromkeys(x.name for x in dtypes))
    shown = f"{batch}×" * first + f"{m}×{n}×{k} {layout} {names}{f' to {out}' if how else ''}"
    return Problem(
        "",
        shown,
        operands,
        lambda a, b: jax_tcgemm.dot_general(a, b, numbers, **how),
        lambda a, b: lax.dot_general(a, b, numbers, **how),
        lambda a, b: np.einsum(spec, a, b, optimize=True),
        tolerance_of(dtypes[0], out, k, tf32=is_tf32),
        2.0 * batch * m * n * k,
    )


def _dense(r: Random) -> Problem:
    """Layers of language models."""
    m, n, k = (r.extent(64, 16384, 64) for _ in range(3))
    return _product(m, n, k, [r.one_of("bfloat16", "bfloat16", "float16")] * 2, layout=_layout(r))


def _layout(r: Random) -> str:
    return r.one_of("NN", "NT", "TN", "TT")


def _odd(r: Random) -> Problem:
    m, n, k = (r.extent(1, 8192) for _ in range(3))
    return _product(m, n, k, [r.one_of("bfloat16", "float16", "float32")] * 2, layout=_layout(r))


def _int8(r: Random) -> Problem:
    multiple = r.one_of(1, 1, 16)
    m, n, k = (r.extent(1, 8192, multiple) for _ in range(3))
    return _product(m, n, k, ["int8"] * 2, layout=r.one_of("NN", "NT"), out="int32")


def _wide(r: Random) -> Problem:
    m, n, k = (r.extent(1, 2048, r.one_of(1, 1, 8)) for _ in range(3))
    batch = r.one_of(1, 1, r.extent(2, 64))
    dtype = r.one_of("float64", "complex64", "complex128")
    return _product(m, n, k, [dtype] * 2, batch=batch, layout=_layout(r))


def _tiny(r: Random) -> Problem:
    m, n, k = (r.extent(1, 16) for _ in range(3))
    m, n, k = r.one_of((m, m, m), (m, n, k))
    dtype = r.one_of("float32", "float32", "float64", "complex64", "bfloat16")
    return _product(m, n, k, [dtype] * 2, batch=r.extent(100, 200000), layout=_layout(r))


def _mixed(r: Random) -> Problem:
    m, n, k = (r.extent(1, 4096, r.one_of(1, 8, 64)) for _ in range(3))
    dtypes, out = r.one_of(
        (("bfloat16", "float32"), None),
        (("float32", "bfloat16"), None),
        (("bfloat16", "bfloat16"), "float32"),
        (("float16", "float16"), "float32"),
    )
    return _product(m, n, k, dtypes, layout=_layout(r), out=out)


def _few_rows(r: Random) -> Problem:
    m = r.extent(1, 64)
    n, k = (r.extent(256, 32768, r.one_of(8, 64, 64)) for _ in range(2))
    return _product(m, n, k, ["bfloat16"] * 2, layout=r.one_of("NN", "NT"))


def _batches(r: Random) -> Problem:
    m, n, k = (r.extent(16, 2048, r.one_of(1, 8, 64)) for _ in range(3))
    dtype = r.one_of("bfloat16", "bfloat16", "float32")
    return _product(m, n, k, [dtype] * 2, batch=r.extent(2, 256), layout=_layout(r))


def _skinny(r: Random) -> Problem:
    """One extent of at most 64."""
    extents = [r.extent(1, 64), r.extent(512, 65536, 8), r.extent(64, 65536, r.one_of(1, 8, 64))]
    order = r.one_of((0, 1, 2), (1, 0, 2), (1, 2, 0), (2, 1, 0))
    m, n, k = (extents[i] for i in order)
    return _product(m, n, k, [r.one_of("bfloat16", "float32")] * 2, layout=_layout(r))


def _own_transpose(r: Random) -> Problem:
    m, k = (r.extent(64, 8192, r.one_of(1, 64, 64)) for _ in range(2))
    dtype = r.one_of("bfloat16", "bfloat16", "float32")
    one = _product(m, m, k, [dtype] * 2, layout="NT")
    return dataclasses.replace(
        one,
        text=f"x @ x.T, {m}×{k} {dtype}",
        operands=one.operands[:1],
        ours=lambda x: jax_tcgemm.matmul(x, x.T),
        plain=lambda x: jnp.matmul(x, x.T),
        reference=lambda x: x @ x.T,
    )


def _einsums(r: Random) -> Problem:
    spec, names = r.one_of(
        ("abc,cd->abd", "abcd"),
        ("abc,dc->adb", "abcd"),
        ("abcd,cde->abe", "abcde"),
        ("ab,cbd->acd", "abcd"),
        ("abc,abd->acd", "abcd"),
        ("abcd,ebcd->ae", "abcde"),
    )
    most = 1024 if len(names) == 4 else 128
    sizes = {name: r.extent(2, most, r.one_of(1, 8)) for name in names}
    return _einsum("", spec, sizes, [r.one_of("bfloat16", "bfloat16", "float32")] * 2)


def _attention(r: Random) -> Problem:
    spec = r.one_of("bthk,bshk->bhts", "bhts,bshk->bthk", "btd,dhk->bthk", "bthk,hkd->btd")
    heads, k = r.one_of(4, 8, 12, 16), r.one_of(32, 64, 80, 128)
    sizes = {"b": r.extent(1, 16), "t": r.extent(1, 1024), "s": r.extent(1, 1024)}
    sizes |= {"h": heads, "k": k, "d": heads * k}
    sizes = {name: size for name, size in sizes.items() if name in spec}
    return _einsum("", spec, sizes, [r.one_of("bfloat16", "bfloat16", "float32")] * 2)


def _network(r: Random) -> Problem:
    """Contractions of tensor networks."""
    spec = r.one_of("abcd,befd->acef", "abc,cbd->ad", "abcde,dfbg->acefg", "ijab,abkl->ijkl")
    sizes = {name: r.extent(2, 24) for name in sorted(set(spec) - set(",->"))}
    dtype = r.one_of("float32", "float64", "complex64", "complex128")
    return _einsum("", spec, sizes, [dtype] * 2)


PRODUCTS: dict[str, Callable[[Random], Problem]] = {
    "dense": _dense,
    "odd sizes": _odd,
    "int8": _int8,
    "float64 and complex": _wide,
    "tiny batches": _tiny,
    "mixed dtypes": _mixed,
    "few rows": _few_rows,
    "batches": _batches,
    "skinny": _skinny,
    "own transpose": _own_transpose,
    "einsums": _einsums,
    "attention": _attention,
    "tensor networks": _network,
}
