"""Static parameters of a loss's call, and the products of the call."""

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.products.epilogue import with_epilogue
from jax_tcgemm.products.linear import product

_COLUMNS_BY_COLUMNS = (((0,), (0,)), ((), ()))


class Step(enum.IntEnum):
    """The steps to a logit, in their order."""

    PRODUCT, BIAS, QUOTIENT, TANH, CAP = range(5)


@dataclasses.dataclass(frozen=True)
class How:
    """Static parameters of a call.

    Attributes:
      options: options of the call.
      soft_cap: bound of the magnitude of logits, by a hyperbolic tangent; None for no bound.
      label_smoothing: fraction of the target that is spread over the vocabulary.
      z_loss: factor of the squared logarithm of the sum of exponentials.
      axis_name: the manual mesh axis or axes that shard the vocabulary, or None.
      chunk_bytes: bound on the stored logits at a time; None for the default of `num_chunks`.
      precision: as for `matmul`.
      vocabulary_axis: the vocabulary dimension of w, 0 or 1.
      rounded_to: None, or a dtype to which steps are rounded, as if their arrays had this dtype.
      last_rounded: the last step that is rounded.
    """

    options: CallOptions
    soft_cap: float | None
    label_smoothing: float
    z_loss: float
    axis_name: str | tuple[str, ...] | None
    chunk_bytes: int | None
    precision: object = None
    vocabulary_axis: int = 0
    rounded_to: np.dtype | None = None
    last_rounded: Step = Step.PRODUCT

    @property
    def rows(self) -> int:
        """Number of tokens that determines every choice of a batch-invariant call; else 0."""
        return self.options.invariant_rows

    def without_fma(self, x: jax.Array) -> jax.Array:
        """Keep XLA from contracting a product with a sum into one rounding (FMA)."""
        return lax.optimization_barrier(x) if self.rows else x

    def size(self, w) -> int:
        """Size of a device's vocabulary."""
        return w.shape[self.vocabulary_axis]

    def columns(self, extent: int) -> tuple[int, int]:
        """Return a number per dimension of w: `extent` for the vocabulary and 0 for the other."""
        return (extent, 0) if self.vocabulary_axis == 0 else (0, extent)

    def rounded(self, z: jax.Array, step: Step) -> jax.Array:
        """Round the result of a step, if the call rounds this step."""
        if self.rounded_to is None or step > self.last_rounded:
            return z
        finfo = jnp.finfo(self.rounded_to)
        return lax.reduce_precision(z, finfo.nexp, finfo.nmant)

    @property
    def devices(self) -> int:
        """Number of devices that share the vocabulary."""
        return 1 if self.axis_name is None else lax.axis_size(self.axis_name)

    def total(self, x: jax.Array) -> jax.Array:
        """The sum over the devices that share the vocabulary."""
        return x if self.axis_name is None else lax.psum(x, self.axis_name)

    @property
    def by_vocabulary(self):
        """Dimension numbers of a product of (tokens, vocabulary) with w."""
        return ((1,), (self.vocabulary_axis,)), ((), ())

    def gradient_of_w(self, gradients, x, dtype, residual=None) -> jax.Array:
        """Product of gradients of logits and x over the tokens, in the layout of w."""
        pair = (gradients, x) if self.vocabulary_axis == 0 else (x, gradients)
        return self.product(*pair, _COLUMNS_BY_COLUMNS, dtype, residual)

    def product(self, lhs, rhs, dimension_numbers, dtype, residual=None) -> jax.Array:
        """Product without an epilogue, to which a residual is added in place."""
        return product(
            self.options,
            lhs,
            rhs,
            dimension_numbers=dimension_numbers,
            residual=residual,
            donate_residual=residual is not None,
            preferred_element_type=np.dtype(dtype),
            precision=self.precision,
        )

    def with_epilogue(self, lhs, rhs, dimension_numbers, epilogue, operands):
        """Product with an epilogue."""
        return with_epilogue(
            self.options,
            lhs,
            rhs,
            epilogue,
            operands,
            dimension_numbers=dimension_numbers,
            precision=self.precision,
        )
