"""Public `einsum`."""

import jax
import jax.numpy as jnp
import opt_einsum
from jax import lax
from opt_einsum import parser

from jax_tcgemm.primitives.tensor import contract as primitive
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.problem.tensor.operation import dot_dimensions
from jax_tcgemm.products import quantized
from jax_tcgemm.products.arguments import (
    call_options,
    canonical_element_type,
    canonical_sharding,
    promoted_type,
    weakened,
)
from jax_tcgemm.products.packed import is_packed
from jax_tcgemm.products.quantized import as_weight, values_of
from jax_tcgemm.sharding import shardings
from jax_tcgemm.sharding.partitioning import resharded


def einsum(
    subscripts,
    *operands,
    optimize="auto",
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
    implementation: str | None = None,
) -> jax.Array:
    """Sum of products of any number of arrays: a drop-in for `jax.numpy.einsum`.

    opt_einsum determines the order of contractions, as in `jax.numpy.einsum`. Each step contracts
    two operands and permutes the result in one operation. A GEMM of this library (if the modes fold
    to a GEMM), cuTENSOR or XLA runs the step, whichever has the shortest estimated time.
    `jax_tcgemm.explain` reports the implementation and the reason. `einsum` can be differentiated
    any number of times and batched by `jax.vmap`.

    Args:
      subscripts: subscripts of `jax.numpy.einsum`, such as `"bqhd,bkhd->bhqk"`, with or without
        `->` and ellipses. Or operands and lists of mode numbers in alternation.
      *operands: arrays of any numeric dtype, `QuantizedArray`s or `PackedWeight`s.
      optimize: "auto", another strategy of opt_einsum, a path, True for the optimal path, or False
        for left to right.
      precision: None (uses `jax.default_matmul_precision`), a `lax.Precision` or its name, a pair
        of these, or a `lax.DotAlgorithmPreset` or its name.
      preferred_element_type: dtype of the result and of intermediate results. None selects the
        dtype that the operands promote to. For quantized operands, the dtypes of the scales count.
      out_sharding: sharding of the result, for meshes with explicit axes. Intermediate results keep
        the sharding of their operands.
      implementation: name of the implementation that must run every step; see `contract`. None
        selects an implementation for each step.

    Returns:
      The result, with the shape, dtype and weak type of `jax.numpy.einsum`.

    Raises:
      TypeError: if operands are not numeric arrays.
      ValueError: if subscripts do not match the operands, a path contracts more than two operands
        at once, or an implementation is unknown. Also, at lowering, if the named implementation
        cannot run a step.

    Numerics:
      Each step follows `contract`. Intermediate results have the dtype of the result. A step with a
      quantized operand is a product that follows `matmul`. If a mode of a quantized operand is
      summed on its own, the operand is dequantized.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import tensor
      >>> q, k = jnp.ones((2, 16, 4, 8)), jnp.ones((2, 20, 4, 8))
      >>> tensor.einsum("bqhd,bkhd->bhqk", q, k).shape
      (2, 4, 16, 20)
    """
    op = "tensor.einsum"
    options = call_options(op, implementation, kind="contract")
    terms, output, arrays = _parse(op, subscripts, operands)
    dtype, is_weak = canonical_element_type(op, preferred_element_type), False
    if quantized.is_any(*arrays):
        dtype = quantized.result_dtype(op, dtype, *arrays)
        if implementation not in (None, "gemm", "xla"):
            raise ValueError(
                f"{op}: implementation must be gemm, xla or None for quantized operands, got "
                f"{implementation=}; only matrix products are scaled"
            )
    elif dtype is None:
        dtype, is_weak = promoted_type(op, *arrays)
    if is_packed(*arrays) and len(arrays) != 2:
        arrays = quantized.as_arrays(*arrays)
    terms, arrays = _without_broadcast(op, terms, arrays)
    steps = _steps(op, terms, output, arrays, optimize)
    params = {
        "options": options,
        "precision": canonical_precision(op, precision),
        "result_dtype": dtype,
    }
    out_sharding = canonical_sharding(op, out_sharding, len(output))
    for positions, step in steps:
        taken = [arrays.pop(position) for position in positions]
        inputs, result = step.split("->")
        terms = inputs.split(",")
        sharding = out_sharding
        if arrays:
            sharding = shardings.following([values_of(x) for x in taken], terms, result)
        arrays.append(_contract(taken, terms, result, sharding, params))
    out = lax.convert_element_type(arrays[0], dtype)
    return weakened(out) if is_weak else out


