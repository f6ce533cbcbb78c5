"""What combines with what: every function, operand encoding and feature, and the named refusals.

`test_combinations.py` visits each cell: its value is right, or it is refused with the named error
that the cell has here. `python tests/combinations.py` writes the tables of docs/combinations.md.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_tcgemm

PAGE = Path(__file__).resolve().parents[1] / "docs" / "combinations.md"
M, K, N, GROUPS, VOCABULARY = 16, 64, 32, 2, 48
SIZES = np.array([9, 5], np.int32)  # the last two rows are of no group
LABELS = np.arange(M, dtype=np.int32) * 3 % VOCABULARY


# --- functions ------------------------------------------------------------------------------------


def _of_groups(x, w):
    ends = np.cumsum(SIZES)
    number = np.searchsorted(ends, np.arange(x.shape[-2]), side="right")
    rows = [
        x[..., i, :] @ w[g] if g < GROUPS else 0 * x[..., i, :] @ w[0] for i, g in enumerate(number)
    ]
    return np.stack(rows, -2)


def _both(product):
    """Gate and up, one after the other in the columns, of weights (..., 2, n)."""

    def both(x, w):
        z = product(x, w.reshape(*w.shape[:-2], 2 * w.shape[-1]))
        return np.split(z, 2, -1)

    return both


@dataclasses.dataclass(frozen=True)
class Function:
    """A public function of x and a weight.

    Attributes:
      weight: the shape of its weight, whose dimension `contracted` is K.
      run: of both operands and keywords, its result.
      accumulators: of both as arrays of NumPy, x with any leading dimensions, what its epilogue is
        of; the reference for `run`.
      finish: of the accumulators, the result without any keyword; analytic, as is `accumulators`.
      contracted: the dimension of the weight that is contracted.
      keywords: the keywords of features that it has.
    """

    weight: tuple[int, ...]
    run: Callable
    accumulators: Callable
    finish: Callable = lambda acc: acc
    contracted: int = 0
    keywords: tuple[str, ...] = ("epilogue", "batch_invariant")


def _mlp(x, w, **how):
    down = jnp.eye(N, dtype=jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32)
    return jax_tcgemm.mlp(x, {"up": w, "down": down}, **{"activation": None} | how)


def _top_k(x, w, **how):
    return jax_tcgemm.linear_top_k(x, w, 5, vocabulary_axis=1, **how)[0]


_ALL = ("activation", "epilogue", "batch_invariant")
FUNCTIONS = {
    "matmul": Function((K, N), jax_tcgemm.matmul, np.matmul),
    "dot_general": Function(
        (K, N),
        lambda x, w, **how: jax_tcgemm.dot_general(x, w, (((1,), (0,)), ((), ())), **how),
        np.matmul,
    ),
    "linear": Function((K, N), jax_tcgemm.linear, np.matmul, keywords=_ALL),
    "gated_linear": Function(
        (K, 2, N),
        lambda x, w, **how: jax_tcgemm.gated_linear(x, w, **{"activation": None} | how),
        _both(np.matmul),
        finish=lambda gate, up: gate * up,
        keywords=_ALL,
    ),
    "mlp": Function((K, N), _mlp, np.matmul, keywords=("activation", "batch_invariant")),
    "ragged_dot": Function(
        (GROUPS, K, N),
        lambda x, w, **how: jax_tcgemm.ragged_dot(x, w, SIZES, **how),
        _of_groups,
        contracted=1,
        keywords=_ALL,
    ),
    "gated_ragged_linear": Function(
        (GROUPS, K, 2, N),
        lambda x, w, **how: jax_tcgemm.gated_ragged_linear(
            x, w, SIZES, **{"activation": None} | how
        ),
        _both(_of_groups),
        finish=lambda gate, up: gate * up,
        contracted=1,
        keywords=_ALL,
    ),
    "linear_cross_entropy": Function(
        (K, VOCABULARY),
        lambda x, w, **how: jax_tcgemm.linear_cross_entropy(
            x, w, _labels(x), vocabulary_axis=1, reduction="none", **how
        ),
        np.matmul,
        finish=lambda z: _logsumexp(z) - _chosen(z),
        keywords=("batch_invariant",),
    ),
    "linear_log_prob": Function(
        (K, VOCABULARY),
        lambda x, w, **how: jax_tcgemm.linear_log_prob(x, w, _labels(x), vocabulary_axis=1, **how),
        np.matmul,
        finish=lambda z: _chosen(z) - _logsumexp(z),
        keywords=("batch_invariant",),
    ),
    "linear_top_k": Function(
        (K, VOCABULARY),
        _top_k,
        np.matmul,
        finish=lambda z: np.sort(z, -1)[..., :-6:-1],
        keywords=("batch_invariant",),
    ),
}


def _labels(x):
    """Of all rows, or of those that one of two devices has."""
    number = x.shape[0]
    if number == M:
        return LABELS
    return jax.lax.dynamic_slice_in_dim(LABELS, jax.lax.axis_index("d") * number, number)


def _chosen(z):
    return z[..., np.arange(M), LABELS]


def _logsumexp(z):
    most = z.real.max(-1, keepdims=True)
    return np.log(np.exp(z - most).sum(-1)) + most[..., 0]


# --- encodings ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Encoding:
    """What operands are held as.

    Attributes:
      x: of a float32 array of rows of K, the operand.
      weight: of a float32 array and its contracted dimension, the operand.
      rtol: the largest error of a result, relative to the largest one.
      how: keywords that every call has.
    """

    x: Callable
    weight: Callable
    rtol: float
    how: dict = dataclasses.field(default_factory=dict)


def _quantized(dtype, **scales):
    return lambda x: jax_tcgemm.quantize(x, dtype, **scales)


def _blocks(w, contracted: int):
    """In blocks of 32 along the contracted dimension."""
    block = [32 if axis == contracted else 1 for axis in range(contracted, w.ndim)]
    return jax_tcgemm.quantize(w, jnp.float8_e4m3fn, block=block)


def _packed(dtype: str, most: int):
    def pack(w, contracted: int):
        groups = np.abs(np.asarray(w)).max(contracted, keepdims=True)
        scale = (groups / most).astype(np.float32)
        q = np.rint(np.asarray(w) / scale).astype(np.int32)
        scale = jnp.asarray(scale, jnp.bfloat16)
        return jax_tcgemm.pack_weights(jnp.asarray(q), scale, group_size=None, dtype=dtype)

    return pack


_E4M3 = jnp.float8_e4m3fn
_AS_BF16 = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
ENCODINGS = {
    "bf16": Encoding(_AS_BF16, lambda w, _: _AS_BF16(w), 2e-2),
    "f32 X3": Encoding(
        jnp.asarray, lambda w, _: jnp.asarray(w), 1e-4, {"precision": "BF16_BF16_F32_X3"}
    ),
    "int8": Encoding(
        _quantized(jnp.int8, axis=-1),
        lambda w, axis: jax_tcgemm.quantize(w, jnp.int8, axis=axis),
        1e-5,
    ),
    "fp8 per tensor": Encoding(_quantized(_E4M3), lambda w, _: jax_tcgemm.quantize(w, _E4M3), 1e-5),
    "fp8 per row": Encoding(
        _quantized(_E4M3, axis=-1), lambda w, axis: jax_tcgemm.quantize(w, _E4M3, axis=axis), 1e-5
    ),
    "fp8 per block": Encoding(_quantized(_E4M3, block=(1, 32)), _blocks, 1e-5),
    "int4 weights": Encoding(_AS_BF16, _packed("int4", 7), 2e-2),
    "int8 weights": Encoding(_AS_BF16, _packed("int8", 127), 2e-2),
}


def dequantized(x) -> np.ndarray:
    """The numbers of an operand in float64."""
    if isinstance(x, jax_tcgemm.QuantizedArray):
        x = jax_tcgemm.dequantize(x)
    if isinstance(x, jax_tcgemm.PackedWeight):
        x = x.dequantize()
    return np.asarray(x, np.float64)


# --- features -------------------------------------------------------------------------------------

FEATURES = (
    "plain",
    "activation",
    "epilogue",
    "gradient",
    "vmap",
    "explicit axes",
    "shard_map",
    "batch_invariant",
    "export",
)

# --- refusals -------------------------------------------------------------------------------------

LOSSES = ("linear_cross_entropy", "linear_log_prob", "linear_top_k")
QUANTIZED = ("int8", "fp8 per tensor", "fp8 per row", "fp8 per block")
WEIGHT_ONLY = ("int4 weights", "int8 weights")


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The error of a combination, a part of its message, and what the tables say of it."""

    error: type[Exception]
    message: str
    reason: str


