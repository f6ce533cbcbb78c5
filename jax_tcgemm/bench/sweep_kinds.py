"""Random problems of many kinds, each as a user would write it with and without this library."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tcgemm
from jax_tcgemm.bench.functions import ELEMENTWISE

# Larger problems are drawn again: the reference is computed on the host.
_MOST_FLOPS, _MOST_BYTES = 6e10, 3e8


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """One expression, by this library's default choice and by plain JAX.

    Attributes:
      kind: a key of `KINDS`.
      text: shapes and dtypes, for people.
      operands: shapes and dtypes of the operands.
      ours: function of the operands that calls the library.
      plain: function of the operands in plain JAX, as a user would write it.
      reference: function of float64 (complex128, int64) operands on the host.
      tolerance: largest accepted max |result - reference| / max |reference|.
      flops: multiplications and additions.
      draw: function of a key that makes the operands; None draws standard normal numbers, and
        integers over their whole range.
    """

    kind: str
    text: str
    operands: tuple[jax.ShapeDtypeStruct, ...]
    ours: Callable
    plain: Callable
    reference: Callable
    tolerance: float
    flops: float
    draw: Callable | None = None

    @property
    def input_bytes(self) -> int:
        """Bytes of the operands."""
        return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in self.operands)


class Random:
    """Draws extents, layouts and dtypes."""

    def __init__(self, seed: Sequence[int]):
        self._generator = np.random.default_rng(seed)

    def extent(self, least: int, most: int, multiple: int = 1) -> int:
        """A log-uniform multiple between two bounds."""
        drawn = math.exp(self._generator.uniform(math.log(least), math.log(most)))
        return max(round(drawn / multiple), 1) * multiple

    def one_of(self, *values):
        """One of some values."""
        return values[self._generator.integers(len(values))]


def random_problems(count: int, seed: int, kinds: Sequence[str] | None = None) -> list[Problem]:
    """Problems of all kinds in turn.

    Args:
      count: how many.
      seed: the same seed gives the same problems, of which a larger count has more.
      kinds: keys of `KINDS`; None means all.
    """
    names = tuple(KINDS if kinds is None else kinds)
    found = []
    for number in range(count):
        kind = names[number % len(names)]
        for attempt in range(1000):
            problem = KINDS[kind](Random((seed, number, attempt)))
            results = jax.tree.leaves(jax.eval_shape(problem.plain, *problem.operands))
            num_bytes = problem.input_bytes + sum(x.size * x.dtype.itemsize for x in results)
            if problem.flops <= _MOST_FLOPS and num_bytes <= _MOST_BYTES:
                found.append(dataclasses.replace(problem, kind=kind))
                break
    return found


def _struct(shape: Sequence[int], dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def _tolerance(in_dtype, out_dtype, k: int, *, tf32: bool = False) -> float:
    """One rounding of the result, one of TF32 operands, accumulation that grows with sqrt(K)."""
    if jnp.issubdtype(out_dtype, jnp.integer):
        return 0.0
    is_double = jnp.dtype(in_dtype).name in ("float64", "complex128")
    accumulator = float(jnp.finfo(jnp.float64 if is_double else jnp.float32).eps)
    rounding = float(jnp.finfo(out_dtype).eps)
    return rounding + (2.0**-10 if tf32 else 0.0) + 16 * accumulator * math.sqrt(max(k, 1))


def _einsum(text: str, spec: str, sizes: dict[str, int], dtypes, out=None) -> Problem:
    """An einsum of two operands beside `jnp.einsum`."""
    inputs, _ = spec.split("->")
    operands = tuple(
        _struct([sizes[name] for name in term], dtype)
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
        _tolerance(operands[0].dtype, out, contracted, tf32=is_tf32),
        2.0 * math.prod(sizes.values()),
    )


def _product(m, n, k, dtypes, *, batch=1, layout="NN", out=None) -> Problem:
    """A matrix product in one of four layouts beside `lax.dot_general`."""
    lhs = (m, k) if layout[0] == "N" else (k, m)
    rhs = (k, n) if layout[1] == "N" else (n, k)
    lead = (batch,) if batch > 1 else ()
    dtypes = tuple(map(jnp.dtype, dtypes))
    operands = _struct((*lead, *lhs), dtypes[0]), _struct((*lead, *rhs), dtypes[1])
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
        _tolerance(dtypes[0], out, k, tf32=is_tf32),
        2.0 * batch * m * n * k,
    )


# --- plain products -----------------------------------------------------------------------------


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


# --- einsums ------------------------------------------------------------------------------------


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


# --- layers -------------------------------------------------------------------------------------


_NUMPY_ACTIVATIONS = {
    "relu": lambda z: np.maximum(z, 0),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu_tanh": lambda z: 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
}
_ACTIVATIONS = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def _scaled(operands: Sequence[jax.ShapeDtypeStruct], k: int) -> Callable:
    """Draws standard normal numbers, the second operand's divided by sqrt(k)."""

    def draw(key):
        drawn = [
            jax.random.normal(each, x.shape, x.dtype)
            for each, x in zip(jax.random.split(key, len(operands)), operands, strict=True)
        ]
        drawn[1] = (drawn[1] * k**-0.5).astype(operands[1].dtype)
        return drawn

    return jax.jit(draw)


