"""What every implementation of the BLAS calls must compute, each with a float64 reference.

A case gives its arrays, the call, what float64 makes of the same arrays, and for each element of
the result the sum of absolute values that its rounding errors are measured by.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import blas

REAL = ("float32", "float64")
COMPLEX = ("complex64", "complex128")
HALF = ("float16", "bfloat16")
FULL = (*REAL, *COMPLEX)
ALL = (*HALF, *FULL)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; `run` takes the arrays and keywords, `reference` gives (value, scale)."""

    label: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    run: Callable
    reference: Callable
    length: int  # of the sums
    square: tuple[int, ...] = ()  # arrays that are triangles to solve

    @property
    def routine(self) -> str:
        """The first word of the label."""
        return self.label.split("-")[0]

    def arrays(self, dtype: str, seed: int = 0) -> list[np.ndarray]:
        """Fresh normal numbers, rounded to the dtype; triangles made well conditioned."""
        rng = np.random.default_rng(seed)
        found = []
        for i, shape in enumerate(self.shapes):
            x = rng.standard_normal(shape)
            if np.dtype(jnp.dtype(dtype)).kind == "c":
                x = x + 1j * rng.standard_normal(shape)
            if i in self.square:
                x = x / shape[-1] + 2 * np.eye(shape[-1])
            found.append(x.astype(jnp.dtype(dtype)))
        return found


def wide(x) -> np.ndarray:
    """In float64 or complex128, exactly."""
    x = np.asarray(x)
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def epsilon(dtype) -> float:
    """The spacing of numbers at 1."""
    dtype = jnp.dtype(dtype)
    return float(jnp.finfo(dtype).eps)


def check(case: Case, dtype: str, results, arrays, tf32: bool = False) -> None:
    """Every element within the error that rounding can make: of each sum, and of its result."""
    results = results if isinstance(results, tuple | list) else (results,)
    expected = case.reference(*map(wide, arrays))
    summed = 2.0**-10 if tf32 else epsilon("float32" if dtype in HALF else dtype)
    for result, (value, scale) in zip(results, expected, strict=True):
        assert result.shape == value.shape
        got = wide(result)
        if np.asarray(result).dtype.kind == "i":
            np.testing.assert_array_equal(got, value)
            continue
        # 8: the four products of a complex one, and both roundings of alpha and beta.
        allowed = 8 * (case.length + 4) * summed * scale + 2 * epsilon(dtype) * np.abs(value)
        error = np.abs(got - value)
        assert np.all(error <= allowed), (
            f"{case.label} {dtype}: {np.max(error / allowed)} of allowed"
        )


def op(x, trans):
    """op(x) in NumPy."""
    x = x if trans == "N" else np.swapaxes(x, -1, -2)
    return x.conj() if trans == "C" else x


def absolute(x):
    return np.abs(x.real) + np.abs(x.imag)


def stepped(x, n, increment):
    return x[..., : (n - 1) * increment + 1 : increment]


def placed(y, values, increment):
    y = np.broadcast_to(y, (*np.broadcast_shapes(y.shape[:-1], values.shape[:-1]), y.shape[-1]))
    y = y.copy()
    y[..., : (values.shape[-1] - 1) * increment + 1 : increment] = values
    return y


