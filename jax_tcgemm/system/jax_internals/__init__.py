"""All uses of undocumented JAX internals, each with a fallback.

JAX may move or remove any of these in any release, so that no other package uses them. The fallback
is the module that defines the name, an equivalent, or reduced functionality. Without a registry of
rules a primitive cannot be differentiated or batched, which JAX then reports; the import fails only
if nothing can be lowered.
"""

from jax_tcgemm.system.jax_internals.avals import (
    converted,
    like,
    product_type,
    strong_type,
    varying_axes,
    with_partitions,
    zero_tangent,
)
from jax_tcgemm.system.jax_internals.interpreters import (
    check_nans,
    register_imported,
    register_jet,
    register_roofline,
    register_sparse_product,
    when_imported,
)
from jax_tcgemm.system.jax_internals.jaxprs import (
    as_jaxpr,
    as_lowered,
    function_of,
    has_hi_primitives,
    has_ordered_effects,
    has_plain_context,
    new_variable,
    rewrapped,
    source_line,
    summed_axes,
    with_context_of,
    with_equations,
    without_hi_primitives,
)
from jax_tcgemm.system.jax_internals.lowering import (
    by_platform,
    has_symbolic_dimensions,
    is_exported,
    lower_program,
    mlir,
    module_function,
    num_automatic_devices,
    on_mesh,
    platforms,
    row_major,
    started_platform,
    uses_shardy,
)
from jax_tcgemm.system.jax_internals.patching import (
    ShardingTypeError,
    in_pallas_kernel,
    ragged_dot_general_p,
    scaled_matmul_p,
)
from jax_tcgemm.system.jax_internals.rules import (
    Zero,
    ad,
    batching,
    xla,
)
from jax_tcgemm.system.jax_internals.traces import (
    bound,
    is_tracer,
    run_program,
    trace_context,
)

__all__ = [
    "ShardingTypeError",
    "Zero",
    "ad",
    "as_jaxpr",
    "as_lowered",
    "batching",
    "bound",
    "by_platform",
    "check_nans",
    "converted",
    "function_of",
    "has_hi_primitives",
    "has_ordered_effects",
    "has_plain_context",
    "has_symbolic_dimensions",
    "in_pallas_kernel",
    "is_exported",
    "is_tracer",
    "like",
    "lower_program",
    "mlir",
    "module_function",
    "new_variable",
    "num_automatic_devices",
    "on_mesh",
    "platforms",
    "product_type",
    "ragged_dot_general_p",
    "register_imported",
    "register_jet",
    "register_roofline",
    "register_sparse_product",
    "rewrapped",
    "row_major",
    "run_program",
    "scaled_matmul_p",
    "source_line",
    "started_platform",
    "strong_type",
    "summed_axes",
    "trace_context",
    "uses_shardy",
    "varying_axes",
    "when_imported",
    "with_context_of",
    "with_equations",
    "with_partitions",
    "without_hi_primitives",
    "xla",
    "zero_tangent",
]