def _layer_operands(r: Random):
    multiple = r.one_of(1, 8, 64)
    m, n, k = r.extent(1, 8192), *(r.extent(8, 8192, multiple) for _ in range(2))
    dtype = r.one_of("bfloat16", "bfloat16", "float32")
    operands = _struct((m, k), dtype), _struct((k, n), dtype), _struct((n,), dtype)
    return m, n, k, dtype, operands


def _linear(r: Random) -> Problem:
    m, n, k, dtype, operands = _layer_operands(r)
    name = r.one_of(None, *_ACTIVATIONS)
    act = _ACTIVATIONS.get(name, lambda z: z)
    on_host = _NUMPY_ACTIVATIONS.get(name, lambda z: z)
    return Problem(
        "",
        f"linear {m}×{n}×{k} bias {name} {dtype}",
        operands,
        lambda x, w, b: jax_tcgemm.linear(x, w, b, activation=name),
        lambda x, w, b: act(x @ w + b),
        lambda x, w, b: on_host(x @ w + b),
        2 * _tolerance(dtype, dtype, k, tf32=dtype == "float32"),
        2.0 * m * n * k,
        _scaled(operands, k),
    )


def _gated(r: Random) -> Problem:
    m, n, k, dtype, _ = _layer_operands(r)
    operands = _struct((m, k), dtype), _struct((k, 2, n), dtype)
    name = r.one_of(*_ACTIVATIONS)

    def plain(x, w):
        z = jnp.einsum("mk,kpn->mpn", x, w)
        return _ACTIVATIONS[name](z[:, 0]) * z[:, 1]

    return Problem(
        "",
        f"gated {m}×{n}×{k} {name} {dtype}",
        operands,
        lambda x, w: jax_tcgemm.gated_linear(x, w, activation=name),
        plain,
        lambda x, w: _NUMPY_ACTIVATIONS[name](x @ w[:, 0]) * (x @ w[:, 1]),
        3 * _tolerance(dtype, dtype, k, tf32=dtype == "float32"),
        4.0 * m * n * k,
        _scaled(operands, k),
    )


# Functions f of the accumulator z, by jax.numpy or numpy, and how much each amplifies an error of z
# relative to the largest value: a bound of max |f'| max |z| / max |f| for |z| of up to 5.
_FUNCTIONS = {
    "sin": (ELEMENTWISE["sin"], 5),
    "cos": (ELEMENTWISE["cos"], 5),
    "mish": (ELEMENTWISE["mish"], 4),
    "log-cosh": (ELEMENTWISE["log-cosh"], 4),
    "pow": (ELEMENTWISE["pow"], 4),
    "exp": (lambda z, xp: xp.exp(-z * z), 5),
    "clip": (lambda z, xp: xp.clip(3 * z, -1, 1), 15),
}