def _level1() -> list[Case]:
    cases = []
    for n, inc, batch in (
        (1, 1, ()),
        (7, 3, ()),
        (1000, 1, ()),
        (4099, 2, ()),
        (33, 1, (3,)),
        (9, 2, (2, 2)),
    ):
        shape = (*batch, (n - 1) * inc + 1 + (inc > 1))
        where = f"n{n}-inc{inc}" + "".join(f"-b{b}" for b in batch)

        def index(x, f, n=n, inc=inc):
            return [(f(absolute(stepped(x, n, inc)), -1), 1)]

        for name, f in (("iamax", np.argmax), ("iamin", np.argmin)):
            call = getattr(blas, name)
            cases.append(
                Case(
                    f"{name}-{where}",
                    FULL,  # Half types have many equal elements, but both count the first.
                    (shape,),
                    lambda x, call=call, n=n, inc=inc, **kw: call(x, n=n, increment=inc, **kw),
                    lambda x, index=index, f=f: index(x, f),
                    1,
                )
            )

        def asum(x, n=n, inc=inc):
            total = absolute(stepped(x, n, inc)).sum(-1)
            return [(total, total)]

        def nrm2(x, n=n, inc=inc):
            norm = np.sqrt((np.abs(stepped(x, n, inc)) ** 2).sum(-1))
            return [(norm, norm)]

        for name, f in (("asum", asum), ("nrm2", nrm2)):
            call = getattr(blas, name)
            cases.append(
                Case(
                    f"{name}-{where}",
                    ALL,
                    (shape,),
                    lambda x, call=call, n=n, inc=inc, **kw: call(x, n=n, increment=inc, **kw),
                    f,
                    n,
                )
            )
        y_inc = 1 if inc == 1 else inc + 2
        y_shape = (*batch, (n - 1) * y_inc + 1)
        kw = {"n": n, "increment_x": inc, "increment_y": y_inc}
        for conjugate in (False, True):

            def dot(x, y, n=n, inc=inc, y_inc=y_inc, conjugate=conjugate):
                x, y = stepped(x, n, inc), stepped(y, n, y_inc)
                x = x.conj() if conjugate else x
                return [((x * y).sum(-1), (np.abs(x) * np.abs(y)).sum(-1))]

            cases.append(
                Case(
                    f"dot{'c' if conjugate else 'u'}-{where}",
                    COMPLEX if conjugate else ALL,
                    (shape, y_shape),
                    lambda x, y, kw=kw, conjugate=conjugate, **more: blas.dot(
                        x, y, conjugate=conjugate, **kw, **more
                    ),
                    dot,
                    n,
                )
            )

        def scal(x, n=n, inc=inc):
            out = placed(x, -1.5 * stepped(x, n, inc), inc)
            return [(out, np.abs(out))]

        def axpy(x, y, n=n, inc=inc, y_inc=y_inc):
            x, old = stepped(x, n, inc), stepped(y, n, y_inc)
            size = placed(np.abs(y), 1.5 * np.abs(x) + np.abs(old), y_inc)
            return [(placed(y, -1.5 * x + old, y_inc), size)]

        def swap(x, y, n=n, inc=inc, y_inc=y_inc):
            new_x, new_y = stepped(y, n, y_inc), stepped(x, n, inc)
            return [(placed(x, new_x, inc), 0), (placed(y, new_y, y_inc), 0)]

        cases += [
            Case(
                f"scal-{where}",
                ALL,
                (shape,),
                lambda x, n=n, inc=inc, **more: blas.scal(-1.5, x, n=n, increment=inc, **more),
                scal,
                1,
            ),
            Case(
                f"axpy-{where}",
                ALL,
                (shape, y_shape),
                lambda x, y, kw=kw, **more: blas.axpy(-1.5, x, y, **kw, **more),
                axpy,
                1,
            ),
            Case(
                f"swap-{where}",
                ALL,
                (shape, y_shape),
                lambda x, y, kw=kw, **more: blas.swap(x, y, **kw, **more),
                swap,
                1,
            ),
        ]
    return cases


def _matrix_vector(label, dtypes, matrix, shape, full, run, trans, inc, batches, with_y, spare):
    """A case of alpha op(A) x + beta y; `full` makes the full matrix of the one that is stored.

    y has `spare` elements after the last one that is updated.
    """
    m, n = shape
    rows, columns = (m, n) if trans == "N" else (n, m)
    x_inc, y_inc = inc
    a_batch, x_batch, y_batch = batches
    shapes = [(*a_batch, *matrix), (*x_batch, (columns - 1) * x_inc + 1)]
    if with_y:
        shapes.append((*y_batch, (rows - 1) * y_inc + 1 + spare))

    def reference(a, x, y=None):
        a, x = op(full(a), trans), stepped(x, columns, x_inc)
        out = (a @ x[..., None])[..., 0] * 1.25
        size = (np.abs(a) @ np.abs(x)[..., None])[..., 0] * 1.25
        if y is None:
            return [(out, size)]
        old = stepped(y, rows, y_inc)
        size = placed(np.abs(y), size + 0.5 * np.abs(old), y_inc)
        return [(placed(y, out - 0.5 * old, y_inc), size)]

    def call(a, x, y=None, **kw):
        return run(
            a, x, y, alpha=1.25, beta=-0.5, trans=trans, increment_x=x_inc, increment_y=y_inc, **kw
        )

    return Case(label, dtypes, tuple(shapes), call, reference, columns)


