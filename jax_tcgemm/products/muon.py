"""Public `scale_by_muon`: an Optax gradient transformation based on `newton_schulz`."""

import collections
import importlib
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.products.newton_schulz import (
    MUON_COEFFICIENTS,
    canonical_coefficients,
    newton_schulz_of_equal,
)

_OP = "scale_by_muon"


def scale_by_muon(
    ns_coeffs=MUON_COEFFICIENTS,
    ns_steps: int = 5,
    beta=0.95,
    eps=1e-8,
    mu_dtype=None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: str = "frobenius",
    weight_dimension_numbers=None,
    dtype=jnp.bfloat16,
    precision=None,
    implementation: str | None = None,
):
    """Optax transformation of Muon on `newton_schulz`: a drop-in for `optax.contrib.scale_by_muon`.

        mu = beta mu + (1 - beta) g
        update = newton_schulz(mu, or with nesterov beta mu + (1 - beta) g, each debiased)

    Arguments, defaults and state equal Optax's, so `scale_by_muon` can replace
    `optax.contrib.scale_by_muon` in a chain and continue from a stored state. Optax is not a
    dependency: the function imports Optax, which must be installed. Two features of Optax are
    missing: preconditioning other than by the Frobenius norm, and coefficients from the state.

    Args:
      ns_coeffs: a triple of numbers, or one triple for each step.
      ns_steps: number of iterations. A sequence of triples gives one step per triple, at most
        `ns_steps`.
      beta: decay of the momentum, a number or a 0-D array.
      eps: number added to the norm; see `newton_schulz`.
      mu_dtype: dtype of the momentum. None selects the dtype of the parameters.
      nesterov: whether to use Nesterov momentum.
      adaptive: whether to scale updates by the dual norm of the momentum.
      preconditioning: "frobenius".
      weight_dimension_numbers: None for matrices, a tree of `optax.contrib.MuonDimensionNumbers`
        with the structure of the parameters, or a function of the parameters that returns such a
        tree. Dimensions that are not named are batch dimensions.
      dtype: dtype of the products; see `newton_schulz`. Optax iterates in the dtype of the
        gradients.
      precision: precision of the products; see `newton_schulz`.
      implementation: name of an implementation; see `newton_schulz`.

    Returns:
      An `optax.GradientTransformation` whose state is an `optax.contrib.MuonState`.

    Raises:
      ImportError: if Optax is missing or has no Muon.
      TypeError: under the conditions of `newton_schulz`.
      ValueError: if preconditioning is not "frobenius", or coefficients have another shape. Also,
        when updates are computed, if parameters are not matrices and have no dimension numbers.

    Numerics:
      The orthogonalization follows `newton_schulz`. The momentum is computed as in Optax.

    Source:
      `optax.contrib.scale_by_muon`; K. Jordan et al., "Muon: An optimizer for hidden layers in
      neural networks", 2024, https://kellerjordan.github.io/posts/muon/

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm, optax
      >>> optimizer = optax.chain(jax_tcgemm.scale_by_muon(), optax.scale_by_learning_rate(0.02))
      >>> params = {"w": jnp.ones((64, 32))}
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update({"w": jnp.eye(64, 32)}, state, params)
      >>> updates["w"].shape
      (64, 32)
    """
    optax, contrib = _import_optax()
    if preconditioning != "frobenius":
        raise ValueError(
            f'{_OP}: preconditioning must be "frobenius", got {preconditioning=}; use '
            "optax.contrib.scale_by_muon for others"
        )
    triples, stored = _coefficients(ns_coeffs, ns_steps)
    if mu_dtype is not None:
        mu_dtype = jax.dtypes.canonicalize_dtype(mu_dtype)

    how = {"steps": len(triples), "coefficients": triples, "dtype": dtype, "eps": eps}
    how |= {"precision": precision, "implementation": implementation}

    def init(params):
        return contrib.MuonState(
            count=jnp.zeros([], jnp.int32),
            mu=optax.tree.zeros_like(params, dtype=mu_dtype),
            ns_coeffs=jnp.asarray(stored),
        )

    def update(updates, state, params=None):
        del params
        dims = weight_dimension_numbers
        dims = dims(updates) if callable(dims) else dims
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        count = optax.safe_increment(state.count)
        if nesterov:
            momentum = jax.tree.map(
                lambda m, g: beta * m + (1 - beta) * g,
                optax.tree.bias_correction(mu, beta, optax.safe_increment(count)),
                optax.tree.bias_correction(updates, beta, count),
            )
        else:
            momentum = optax.tree.bias_correction(mu, beta, count)
        leaves, structure = jax.tree.flatten(momentum)
        dims = [None] * len(leaves) if dims is None else structure.flatten_up_to(dims)
        found = _orthogonalized(leaves, dims, how)
        if adaptive:
            found = [jnp.sum(x * y) * y for x, y in zip(leaves, found, strict=True)]
        state = contrib.MuonState(
            count=count, mu=optax.tree.cast(mu, mu_dtype), ns_coeffs=state.ns_coeffs
        )
        return jax.tree.unflatten(structure, found), state

    return optax.GradientTransformation(init, update)


