"""Providers of Qwix whose products are ours; Qwix (`pip install qwix`) is imported here alone.

    model = qwix.quantize_model(model, PtqProvider(rules))

Qwix quantises, by its rules, and this multiplies: `PtqProvider` serves with quantised weights, and
activations where a rule says so.
"""

import qwix

from jax_tcgemm.products.dot_general import dot_general
from jax_tcgemm.tensor.einsum import einsum


class PtqProvider(qwix.PtqProvider):
    """`qwix.PtqProvider` with our products of quantised arrays.

    Args:
      rules: as of `qwix.PtqProvider`.
      **options: as of `qwix.PtqProvider`.
    """

    def __init__(self, rules, **options):
        super().__init__(rules, _dot_general_fn=dot_general, _einsum_fn=einsum, **options)