def _level2() -> list[Case]:
    cases = []
    settings = (
        ("plain", (1, 1), ((), (), ()), True, 0),
        ("new", (1, 1), ((), (), ()), False, 0),
        ("inc", (2, 3), ((), (), ()), True, 1),
        ("batch", (1, 1), ((3,), (3,), (3,)), True, 0),
        ("one_matrix", (1, 1), ((), (3,), (1,)), True, 0),
        ("one_matrix_spare", (1, 1), ((), (3,), (3,)), True, 2),
        ("one_vector", (1, 2), ((3,), (), (3,)), True, 1),
    )
    for m, n in ((1, 1), (5, 3), (33, 70)):
        for trans in "NTC":
            for what, inc, batches, with_y, spare in settings:
                if (what != "plain" and m == 1) or (what == "one_matrix_spare" and m != 5):
                    continue
                label = f"{m}x{n}-{trans}-{what}"
                cases.append(
                    _matrix_vector(
                        f"gemv-{label}",
                        ALL,
                        (m, n),
                        (m, n),
                        lambda a: a,
                        blas.gemv,
                        trans,
                        inc,
                        batches,
                        with_y,
                        spare,
                    )
                )
                if what == "one_matrix_spare":
                    continue  # Batches of bands are not folded.
                for kl, ku in ((1, 1), (0, 2), (3, 0)) if m == 5 else ((4, 7),):

                    def run(a, x, y, kl=kl, ku=ku, n=n, **kw):
                        return blas.gbmv(a, x, y, kl=kl, ku=ku, columns=n, **kw)

                    def full(a, kl=kl, ku=ku, n=n):
                        out = np.zeros((*a.shape[:-1], n), a.dtype)
                        for i in range(a.shape[-2]):
                            for d in range(kl + ku + 1):
                                if 0 <= i + d - kl < n:
                                    out[..., i, i + d - kl] = a[..., i, d]
                        return out

                    band = (m, kl + ku + 1)
                    cases.append(
                        _matrix_vector(
                            f"gbmv-{label}-kl{kl}-ku{ku}",
                            FULL,
                            band,
                            (m, n),
                            full,
                            run,
                            trans,
                            inc,
                            batches,
                            with_y,
                            spare,
                        )
                    )
    return cases


def triangle(a, lower, unit):
    """What a solve sees of a matrix."""
    a = np.tril(a) if lower else np.triu(a)
    return (
        a - np.einsum("...ii->...i", a)[..., None] * np.eye(a.shape[-1]) + np.eye(a.shape[-1])
        if unit
        else a
    )