def _epilogue(r: Random) -> Problem:
    m, n, k, dtype, operands = _layer_operands(r)
    name = r.one_of(*_FUNCTIONS)
    function, amplification = _FUNCTIONS[name]

    def follows(acc, bias):
        return function(acc + bias, jnp).astype(dtype)

    return Problem(
        "",
        f"epilogue {name} {m}×{n}×{k} {dtype}",
        operands,
        lambda x, w, b: jax_tcgemm.matmul(x, w, epilogue=follows, epilogue_operands=(b,)),
        lambda x, w, b: follows(jnp.matmul(x, w, preferred_element_type=jnp.float32), b),
        lambda x, w, b: function(x @ w + b, np),
        amplification * _tolerance(dtype, dtype, k, tf32=dtype == "float32"),
        2.0 * m * n * k,
        _scaled(operands, k),
    )


def _on_host(function: Callable) -> Callable:
    """Run a function by XLA's CPU backend in float64: for gradients, which NumPy does not have."""

    def run(*operands):
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return jax.tree.map(np.asarray, jax.jit(function)(*map(jnp.asarray, operands)))

    return run


def _gradients(r: Random) -> Problem:
    m, n, k, dtype, operands = _layer_operands(r)
    name = r.one_of(*_ACTIVATIONS)

    def both(layer):
        return jax.grad(lambda *given: jnp.mean(jnp.square(layer(*given))), (0, 1, 2))

    plain = both(lambda x, w, b: _ACTIVATIONS[name](x @ w + b))
    return Problem(
        "",
        f"gradients of linear {m}×{n}×{k} {name} {dtype}",
        operands,
        both(lambda x, w, b: jax_tcgemm.linear(x, w, b, activation=name)),
        plain,
        _on_host(plain),
        8 * _tolerance(dtype, dtype, k, tf32=dtype == "float32") + 8 * 2**-8,
        6.0 * m * n * k,
        _scaled(operands, k),
    )


def _loss(r: Random) -> Problem:
    m, k, n = r.extent(16, 4096), r.extent(64, 2048, 8), r.extent(1000, 65536)
    operands = _struct((m, k), "bfloat16"), _struct((n, k), "bfloat16"), _struct((m,), "int32")
    two = _scaled(operands[:2], k)

    def draw(key):
        return *two(key), jax.random.randint(key, (m,), 0, n, jnp.int32)

    def plain(x, w, labels):
        z = (x @ w.T).astype(jnp.float32)
        at_label = jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(z, -1) - at_label)

    def reference(x, w, labels):
        z = x @ w.T
        largest = z.max(-1)
        sums = np.exp(z - largest[:, None]).sum(-1)
        return np.mean(np.log(sums) + largest - z[np.arange(m), labels])

    return Problem(
        "",
        f"cross entropy {m}×{k}→{n} bfloat16",
        operands,
        jax_tcgemm.linear_cross_entropy,
        plain,
        reference,
        2.0**-9,
        2.0 * m * n * k,
        draw,
    )


# --- grouped and quantized ----------------------------------------------------------------------


def _ragged(r: Random) -> Problem:
    m, n, k = r.extent(64, 8192), r.extent(64, 2048, 64), r.extent(64, 2048, 64)
    groups = r.one_of(4, 8, 16)
    operands = _struct((m, k), "bfloat16"), _struct((groups, k, n), "bfloat16")
    operands = *operands, _struct((groups,), "int32")
    two = _scaled(operands[:2], k)
    shares = np.random.default_rng([m, n, k]).dirichlet(np.full(groups, 2.0))
    sizes = np.diff(np.rint(np.cumsum([0, *shares]) * m)).astype(np.int32)

    def reference(x, w, sizes):
        groups = np.split(x, np.cumsum(sizes)[:-1])
        return np.concatenate([rows @ matrix for rows, matrix in zip(groups, w, strict=True)])

    return Problem(
        "",
        f"ragged_dot {m}×{n}×{k}, {groups} groups, bfloat16",
        operands,
        jax_tcgemm.ragged_dot,
        lax.ragged_dot,
        reference,
        _tolerance("bfloat16", "bfloat16", k),
        2.0 * m * n * k,
        lambda key: (*two(key), jnp.asarray(sizes)),
    )


