"""Products of quantized arrays that are sharded over explicit mesh axes."""

from collections.abc import Callable, Hashable, Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jax_tcgemm.problem.operands.quantized import QuantizedArray
from jax_tcgemm.sharding import shardings
from jax_tcgemm.sharding.layout import canonical_spec
from jax_tcgemm.sharding.partitioning import resharded


def over_devices(
    run: Callable,
    lhs: QuantizedArray,
    rhs: QuantizedArray,
    names: Sequence[Sequence[Hashable]],
    out_sharding: NamedSharding | None = None,
    *,
    follows: bool = False,
):
    """Run a product of operands that may be sharded over explicit mesh axes.

    Operands are resharded in 8 bits to match the result, which is then resharded to out_sharding.
    If both operands are sharded over the same axes along a contracted dimension, the devices'
    products are summed.

    Args:
      run: run(lhs, rhs, out_sharding) makes the product, or several results of its shape.
      lhs: left operand.
      rhs: right operand.
      names: names of the dimensions of lhs, of rhs and of the result.
      out_sharding: sharding of the result; None if the operands determine it.
      follows: whether a sum over devices has the sharding that follows from the operands.

    Returns:
      What `run` returns.
    """
    *own_names, result = names
    natural = shardings.following((lhs.qvalue, rhs.qvalue), own_names, result)
    if natural is None:
        return run(lhs, rhs, None)
    specs = [
        dict(zip(own, _spec(x), strict=True)) for own, x in zip(own_names, (lhs, rhs), strict=True)
    ]
    contracted = [name for name in own_names[0] if name not in result]
    summed = {name for name in contracted if specs[0][name] and specs[0][name] == specs[1][name]}
    wanted = dict(zip(result, canonical_spec(natural.spec, len(result)), strict=True))
    placed = []
    for i, (x, own) in enumerate(zip((lhs, rhs), own_names, strict=True)):
        entries = []
        for name in own:
            axes = wanted.get(name, specs[i][name])
            if name in contracted and name not in summed and i and specs[0][name]:
                axes = ()
            entries.append(axes or None)
        placed.append(_moved(x, entries, natural.mesh))
    if summed:
        return run(*placed, natural if follows else out_sharding)
    return jax.tree.map(lambda x: resharded(x, out_sharding), run(*placed, None))


def _spec(x: QuantizedArray):
    return canonical_spec(jax.typeof(x.qvalue).sharding.spec, x.ndim)


def _moved(x: QuantizedArray, entries, mesh) -> QuantizedArray:
    """Reshard an operand; scales are unsharded along dimensions whose sharding changes."""
    own = [entry or () for entry in entries]
    if own == list(_spec(x)):
        return x
    of_scale = canonical_spec(jax.typeof(x.scale).sharding.spec, x.ndim)
    scales = [a if a == b else None for a, b in zip(of_scale, own, strict=True)]
    qvalue, scale = (
        resharded(array, NamedSharding(mesh, PartitionSpec(*spec)))
        for array, spec in ((x.qvalue, entries), (x.scale, scales))
    )
    return QuantizedArray(qvalue, scale, x.zero_point, x.qtype, x.block)