def _solves() -> list[Case]:
    cases = []
    for n, a_batch, b_batch, inc in (
        (1, (), (), 1),
        (7, (), (), 2),
        (65, (), (), 1),
        (6, (3,), (3,), 1),
        (6, (), (3,), 1),
        (6, (3,), (), 2),
    ):
        for lower in (True, False):
            for trans in "NTC":
                for unit in (False, True):
                    where = (
                        f"n{n}-{'lower' if lower else 'upper'}-{trans}{'-unit' if unit else ''}"
                        f"-a{len(a_batch)}b{len(b_batch)}-inc{inc}"
                    )

                    def trsv(a, b, n=n, lower=lower, trans=trans, unit=unit, inc=inc):
                        m = op(triangle(a, lower, unit), trans)
                        x = np.linalg.solve(m, stepped(b, n, inc)[..., None])[..., 0]
                        out = placed(b, x, inc)
                        return [
                            (out, placed(np.zeros(out.shape), np.abs(x) + np.abs(x).max(), inc))
                        ]

                    cases.append(
                        Case(
                            f"trsv-{where}",
                            FULL,
                            ((*a_batch, n, n), (*b_batch, (n - 1) * inc + 1)),
                            lambda a, b, lower=lower, trans=trans, unit=unit, inc=inc, **kw: (
                                blas.trsv(
                                    a,
                                    b,
                                    lower=lower,
                                    trans=trans,
                                    unit_diagonal=unit,
                                    increment=inc,
                                    **kw,
                                )
                            ),
                            trsv,
                            n,
                            (0,),
                        )
                    )
                    if inc != 1:
                        continue
                    for side in ("left", "right"):
                        b_shape = (n, 5) if side == "left" else (4, n)

                        def trsm(a, b, lower=lower, trans=trans, unit=unit, side=side):
                            m = op(triangle(a, lower, unit), trans)
                            if side == "left":
                                x = np.linalg.solve(m, 1.5 * b)
                            else:
                                x = np.swapaxes(
                                    np.linalg.solve(
                                        np.swapaxes(m, -1, -2), 1.5 * np.swapaxes(b, -1, -2)
                                    ),
                                    -1,
                                    -2,
                                )
                            return [(x, np.abs(x) + np.abs(x).max())]

                        cases.append(
                            Case(
                                f"trsm-{side}-{where}",
                                FULL,
                                ((*a_batch, n, n), (*b_batch, *b_shape)),
                                lambda a, b, lower=lower, trans=trans, unit=unit, side=side, **kw: (
                                    blas.trsm(
                                        a,
                                        b,
                                        alpha=1.5,
                                        side=side,
                                        lower=lower,
                                        trans=trans,
                                        unit_diagonal=unit,
                                        **kw,
                                    )
                                ),
                                trsm,
                                n,
                                (0,),
                            )
                        )
    return cases


def _gemm() -> list[Case]:
    cases = []
    for m, n, k, a_batch, b_batch, c_batch in (
        (1, 1, 1, (), (), ()),
        (5, 4, 3, (), (), ()),
        (33, 17, 70, (), (), None),
        (6, 5, 9, (3,), (3,), (3,)),
        (6, 5, 9, (3,), (), None),
        (6, 5, 9, (), (2, 3), ()),
    ):
        for trans_a in "NTC":
            for trans_b in "NTC":
                a = (*a_batch, *((m, k) if trans_a == "N" else (k, m)))
                b = (*b_batch, *((k, n) if trans_b == "N" else (n, k)))
                shapes = (a, b) if c_batch is None else (a, b, (*c_batch, m, n))

                def reference(a, b, c=None, trans_a=trans_a, trans_b=trans_b):
                    a, b = op(a, trans_a), op(b, trans_b)
                    out, size = 0.75 * (a @ b), 0.75 * (np.abs(a) @ np.abs(b))
                    if c is None:
                        return [(out, size)]
                    return [(out - 2 * c, size + 2 * np.abs(c))]

                cases.append(
                    Case(
                        f"gemm-{m}x{n}x{k}-{trans_a}{trans_b}-a{len(a_batch)}b{len(b_batch)}"
                        + ("" if c_batch is None else f"c{len(c_batch)}"),
                        ALL,
                        shapes,
                        lambda a, b, c=None, trans_a=trans_a, trans_b=trans_b, **kw: blas.gemm(
                            a, b, c, alpha=0.75, beta=-2, trans_a=trans_a, trans_b=trans_b, **kw
                        ),
                        reference,
                        k,
                    )
                )
    return cases


CASES = [*_level1(), *_level2(), *_solves(), *_gemm()]
ROUTINES = tuple(dict.fromkeys(case.routine for case in CASES))


def run_all(routine: str, dtype: str, start: int = 0, step: int = 1, **kw) -> None:
    """Runs the cases of a routine in one program, inputs being arguments, and checks them.

    Args:
      routine: the first word of their labels.
      dtype: of the arrays.
      start: the first case to run.
      step: runs every step-th from there.
      **kw: of the calls.
    """
    cases = [case for case in CASES if case.routine == routine and dtype in case.dtypes]
    cases = cases[start::step]
    arrays = [case.arrays(dtype, seed) for seed, case in enumerate(cases)]

    @jax.jit
    def program(arrays):
        return [case.run(*each, **kw) for case, each in zip(cases, arrays, strict=True)]

    tf32 = kw.get("options", blas.Options()).math == "tf32"
    for case, results, each in zip(cases, program(arrays), arrays, strict=True):
        check(case, dtype, results, each, tf32=tf32)