_QUANTIZED_LOSS = Refusal(
    TypeError,
    "x must be an array, got x of type QuantizedArray",
    "the function takes arrays; dequantize first",
)
_PACKED_LOSS = Refusal(
    TypeError,
    "w must be an array, got w of type PackedWeight",
    "the function takes arrays; dequantize first",
)
_PACKED_INVARIANT = Refusal(
    ValueError,
    "batch_invariant must be False with a packed weight",
    "kernels of packed weights depend on the number of rows; dequantize the weight first",
)
_NO_CPU_KERNEL = Refusal(
    ValueError,
    "batch_invariant must be False for what only XLA runs",
    "on a CPU only XLA runs the product; on a GPU it is supported",
)
_SHARDED_TOP_K = Refusal(
    ValueError,
    "x must not be sharded over explicit mesh axes",
    "the function must be called inside shard_map",
)
# Of (function, encoding, feature), None standing for all; the first that fits counts.
REFUSED: dict[tuple, Refusal] = {
    **{(loss, encoding, None): _QUANTIZED_LOSS for loss in LOSSES for encoding in QUANTIZED},
    **{(loss, encoding, None): _PACKED_LOSS for loss in LOSSES for encoding in WEIGHT_ONLY},
    **{(None, encoding, "batch_invariant"): _PACKED_INVARIANT for encoding in WEIGHT_ONLY},
    (None, "fp8 per tensor", "batch_invariant"): _NO_CPU_KERNEL,
    (None, "fp8 per row", "batch_invariant"): _NO_CPU_KERNEL,
    ("linear_top_k", None, "explicit axes"): _SHARDED_TOP_K,
}