def _import_optax():
    """Return the modules `optax` and `optax.contrib`."""
    try:
        optax, contrib = map(importlib.import_module, ("optax", "optax.contrib"))
        operator.attrgetter("MuonState", "MuonDimensionNumbers")(contrib)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{_OP}: Optax with optax.contrib.MuonDimensionNumbers must be installed, got: {error};"
            " pip install -U optax"
        ) from error
    return optax, contrib


def _coefficients(ns_coeffs, ns_steps) -> tuple[tuple, tuple]:
    """Return a triple for each step, and what the state has: triples or one for all."""
    is_one = not hasattr(ns_coeffs, "__len__") or all(np.ndim(x) == 0 for x in ns_coeffs)
    if is_one:
        triples = canonical_coefficients(_OP, "ns_coeffs", ns_coeffs, "ns_steps", ns_steps)
        return triples, triples[0]
    number = len(ns_coeffs)
    if isinstance(ns_steps, int) and number > ns_steps:
        raise ValueError(
            f"{_OP}: ns_coeffs must be at most ns_steps={ns_steps} triples, got {number}; they are "
            "one for each step"
        )
    triples = canonical_coefficients(_OP, "ns_coeffs", ns_coeffs, "ns_steps", number)
    return triples, triples


# As many elements of products x x^T as fill a GPU.
_ELEMENTS_TOGETHER = 4096 * 4096


def _orthogonalized(leaves: list, dims: list, how: dict) -> list:
    """Return `newton_schulz` of all leaves; equal matrices are computed as stacks.

    A small matrix has too few tiles for a GPU, so stacks have enough matrices to fill it. Matrices
    of one stack are divided among the devices that shard them.
    """
    pairs = [_as_matrices(x, own) for x, own in zip(leaves, dims, strict=True)]
    equal = collections.defaultdict(list)
    for i, (x, _) in enumerate(pairs):
        equal[jax.typeof(x)].append(i)
    found = [None] * len(leaves)
    for x, indices in equal.items():
        count = _num_together(x)
        for together in (indices[i : i + count] for i in range(0, len(indices), count)):
            results = newton_schulz_of_equal([pairs[i][0] for i in together], **how)
            for i, result in zip(together, results, strict=True):
                _, restored = pairs[i]
                found[i] = restored(result)
    return found


def _num_together(x) -> int:
    """Return how many arrays of a type form one stack."""
    *batch, m, n = x.shape
    num_shards = x.size // max(math.prod(x.sharding.shard_shape(x.shape)), 1)
    elements = math.prod(batch) * min(m, n) ** 2
    return max(num_shards, _ELEMENTS_TOGETHER // max(elements, 1), 1)


def _as_matrices(x: jax.Array, dims):
    """Return a stack of matrices, and the function that restores the dimensions of x.

    The iteration of a transposed matrix is the transposed result, so matrices that are two
    dimensions of x are not transposed.
    """
    if x.ndim == 2:
        return x, lambda y: y
    if dims is None or x.ndim < 2:
        raise ValueError(
            f"{_OP}: parameters must be matrices, got one of shape {x.shape}; give "
            "weight_dimension_numbers, or mask it by optax.partition"
        )
    sides = [
        tuple(axis % x.ndim for axis in ((axes,) if isinstance(axes, int) else axes))
        for axes in (dims.reduction_axis, dims.output_axis)
    ]
    if set(sides[0]) & set(sides[1]):
        raise ValueError(
            f"{_OP}: weight_dimension_numbers must have different reduction and output axes, got "
            f"{dims} for a parameter of shape {x.shape}; name each axis once"
        )
    sides.sort()
    rows, columns = sides
    batch = tuple(axis for axis in range(x.ndim) if axis not in rows + columns)
    order = (*batch, *rows, *columns)
    stacked = x.transpose(order)
    sizes = [math.prod(x.shape[axis] for axis in axes) for axes in (rows, columns)]
    shape = (*(x.shape[axis] for axis in batch), *sizes)
    inverse = sorted(range(x.ndim), key=order.__getitem__)
    return stacked.reshape(shape), lambda y: y.reshape(stacked.shape).transpose(inverse)
