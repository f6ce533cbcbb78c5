"""Arrays to be rounded to 8 bits for tests, and what the definition makes of them."""

import dataclasses
import functools

import numpy as np

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.operands.quantize import QuantizeProblem
from jax_tcgemm.selection import implementations
from jax_tcgemm.selection.devices import ASSUMED_GPU

LARGEST = {"f8e4m3fn": 448, "f8e5m2": 57344, "s8": 127}
TINY = np.finfo(np.float32).tiny


@dataclasses.dataclass(frozen=True)
class Case:
    """An array, whose blocks are of different magnitudes; `special`: with zeros, NaN, infinity."""

    form: str
    rows: int
    columns: int
    out: str = "f8e4m3fn"
    x: str = "bf16"
    transposed: bool = False
    batch: int = 1
    special: bool = False

    @property
    def label(self):
        words = [self.form, f"{self.batch}x{self.rows}x{self.columns}", self.x, self.out]
        return "_".join([*words, *["t"] * self.transposed, *["special"] * self.special])

    @property
    def problem(self):
        sizes = self.batch, self.rows, self.columns
        return QuantizeProblem(self.form, *sizes, self.transposed, self.x, self.out)

    @functools.cached_property
    def array(self):
        rng = np.random.default_rng([self.rows, self.columns, len(self.label)])
        shape = self.batch, self.rows, self.columns
        # Neighboring rows and columns differ, so that a scale of a neighbor shows.
        sizes = (rng.uniform(-4, 4, (*shape[:axis], 1, *shape[axis + 1 :])) for axis in (1, 2))
        x = rng.standard_normal(shape) * np.exp2(sum(sizes))
        x[-1, -1, -1] = 2 * abs(x).max()  # A row's largest is its last.
        if self.special:
            x[0, 1, :] = 0
            x[0, :, 2] = -0.0
            x[0, 0, 3], x[0, -1, 4], x[-1, 5, -1] = np.nan, np.inf, -np.inf
        return x.astype(DTYPES[self.x])

    @property
    def arrays(self):
        """The operands of a call, by name."""
        found = {"x": self.array}
        if self.form == "scaled":
            found["given"] = np.linspace(0.01, 0.1, self.batch, dtype=np.float32)
        return found

    @functools.cached_property
    def exact(self):
        """The results by the definition, of which every step is rounded to float32."""
        return {
            name: self._rounded(x) if name.endswith("values") else x
            for name, x in self.unrounded.items()
        }

    @functools.cached_property
    def unrounded(self):
        """The same, but values as they are before they are rounded to 8 bits."""
        wide = self.array.astype(np.float32)
        found = self._unrounded(wide, "")
        if self.transposed:
            found |= self._unrounded(wide.swapaxes(1, 2), "transposed_")
        return found

    def _unrounded(self, x, prefix):
        if self.form == "scaled":
            scales = self.arrays["given"][:, None, None]
            return {f"{prefix}values": x * (1 / scales)}
        down = {"rows": 1, "lines": 1, "blocks": 128}[self.form]
        across = x.shape[2] if self.form == "rows" else 128
        index = [np.arange(0, e, size) for e, size in zip(x.shape[1:], (down, across), strict=True)]
        largest = np.maximum.reduceat(np.maximum.reduceat(abs(x), index[0], 1), index[1], 2)
        inverse = np.float32(1) / np.float32(LARGEST[self.out])
        scales = np.maximum(largest * inverse, TINY)
        each = scales.repeat(down, 1)[:, : x.shape[1]].repeat(across, 2)[..., : x.shape[2]]
        with np.errstate(invalid="ignore"):
            values = x * (1 / each)
        return {f"{prefix}values": values, f"{prefix}scales": scales}

    def _rounded(self, values):
        if self.out == "s8":
            return np.nan_to_num(np.rint(values), nan=0).clip(-128, 127).astype(np.int8)
        largest = LARGEST[self.out]
        return values.clip(-largest, largest).astype(DTYPES[self.out])

    def mismatch(self, results) -> str:
        """How results are wrong, "" where they have the bits of the definition; NaN is NaN."""
        for (name, expected), got in zip(self.exact.items(), results, strict=True):
            got = np.asarray(got).reshape(expected.shape)
            kind = {4: np.uint32, 1: np.uint8}[expected.dtype.itemsize]
            wrong = got.view(kind) != expected.view(kind)
            if expected.dtype != np.int8:
                wide = [a.astype(np.float32) for a in (got, expected)]
                wrong &= ~(np.isnan(wide[0]) & np.isnan(wide[1]))
            if wrong.any():
                where = tuple(int(i) for i in np.argwhere(wrong)[0])
                return (
                    f"{self.label}: {wrong.sum()} of {wrong.size} {name} are wrong, the first at "
                    f"{where}: {got[where]} instead of {expected[where]}"
                )
        return ""


def instances(case):
    """The kernels that a call brings."""
    candidate = implementations.Candidate("quantize", "default", "")
    return implementations.kernels(candidate, case.problem, ASSUMED_GPU)


def all_quantize():
    """Every kernel of the family."""
    found = {}
    cases = [Case("rows", 8, k) for k in (1000, 1001, 2000, 4000, 8000, 8001)]
    for form in ("lines", "blocks", "scaled"):
        for columns in (128, 127):
            cases += [Case(form, 128, columns, transposed=each) for each in (False, True)]
    if not implementations.configs_of("quantize", "quantize"):
        return {}
    for case in cases:
        for x in ("bf16", "f16", "f32"):
            for out in LARGEST:
                own = dataclasses.replace(case, x=x, out=out)
                (instance,) = instances(own)
                found[f"quantize_{own.label}"] = instance
    return found