def refusal(function: str, encoding: str, feature: str) -> Refusal | None:
    """Why a cell is refused; None where its value is right."""
    cell = function, encoding, feature
    for key, found in REFUSED.items():
        if all(own in (None, asked) for own, asked in zip(key, cell, strict=True)):
            return found
    return None


def has_feature(function: str, feature: str) -> bool:
    """Whether a function has the keyword of a feature, if that is one."""
    is_keyword = feature in ("activation", "epilogue", "batch_invariant")
    return not is_keyword or feature in FUNCTIONS[function].keywords


# --- tables ---------------------------------------------------------------------------------------

BEGIN, END = "<!-- combinations: begin -->", "<!-- combinations: end -->"


def tables() -> str:
    """Return the tables of the page, one for each function, and the reasons of refusals."""
    reasons = list(dict.fromkeys(found.reason for found in REFUSED.values()))
    lines = []
    for function in FUNCTIONS:
        features = [x for x in FEATURES if has_feature(function, x)]
        lines += [f"### {function}", "", "| | " + " | ".join(features) + " |"]
        lines += ["|---" * (1 + len(features)) + "|"]
        for encoding in ENCODINGS:
            found = [refusal(function, encoding, x) for x in features]
            cells = ["yes" if x is None else f"no ({1 + reasons.index(x.reason)})" for x in found]
            lines.append(f"| {encoding} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += [f"{i}. {reason[0].upper()}{reason[1:]}." for i, reason in enumerate(reasons, 1)]
    return "\n".join(lines)


def rendered(text: str) -> str:
    """Return the page's text with its tables up to date."""
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:begin]}\n\n{tables()}\n\n{text[end:]}"


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text("utf-8")), "utf-8")
