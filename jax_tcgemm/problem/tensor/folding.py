"""Folding of permutations and reductions to the forms that our kernels run."""

import dataclasses
import itertools
import math

import numpy as np

from jax_tcgemm.problem.tensor.modes import Modes
from jax_tcgemm.problem.tensor.operation import Operation

_MAX_BATCH_MODES = 4


@dataclasses.dataclass(frozen=True)
class Transposition:
    """Batched transposition out[batch, c, r] = in[batch, r, c]; r is out's fastest mode, c in's."""

    rows: int
    cols: int
    in_row_stride: int
    out_col_stride: int
    batch_extents: tuple[int, ...]
    batch_in_strides: tuple[int, ...]
    batch_out_strides: tuple[int, ...]

    def attributes(self) -> dict:
        """Return the attributes of "tcgemm_transpose" (csrc/ffi/tensor_kernels.h), without ABI."""
        return {
            key: np.array(value, np.int64) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }

    def query(self) -> dict:
        """Return the arguments of the module's reject_transposition(), without the element size."""
        fields = dataclasses.asdict(self).items()
        return {key: list(value) if isinstance(value, tuple) else value for key, value in fields}


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Reduction out[outer, inner] = reduce over r of in[outer, r, inner]."""

    outer: int
    reduced: int
    inner: int


def merged(source: Modes, target: Modes, extents) -> tuple[list[int], list[int], dict[int, int]]:
    """Merge modes that are adjacent in both source and target, and drop modes of size 1.

    Returns:
      The modes of source and of target, and the size of each mode.
    """
    source = [mode for mode in source if extents[mode] != 1]
    target = [mode for mode in target if extents[mode] != 1]
    following = dict(itertools.pairwise(source))
    sizes, groups = {}, {}
    for mode in target:
        last = next(reversed(groups), None)
        if last is not None and following.get(groups[last]) == mode:
            groups[last] = mode
            sizes[last] *= extents[mode]
        else:
            groups[mode] = mode
            sizes[mode] = extents[mode]
    return [mode for mode in source if mode in groups], list(groups), sizes


def fold_permutation(operation: Operation) -> Transposition | str:
    """Return a permutation as a batched transposition, or why it cannot be one."""
    source, target, sizes = merged(operation.operands[0], operation.result, operation.extents)
    if len(target) < 2:
        return "it leaves every element in place"
    if source[-1] == target[-1]:
        return "the fastest mode stays the fastest, so that it copies rows"
    row, col = target[-1], source[-1]
    in_strides, out_strides = _strides(source, sizes), _strides(target, sizes)
    batch = [mode for mode in target if mode not in (row, col)]
    if len(batch) > _MAX_BATCH_MODES:
        return f"it has {len(batch) + 2} modes after merging, over {_MAX_BATCH_MODES + 2}"
    return Transposition(
        rows=sizes[row],
        cols=sizes[col],
        in_row_stride=in_strides[row],
        out_col_stride=out_strides[col],
        batch_extents=tuple(sizes[mode] for mode in batch),
        batch_in_strides=tuple(in_strides[mode] for mode in batch),
        batch_out_strides=tuple(out_strides[mode] for mode in batch),
    )


def fold_reduction(operation: Operation) -> Reduction | str:
    """Return a reduction over adjacent modes as three sizes, or why it cannot be one."""
    modes, result = operation.operands[0], operation.result
    kept = [mode for mode in modes if mode in result]
    if kept != list(result):
        return "the result's modes are in another order than the operand's"
    reduced = [i for i, m in enumerate(modes) if m not in result and operation.extents[m] != 1]
    if not reduced:
        return "nothing is reduced"
    first, last = reduced[0], reduced[-1]
    inside = [m for m in modes[first : last + 1] if m in result and operation.extents[m] != 1]
    if inside:
        return "the reduced modes are not neighbors"
    sizes = [operation.extents[mode] for mode in modes]
    return Reduction(
        math.prod(sizes[:first]), math.prod(sizes[first : last + 1]), math.prod(sizes[last + 1 :])
    )


def _strides(order: list[int], sizes: dict[int, int]) -> dict[int, int]:
    strides, stride = {}, 1
    for mode in reversed(order):
        strides[mode] = stride
        stride *= sizes[mode]
    return strides
