"""Which lane of a warp holds which matrix element in tensor-core fragments.

A fragment is a matrix spread over the 32 lanes of a warp: each lane holds a few elements, numbered
by an index (`fragment.x[index]` for WMMA; the order of the register operands, low half first, for
`mma.sync`). PTX documents the `mma.sync` fragments ("Matrix Fragments for mma.m16n8k16" and
similar sections). WMMA fragments are unspecified; the maps here follow the code that WMMA loads
compile to for compute capability 8.0 and later, where row and column layouts of an operand give the
same fragment. A GPU test compares each map with the hardware.

Operands are `a` (m x k), `b` (k x n) and `c` (m x n, the accumulator). The dtype is the operand's
own: `fragment_map("m16n16k16", "f32", "c")` is the float32 accumulator.
"""

import dataclasses

import numpy as np

LANES = 32

_MAP_TYPE = np.dtype([("lane", np.int32), ("index", np.int32)])
_ELEMENT_TYPE = np.dtype([("row", np.int32), ("col", np.int32)])

# Elements of a 32-bit register; float64 takes two registers but counts alike.
_PER_REGISTER = {"f16": 2, "bf16": 2, "s8": 4, "u8": 4, "tf32": 1, "f64": 1}


@dataclasses.dataclass(frozen=True)
class _Shape:
    m: int
    n: int
    k: int
    wmma: bool
    # Accumulator dtypes of each input dtype.
    accumulators: dict[str, tuple[str, ...]]

    @property
    def swapped(self) -> bool:
        """Whether the hardware multiplies B^T by A^T: its instructions have at least 16 rows."""
        return self.m == 8 and self.n > 8


_HALF = {"f16": ("f16", "f32"), "bf16": ("f32",)}
_INT8 = {"s8": ("s32",), "u8": ("s32",)}
_SHAPES = {
    "m16n16k16": _Shape(16, 16, 16, True, _HALF | _INT8),
    "m32n8k16": _Shape(32, 8, 16, True, _HALF | _INT8),
    "m8n32k16": _Shape(8, 32, 16, True, _HALF | _INT8),
    "m16n16k8": _Shape(16, 16, 8, True, {"tf32": ("f32",)}),
    "m8n8k4": _Shape(8, 8, 4, True, {"f64": ("f64",)}),
    "m16n8k16": _Shape(16, 8, 16, False, _HALF),
    "m16n8k8": _Shape(16, 8, 8, False, {"tf32": ("f32",)}),
    "m16n8k32": _Shape(16, 8, 32, False, _INT8),
}


def fragment_cases() -> list[tuple[str, str, str]]:
    """Every (shape, dtype, operand) that `fragment_map` knows."""
    cases = []
    for name, shape in _SHAPES.items():
        cases += [(name, dtype, operand) for dtype in shape.accumulators for operand in "ab"]
        outputs = dict.fromkeys(out for outs in shape.accumulators.values() for out in outs)
        cases += [(name, dtype, "c") for dtype in outputs]
    return cases


def is_wmma(shape: str) -> bool:
    """Whether `shape` belongs to WMMA rather than `mma.sync`."""
    _check(shape, None, None)
    return _SHAPES[shape].wmma


def fragment_shape(shape: str, operand: str) -> tuple[int, int]:
    """Rows and columns of an operand."""
    _check(shape, None, operand)
    s = _SHAPES[shape]
    return {"a": (s.m, s.k), "b": (s.k, s.n), "c": (s.m, s.n)}[operand]


def fragment_size(shape: str, dtype: str, operand: str) -> int:
    """Elements that one lane holds, copies included.

    Some WMMA fragments hold elements more than once: the float16 `a` and `b` always have 16
    elements, as the first generation of tensor cores needed, of which later ones use the first 4
    or 8; the others repeat them.
    """
    _check(shape, dtype, operand)
    if _SHAPES[shape].wmma and dtype == "f16" and operand != "c":
        return 16
    return _distinct(shape, operand)


