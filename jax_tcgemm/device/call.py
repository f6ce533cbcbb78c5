"""The custom call of a problem: the same for each kind that the modules know."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jax_tcgemm.kernels.program import carried
from jax_tcgemm.selection import AnyProblem, Choice, abi_of


def call(
    problem: AnyProblem,
    choice: Choice,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int] | None = None,
) -> list[jax.Array]:
    """Calls the target `tcgemm_<kind>` with the attribute `<kind>` (csrc/ffi/call.h).

    Args:
      problem: what is computed.
      choice: what runs it, by which kernels, in how much scratch memory; not "xla".
      operands: the buffers that the problem reads, in the order of its table of arrays.
      results: shapes and dtypes of those that it writes.
      aliases: operands, by position, and the results that take their places in memory.
    """
    workspace = []
    if choice.workspace_bytes:
        workspace.append(jax.ShapeDtypeStruct((choice.workspace_bytes,), jnp.uint8))
    attributes = {
        "abi": abi_of(choice.implementation),
        "implementation": choice.implementation,
        "config": choice.config,
    }
    function = jax.ffi.ffi_call(
        f"tcgemm_{problem.kind}", [*results, *workspace], input_output_aliases=aliases
    )
    kernels = map(carried, choice.kernels)
    found = function(*operands, *kernels, **{problem.kind: attributes | problem.attributes()})
    return list(found[: len(results)])
