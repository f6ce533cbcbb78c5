"""Public `gated_ragged_linear`: a gated linear layer of experts."""

from collections.abc import Callable, Sequence

from jax_tcgemm.products.epilogue import check_epilogue
from jax_tcgemm.products.quantized import as_operand, as_weight
from jax_tcgemm.products.ragged.fused import Arguments, fused_product


def gated_ragged_linear(
    x,
    weights,
    group_sizes,
    activation="silu",
    group_offset=None,
    *,
    bias=None,
    gather_indices=None,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
    epilogue: Callable | None = None,
    epilogue_operands: Sequence = (),
    implementation: str | None = None,
    config: str | None = None,
    batch_invariant: bool | int | None = None,
):
    """Gated linear layer of experts: both grouped products and the gate in one call.

        out[i] = f(x[i] @ weights[g, :, 0] + bias[g, 0]) * (x[i] @ weights[g, :, 1] + bias[g, 1])

    for the rows i of group g, and 0 for rows of no group.

    Args:
      x: array of shape (m, k), or a `QuantizedArray`.
      weights: array of shape (g, k, 2, n), a `QuantizedArray` or a `PackedWeight`. Index 0 of the
        third dimension is the gate, index 1 is the up matrix. An array of shape (g, k, 2n) whose
        first n columns are the gate can be reshaped to this shape.
      group_sizes: number of rows of each group; see `ragged_dot`.
      activation: the function f; see `ragged_dot`.
      group_offset: first group of weights; see `ragged_dot`.
      bias: None, or an array of shape (g, 2, n).
      gather_indices: rows of x to use; see `ragged_dot`.
      precision: precision of both products; see `ragged_dot`.
      preferred_element_type: dtype of the result; see `ragged_dot`.
      out_sharding: sharding of the result; see `ragged_dot`.
      epilogue: None, or a function of both products (gate first), in place of activation, bias and
        preferred_element_type; see `ragged_dot`.
      epilogue_operands: arrays that the epilogue receives after the products; see `ragged_dot`.
      implementation: name of an implementation; see `ragged_dot`.
      config: name of a config of that implementation; see `ragged_dot`.
      batch_invariant: whether rows are batch-invariant; see `ragged_dot`.

    Returns:
      Array of shape (m, n). With an epilogue, the results of the epilogue.

    Raises:
      TypeError: under the conditions of `ragged_dot`.
      ValueError: under the conditions of `ragged_dot`.

    Numerics:
      The rules of `ragged_dot` with an activation apply.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> tokens, experts = jnp.ones((10, 8)), jnp.ones((3, 8, 2, 4))
      >>> jax_tcgemm.gated_ragged_linear(tokens, experts, jnp.array([4, 0, 5]), "relu")[:, 0]
      Array([64., 64., 64., 64., 64., 64., 64., 64., 64.,  0.], dtype=float32)
    """
    op = "gated_ragged_linear"
    x, weights = as_operand(op, "x", x), as_weight(op, "weights", weights, of_groups=True)
    replaced = {
        # The default activation does not conflict with an epilogue.
        "activation": None if isinstance(activation, str) and activation == "silu" else activation,
        **{"bias": bias, "preferred_element_type": preferred_element_type},
    }
    check_epilogue(op, epilogue, epilogue_operands, **replaced)
    arrays = group_sizes, group_offset, bias, gather_indices
    return fused_product(
        op,
        Arguments("x", x, "weights", weights, ("g", "k", "2", "n"), *arrays),
        gated=True,
        activation=activation,
        epilogue=epilogue,
        epilogue_operands=epilogue_operands,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        implementation=implementation,
        config=config,
        batch_invariant=batch_invariant,
    )
