"""Base of the encodings of grouped products: epilogue operands with a value for each group.

Such an operand is (*batch, groups, 1, n) or (*batch, groups, 1, 1), each batch dimension of size 1
where it is broadcast. The epilogue takes, for each row, the operand of the row's group, as
(*batch, rows, n) or (*batch, rows, 1), and 0 for rows that belong to no group.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm import selection
from jax_tcgemm.primitives.encodings import Encoding
from jax_tcgemm.primitives.encodings.rows_of_groups import padded
from jax_tcgemm.primitives.rules import same_varying


class Grouped(Encoding):
    """The encoding of a product over groups of rows.

    Attributes:
      by_group: for each of the first epilogue operands, whether it has a value for each group.
    """

    by_group: tuple[bool, ...]

    def argument_types(self, operands, epilogue_operands, options):
        """Trace what the epilogue takes for operands by group, which vary as the product's do."""
        if not any(self.by_group):
            return super().argument_types(operands, epilogue_operands, options)

        def made(operands, epilogue_operands):
            return self.rows(same_varying(*operands), options).given(epilogue_operands)

        with selection.unseen():
            given = jax.make_jaxpr(made)(operands, epilogue_operands).out_avals
        return [*self.types(operands, options), *given]

    def types_given(self, operands, epilogue_operands):
        """Return the types of what is given for each row."""
        rows = self.shape(operands)[:-1]
        return [
            jax.ShapeDtypeStruct((*rows, x.shape[-1]), x.dtype) if is_by_group else x
            for x, is_by_group in self._marked(epilogue_operands)
        ]

    def batched_epilogue_operands(self, operands, dims):
        """Put the new dimension first, of size 1 in operands by group that lack it."""
        found = []
        for (x, is_by_group), dim in zip(self._marked(operands), dims, strict=True):
            if dim is not None:
                found.append((jnp.moveaxis(x, dim, 0), 0))
            else:
                found.append((lax.expand_dims(x, (0,)), 0) if is_by_group else (x, None))
        return [x for x, _ in found], [dim for _, dim in found]

    def names_of_epilogue_operands(self, operands, epilogue_operands, names):
        """Name the groups of operands by group, and batch dimensions in which they broadcast."""
        (*batch, _, _), found = self.shape(operands), []
        for i, ((x, is_by_group), own) in enumerate(
            zip(self._marked(epilogue_operands), names, strict=True)
        ):
            if is_by_group:
                pairs = enumerate(zip(x.shape, batch, strict=False))
                kept = [own[axis] if n == m else f"e{i}x{axis}" for axis, (n, m) in pairs]
                own = (*kept, "g", f"e{i}one", own[-1])
            found.append(own)
        return found

    def _marked(self, operands: Sequence):
        """Operands, each with whether it is held by group."""
        return list(zip(operands, padded(self.by_group, len(operands)), strict=True))
