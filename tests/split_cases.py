"""Operands to be split into terms for tests, and what the definition makes of them."""

import dataclasses
import functools

import numpy as np

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.split import SplitProblem
from jax_tcgemm.selection import implementations
from jax_tcgemm.selection.devices import ASSUMED_GPU

MANTISSA_BITS = {"bf16": 7, "f32": 10}
# The term that each product takes.
X3, X6, X9 = (1, 0, 0), (2, 1, 0, 1, 0, 0), (2, 2, 1, 2, 1, 0, 1, 0, 0)


@dataclasses.dataclass(frozen=True)
class Case:
    """An operand of numbers of all sizes; in `depth` and `pitch` so many zeros are added."""

    form: str
    outer: int
    middle: int
    inner: int
    columns: int
    terms: tuple[int, ...] = X6
    out: str = "bf16"
    deeper: int = 0
    wider: int = 0

    @property
    def label(self):
        extents = f"{self.outer}x{self.middle}x{self.inner}x{self.columns}"
        return f"{self.form}_{extents}_{len(self.terms)}_{self.out}"

    @property
    def problem(self):
        vector = 16 // DTYPES[self.out].itemsize
        return SplitProblem(
            form=self.form,
            outer=self.outer,
            middle=self.middle,
            inner=self.inner,
            columns=self.columns,
            depth=(self.inner if self.form == "right_first" else self.middle) + self.deeper,
            pitch=-(-self.columns // vector) * vector + self.wider * vector,
            terms=self.terms,
            in_dtype="f32" if self.form == "real" else "c64",
            out_dtype=self.out,
        )

    @functools.cached_property
    def array(self):
        rng = np.random.default_rng([self.outer, self.middle, self.inner, self.columns])
        shape = self.outer, self.middle, self.inner, self.columns
        components = [_numbers(rng, shape) for _ in range(1 if self.form == "real" else 2)]
        if len(components) == 1:
            return components[0]
        x = np.empty(shape, np.complex64)
        x.real, x.imag = components
        return x

    @property
    def arrays(self):
        """The operands of a call, by name."""
        return {"x": self.array}

    @functools.cached_property
    def exact(self):
        """The result by the definition."""
        return by_definition(self.problem, self.array)

    def mismatch(self, results) -> str:
        """How a result is wrong, "" where it has the bits of the definition; NaN is NaN."""
        got = np.asarray(results[0]).astype(np.float32).reshape(-1)
        expected = self.exact.astype(np.float32).reshape(-1)
        wrong = got.view(np.uint32) != expected.view(np.uint32)
        wrong &= ~(np.isnan(got) & np.isnan(expected))
        # The sign of zeros that are filled in or left over does not matter.
        wrong &= (got != 0) | (expected != 0)
        if wrong.any():
            where = int(np.argwhere(wrong)[0, 0])
            return (
                f"{self.label}: {wrong.sum()} of {wrong.size} parts are wrong, the first at "
                f"{where}: {got[where]} instead of {expected[where]}"
            )
        return ""


def instances(case):
    """The kernels that a call brings."""
    candidate = implementations.Candidate("split", "default", "")
    return implementations.kernels(candidate, case.problem, ASSUMED_GPU)


def all_split():
    """Every kernel of the family for operands that are both split."""
    if not implementations.configs_of("split", "split"):
        return {}
    found = {}
    for form in ("real", "left", "right"):
        for columns in (128, 127):
            for parts, out in ((X3, "bf16"), (X6, "bf16"), (X9, "bf16"), (X3, "f32")):
                case = Case(form, 4, 8, 1, columns, parts, out)
                (found[f"split_{case.label}"],) = instances(case)
    return found


def by_definition(problem, x):
    """The result, of which every step is rounded to float32."""
    x = x.reshape(problem.outer, problem.middle, problem.inner, problem.columns)
    if problem.form == "real":
        return _stored(problem, _of_products(problem, x))
    re, im = _of_products(problem, x.real), _of_products(problem, x.imag)
    if problem.form == "left":
        return _stored(problem, _interleaved(re, im))
    both = [_stored(problem, _interleaved(*pair)) for pair in ((re, -im), (im, re))]
    return np.stack(both, 1 if problem.form == "right_first" else 3)


def _of_products(problem, x):
    """(products, outer, middle, inner, columns)"""
    bits = MANTISSA_BITS[problem.out_dtype]
    largest = np.float32((2 - 2.0**-bits) * 2.0**127)
    is_finite = np.isfinite(x)
    rest, found = np.where(is_finite, x, np.float32(0)), []
    for number in range(max(problem.terms) + 1):
        bounded = rest.clip(-largest, largest) if number == 0 else rest
        found.append(_rounded(bounded, bits))
        rest = rest - found[-1]
    taken = [found[number] for number in problem.terms[:-1]]
    return np.stack([*taken, np.where(is_finite, found[0], x)])


def _stored(problem, parts):
    """In the order of dimensions and the extents of the result, without its component."""
    is_last_form = problem.form == "right_first"
    filled, order = (3, (1, 2, 0, 3, 4)) if is_last_form else (2, (1, 0, 2, 3, 4))
    widths = [(0, 0)] * 5
    widths[filled] = 0, problem.depth - parts.shape[filled]
    widths[4] = 0, problem.pitch - parts.shape[4]
    return np.pad(parts, widths).transpose(order)


def _numbers(rng, shape):
    x = rng.standard_normal(shape) * np.exp2(rng.uniform(-20, 20, shape))
    x = x.astype(np.float32).reshape(-1)
    special = [np.inf, -np.inf, np.nan, 0, -0.0, np.finfo(np.float32).max, 1 + 2.0**-8, 3e-39]
    places = rng.permutation(x.size)[: len(special)]
    x[places] = special[: len(places)]
    # A NaN all of whose bits of mantissa are dropped.
    x.view(np.uint32)[rng.integers(x.size)] = 0x7F800001
    return x.reshape(shape)


def _rounded(x, bits):
    """To the nearest float32 with so many bits of mantissa, to the even one of two."""
    dropped = 23 - bits
    whole = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
    whole += (1 << (dropped - 1)) - 1 + (whole >> dropped & 1)
    return (whole >> dropped << dropped).astype(np.uint32).view(np.float32)


def _interleaved(first, second):
    """Parts of two components, product by product."""
    return np.stack([first, second], 1).reshape(-1, *first.shape[1:])