def _parse(op, subscripts, operands):
    """Return the terms and the output without ellipses, and the operands as arrays."""
    if isinstance(subscripts, str):
        arrays = (as_weight(op, f"operand {i}", x) for i, x in enumerate(operands))
        arguments = [subscripts, *arrays]
    else:
        arguments = [
            as_weight(op, f"operand {i // 2}", x)
            if i % 2 == 0 and i < _last(subscripts, operands)
            else x
            for i, x in enumerate((subscripts, *operands))
        ]
    try:
        inputs, output, arrays = parser.parse_einsum_input(arguments)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{op}: subscripts must fit the operands, got {subscripts=}: {error}; "
            "see jax.numpy.einsum"
        ) from None
    terms = inputs.split(",")
    for i, (term, x) in enumerate(zip(terms, arrays, strict=True)):
        if len(term) != x.ndim:
            raise ValueError(
                f"{op}: subscripts must name each mode, got {term!r} for operand {i} of shape "
                f"{x.shape}; write {x.ndim} letters"
            )
    return terms, output, list(arrays)


def _last(subscripts, operands) -> int:
    """Number of alternating operands and mode lists, without a mode list of the output."""
    count = 1 + len(operands)
    return count - count % 2


def _without_broadcast(op, terms, arrays):
    """Remove modes of size 1 that are larger in another operand, and thus broadcast."""
    extents = {}
    for i, (term, x) in enumerate(zip(terms, arrays, strict=True)):
        for letter, extent in zip(term, x.shape, strict=True):
            known = extents.setdefault(letter, extent)
            if known != extent and 1 not in (known, extent):
                raise ValueError(
                    f"{op}: a mode must have one extent, got {letter!r} with {known} and, in "
                    f"operand {i}, {extent}; give different modes different letters"
                )
            extents[letter] = extent if known == 1 else known
    found = []
    for term, x in zip(terms, arrays, strict=True):
        axes = [i for i, letter in enumerate(term) if x.shape[i] == 1 != extents[letter]]
        kept = "".join(letter for i, letter in enumerate(term) if i not in axes)
        found.append((kept, quantized.squeezed(x, axes)))
    terms, arrays = zip(*found, strict=True)
    return list(terms), list(arrays)


def _steps(op, terms, output, arrays, optimize) -> list[tuple[tuple[int, ...], str]]:
    """Return the contraction steps in order: positions of operands, and their subscripts."""
    if len(arrays) == 1:
        return [((0,), f"{terms[0]}->{output}")]
    if hasattr(optimize, "dtype"):
        raise TypeError(
            f"{op}: optimize must be a strategy of opt_einsum or a path, got an array; "
            '"auto" is the default'
        )
    if optimize is False:
        optimize = [(0, 1)] * (len(arrays) - 1)
    elif optimize is True:
        optimize = "optimal"
    # Symbolic dimensions count as 8 in the choice of the path, as in jax.numpy.einsum.
    shapes = [[d if isinstance(d, int) else 8 for d in x.shape] for x in arrays]
    try:
        _, path = opt_einsum.contract_path(
            f"{','.join(terms)}->{output}", *shapes, shapes=True, optimize=optimize
        )
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{op}: optimize must be a strategy of opt_einsum or a path, got {optimize=}: {error}; "
            '"auto" is the default'
        ) from None
    steps = [(step[0], step[2]) for step in path.contraction_list]
    if any(len(positions) > 2 for positions, _ in steps):
        raise ValueError(
            f"{op}: a path must contract at most two operands at once, got {optimize=}; "
            'leave it "auto"'
        )
    return steps


def _contract(arrays, terms, result, out_sharding, params) -> jax.Array:
    """Run one step: sums and diagonals of each operand alone, then their contraction."""
    others = [set(result).union(*terms[:i], *terms[i + 1 :]) for i in range(len(terms))]
    for i, term in enumerate(terms):
        if len(terms) == 1:
            kept = result
        else:
            kept = "".join(dict.fromkeys(letter for letter in term if letter in others[i]))
        if kept != term:
            (arrays[i],) = quantized.as_arrays(arrays[i])
            arrays[i] = jnp.einsum(
                f"{term}->{kept}", arrays[i], preferred_element_type=params["result_dtype"]
            )
            terms[i] = kept
    if len(arrays) == 1:
        return resharded(*quantized.as_arrays(*arrays), out_sharding)
    letters = {letter: i for i, letter in enumerate(dict.fromkeys("".join(terms)))}
    modes = [tuple(map(letters.get, term)) for term in terms]
    result = tuple(map(letters.get, result))
    if quantized.is_any(*arrays):
        numbers, permutation = dot_dimensions(*modes, result)
        return quantized.product(
            params["options"].of_step(),
            *arrays,
            dimension_numbers=numbers,
            permutation=permutation,
            preferred_element_type=params["result_dtype"],
            precision=params["precision"],
            out_sharding=out_sharding,
        )
    dtype = jnp.result_type(*arrays)
    arrays = [lax.convert_element_type(x, dtype) for x in arrays]
    return primitive.contract(
        *arrays,
        modes=modes,
        result=result,
        out_sharding=out_sharding,
        **params,
    )