def fragment_map(shape: str, dtype: str, operand: str) -> np.ndarray:
    """Where each element of a matrix lies in a fragment.

    Args:
      shape: a WMMA shape (m16n16k16, m32n8k16, m8n32k16, m16n16k8, m8n8k4) or an `mma.sync` shape
        (m16n8k16, m16n8k8, m16n8k32).
      dtype: the operand's: f16, bf16, s8, u8, tf32 or f64 for a and b; f16, f32, s32 or f64 for c.
      operand: "a", "b" or "c".

    Returns:
      A structured array with the operand's rows and columns and the fields `lane` and `index`.
      Where a lane holds an element more than once (see `fragment_size`), `index` is the first;
      the others follow at steps of `rows * cols / 32`.

    Raises:
      ValueError: an unknown shape or operand, or a dtype the shape does not have.

    Examples:
      >>> fragment_map("m16n16k16", "f32", "c")[1, 12].item()
      (6, 4)
    """
    _check(shape, dtype, operand)
    rows, cols = fragment_shape(shape, operand)
    row, col = np.meshgrid(np.arange(rows), np.arange(cols), indexing="ij")
    swapped = _SHAPES[shape].swapped
    if operand == "c":
        lane, index = _accumulator(col, row, cols) if swapped else _accumulator(row, col, rows)
    else:
        # Rows of a and columns of b play the same part; both run along k inside a register.
        outer, k = (row, col) if operand == "a" else (col, row)
        first = (operand == "a") != swapped
        lane, index = _multiplicand(
            outer, k, _SHAPES[shape].k, _PER_REGISTER[dtype], first and outer.max() > 8
        )
    result = np.empty((rows, cols), _MAP_TYPE)
    result["lane"], result["index"] = lane, index
    return result


def fragment_elements(shape: str, dtype: str, operand: str) -> np.ndarray:
    """The inverse of `fragment_map`: the element at each (lane, index), copies included.

    Returns:
      A structured array of 32 x `fragment_size` with the fields `row` and `col`.
    """
    where = fragment_map(shape, dtype, operand)
    size, distinct = fragment_size(shape, dtype, operand), _distinct(shape, operand)
    result = np.empty((LANES, size), _ELEMENT_TYPE)
    for (row, col), (lane, index) in zip(np.ndindex(where.shape), where.ravel(), strict=True):
        result[lane, index::distinct] = (row, col)
    return result


def fragment_grid(shape: str, dtype: str, operand: str) -> str:
    """`fragment_map` as text: a grid of `lane:index`, one line a row of the matrix."""
    where = fragment_map(shape, dtype, operand)
    rows, cols = where.shape
    family = "WMMA" if is_wmma(shape) else "mma.sync"
    distinct = _distinct(shape, operand)
    copies = fragment_size(shape, dtype, operand) // distinct
    lines = [f"{family} {shape} {dtype} {operand}: {rows} x {cols}, lane:index of each element"]
    if copies > 1:
        lines.append(f"each element {copies} times, indices {distinct} apart; the first is shown")
    lines.append("     " + "".join(f"{col:>6}" for col in range(cols)))
    for row in range(rows):
        cells = "".join(f"{f'{lane}:{index}':>6}" for lane, index in where[row])
        lines.append(f"{row:>4} {cells}")
    return "\n".join(lines)


def _distinct(shape: str, operand: str) -> int:
    rows, cols = fragment_shape(shape, operand)
    return rows * cols // LANES


def _accumulator(row, col, rows):
    """Lane and index in an accumulator: 8 x 8 blocks, column of blocks by column of blocks."""
    lane = row % 8 * 4 + col % 8 // 2
    index = col // 8 * (rows // 8 * 2) + row // 8 * 2 + col % 2
    return lane, index


def _multiplicand(outer, k, extent_k, per_register, paired):
    """Lane and index in a or b.

    A register holds `per_register` elements along k, four lanes side by side hold a block of four
    registers along k, and eight such groups of lanes eight rows (columns). Blocks follow along k,
    then along the rows; `paired` operands (the instruction's 16-row side) first alternate between
    the two halves of 16 rows.
    """
    lane = outer % 8 * 4 + k // per_register % 4
    blocks_k = extent_k // (4 * per_register)
    block_k = k // (4 * per_register)
    if paired:
        register = (outer // 16 * blocks_k + block_k) * 2 + outer % 16 // 8
    else:
        register = outer // 8 * blocks_k + block_k
    return lane, register * per_register + k % per_register


def _check(shape, dtype, operand):
    if shape not in _SHAPES:
        raise ValueError(
            f"fragment_map: shape must be one of {', '.join(_SHAPES)}, got shape={shape!r}; "
            "choose one"
        )
    if operand is not None and operand not in ("a", "b", "c"):
        raise ValueError(
            f"fragment_map: operand must be a, b or c, got operand={operand!r}; choose one"
        )
    if dtype is None:
        return
    known = [d for s, d, o in fragment_cases() if s == shape and o == operand]
    if dtype not in known:
        raise ValueError(
            f"fragment_map: dtype of {operand} must be one of {', '.join(known)} for {shape}, "
            f"got dtype={dtype!r}; choose one"
        )
