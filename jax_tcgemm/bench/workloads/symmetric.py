"""Workloads of symmetric products.

A group has these keys::

    kind         "gram", x x^T; "square", a a of a symmetric a; "polynomial", a a + a in one call;
                 "newton_schulz", five steps of the iteration of Muon; "muon", an update of
                 optax.contrib.muon; "scale_by_muon", an update of optax.contrib.scale_by_muon,
                 where a batch is as many parameters; may be a list
    n, k, batch  rows and columns of a matrix, and how many there are; "square" and "polynomial"
                 have n rows and columns; n and k may be lists

`gram` is `jax_tcgemm.gram`, and `matmul` our `matmul` of an array and its transpose, which is
recognized. Of iterations `newton_schulz` and `scale_by_muon` are ours, and `accelerate` is the
program of `xla` under `jax_tcgemm.accelerate`, which is plain JAX or optax.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

import jax_tcgemm
from jax_tcgemm.bench.suites import DTYPES
from jax_tcgemm.bench.workload import Workload, check_keys, check_value, listed

_COEFFICIENTS = 3.4445, -4.7750, 2.0315


def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]:
    """The workloads of one group; see the module's documentation.

    Raises:
      ValueError: for an unknown key or kind.
    """
    check_keys(f"a group of {suite}", group, ("name", "kind", "n", "k", "batch"))
    sizes = listed(group["n"]), listed(group.get("k", [None])), listed(group["kind"])
    for n, k, kind in itertools.product(*sizes):
        check_value("kind", kind, _KINDS)
        shape = (n, n) if k is None else (n, k)
        batch = group.get("batch", 1)
        yield _workload(suite, group.get("name", ""), dtype, kind, shape, batch)


def _transposed(x):
    return jnp.swapaxes(x, -1, -2)


def _precisely(a, b):
    return jnp.matmul(a, b, precision="highest")


def _gram(x):
    return jnp.matmul(x, _transposed(x))


def _square(a):
    return jnp.matmul(a, a)


def _polynomial(a):
    return _COEFFICIENTS[1] * a + _COEFFICIENTS[2] * jnp.matmul(a, a)


def iterated(x, product=jnp.matmul):
    """Five steps of the iteration that Muon orthogonalizes by, as plain JAX."""
    norm = jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    x, (a, b, c) = (x / norm).astype(x.dtype), _COEFFICIENTS
    is_tall = x.shape[-2] > x.shape[-1]
    x = _transposed(x) if is_tall else x
    for _ in range(5):
        gram = product(x, _transposed(x))
        x = a * x + product(b * gram + c * product(gram, gram), x)
    return _transposed(x) if is_tall else x


def _updated(optimizer, x):
    params = {"w": x} if x.ndim == 2 else {f"w{i}": x[i] for i in range(x.shape[0])}
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    return updates


def _muon(x):
    import optax

    return _updated(optax.contrib.muon(1.0), x)


def _optax_scale_by_muon(x):
    import optax

    def matrices(params):
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)

    return _updated(optax.contrib.scale_by_muon(weight_dimension_numbers=matrices), x)


def _scale_by_muon(x):
    return _updated(jax_tcgemm.scale_by_muon(), x)


def _in_float32(update):
    def run(x):
        with jax.default_matmul_precision("highest"):
            return update(x.astype(jnp.float32))

    return run


def _symmetric(key, like):
    x = jax.random.normal(key, like.shape, jnp.float32)
    return (x + _transposed(x)).astype(like.dtype)


def _normal(key, like):
    return jax.random.normal(key, like.shape, like.dtype)


# For each kind: our functions, the plain program, its reference, and how operands are drawn.
_KINDS = {
    "gram": (
        {"gram": jax_tcgemm.gram, "matmul": lambda x: jax_tcgemm.matmul(x, _transposed(x))},
        _gram,
        lambda x: _precisely(x, _transposed(x)),
        _normal,
    ),
    "square": (
        {"gram": jax_tcgemm.gram},
        _square,
        lambda a: _precisely(a, a),
        _symmetric,
    ),
    "polynomial": (
        {
            "gram": lambda a: jax_tcgemm.gram(
                a, alpha=_COEFFICIENTS[2], beta=_COEFFICIENTS[1], c=a
            ),
        },
        _polynomial,
        lambda a: _COEFFICIENTS[1] * a + _COEFFICIENTS[2] * _precisely(a, a),
        _symmetric,
    ),
    "newton_schulz": (
        {
            "newton_schulz": jax_tcgemm.newton_schulz,
            "accelerate": jax_tcgemm.accelerate(iterated),
        },
        iterated,
        lambda x: iterated(x, _precisely),
        _normal,
    ),
    "muon": (
        {"accelerate": jax_tcgemm.accelerate(_muon)},
        _muon,
        _in_float32(_muon),
        _normal,
    ),
    "scale_by_muon": (
        {
            "scale_by_muon": _scale_by_muon,
            "accelerate": jax_tcgemm.accelerate(_optax_scale_by_muon),
        },
        _optax_scale_by_muon,
        _in_float32(_optax_scale_by_muon),
        _normal,
    ),
}


def _workload(suite, label, dtype, kind, shape, batch) -> Workload:
    ours, xla, exact, draw = _KINDS[kind]
    element_type = DTYPES[dtype][0]
    whole = shape if batch == 1 else (batch, *shape)
    like = jax.ShapeDtypeStruct(whole, element_type)
    n, k = min(shape), max(shape)
    products = {"gram": n * n * k, "square": n**3, "polynomial": n**3}
    # Each step computes x x^T, the square of x x^T, and a product with x.
    macs = products.get(kind, 5 * (2 * n * n * k + n**3))
    is_iterated = kind in ("newton_schulz", "muon", "scale_by_muon")
    return Workload(
        suite=suite,
        label=" ".join(filter(None, (label, kind))),
        dtype=dtype,
        shape="×".join(map(str, whole)),
        sizes={"batch": batch, "n": shape[0], "k": shape[1]},
        operands=(like,),
        ours=ours,
        peers={"xla": xla},
        reference=exact,
        tolerance=0.2 if is_iterated else 4 * float(jnp.finfo(element_type).eps),
        flops=2 * batch * macs,
        draw=lambda key: (draw(key, like),),
    )