def _quantized(r: Random) -> Problem:
    """8-bit floats with per-tensor, per-row or block scales; with those XLA multiplies bfloat16."""
    m, n, k = r.extent(1, 8192), r.extent(128, 8192, 128), r.extent(128, 8192, 128)
    how = r.one_of("tensor", "rows", "blocks")
    blocks = {"tensor": (None, None), "rows": ((1, k), (1, k)), "blocks": ((1, 128), (128, 128))}
    of_x, of_w = blocks[how]
    bf16 = jnp.bfloat16

    def draw(key):
        x, w = _scaled([_struct((m, k), bf16), _struct((n, k), bf16)], k)(key)
        x, w = (jax_tcgemm.quantize(a, block=b) for a, b in ((x, of_x), (w, of_w)))
        return x.qvalue, w.qvalue, x.scale, w.scale

    shapes = jax.eval_shape(draw, jax.random.key(0))

    def wrapped(x, w, sx, sw):
        return (jax_tcgemm.QuantizedArray(q, s) for q, s in ((x, sx), (w, sw)))

    def plain(x, w, sx, sw):
        if how == "blocks":
            x, w = (jax_tcgemm.dequantize(a).astype(bf16) for a in wrapped(x, w, sx, sw))
            return x @ w.T
        product = lax.dot_general(
            x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return (product * sx * sw.T).astype(bf16)

    def reference(x, w, sx, sw):
        def full(q, s):
            return q * s.repeat(q.shape[0] // s.shape[0], 0).repeat(q.shape[1] // s.shape[1], 1)

        return full(x, sx) @ full(w, sw).T

    def ours(*given):
        x, w = wrapped(*given)
        return jax_tcgemm.matmul(x, w.mT, preferred_element_type=bf16)

    return Problem(
        "",
        f"float8 scales of {how} {m}×{n}×{k}",
        tuple(shapes),
        ours,
        plain,
        reference,
        2.0**-6,  # Dequantized operands are rounded to bfloat16.
        2.0 * m * n * k,
        draw,
    )


def _packed(r: Random) -> Problem:
    """Weights of 4 bits beside a bfloat16 product of bfloat16 weights."""
    m, n, k = r.extent(1, 4096), r.extent(512, 16384, 128), r.extent(512, 16384, 128)
    bf16, group = jnp.bfloat16, 128
    x = _struct((m, k), bf16)

    def pack(key):
        q = jax.random.randint(key, (k, n), -8, 8, jnp.int8)
        scale = jax.random.uniform(key, (k // group, n), bf16, 0.01, 0.02)
        return jax_tcgemm.pack_weights(q, scale, group_size=group, dtype="int4"), q, scale

    packed = jax.eval_shape(lambda key: pack(key)[0], jax.random.key(0))
    leaves, tree = jax.tree.flatten(packed)

    def draw(key):
        weight, q, scale = pack(key)
        dense = (q.reshape(-1, group, n) * scale[:, None].astype(jnp.float32)).reshape(k, n)
        drawn = jax.random.normal(key, x.shape, bf16)
        return drawn, dense.astype(bf16), *jax.tree.leaves(weight)

    return Problem(
        "",
        f"int4 weights {m}×{n}×{k}",
        (x, _struct((k, n), bf16), *leaves),
        lambda x, w, *packed: jax_tcgemm.matmul(x, jax.tree.unflatten(tree, packed)),
        lambda x, w, *packed: x @ w,
        lambda x, w, *packed: x @ w,
        2.0**-6,
        2.0 * m * n * k,
        draw,
    )


KINDS: dict[str, Callable[[Random], Problem]] = {
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
    "linear": _linear,
    "gated": _gated,
    "epilogues": _epilogue,
    "gradients": _gradients,
    "losses": _loss,
    "ragged": _ragged,
    "float8": _quantized,
    "int4 weights": _packed,
}
