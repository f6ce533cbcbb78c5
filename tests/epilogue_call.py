"""Products with what follows them in a layer, and their results by JAX in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.device.dense import product as dense
from jax_tcgemm.device.fusion import epilogue, fused
from jax_tcgemm.problem.activations import ACTIVATIONS
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPES, wide_dtype
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.problem.layers import activated, gate_and_up, pull_back
from jax_tcgemm.selection.devices import ASSUMED_GPU

# Relative rounding of a result, and of a sum of products relative to the sum of their magnitudes.
ROUNDING = {"bf16": 2**-8, "f16": 2**-11, "f32": 2**-23, "f64": 2**-52}
# What the smallest numbers of a type are off by: f16 has few of them.
_SMALLEST = {"bf16": 1e-30, "f16": 2**-24, "f32": 1e-30, "f64": 1e-30}
_SUMMING = {"f32": 2e-6, "tf32": 2e-6, "f64": 1e-14}
_EVALUATING = {"f32": 5e-6, "tf32": 5e-6, "f64": 1e-12}
# What JAX's gelu loses in 1 + tanh(...), relative to its operand: found up to 2.5 roundings between
# -12 and 12 where SciPy's expit, which does not cancel, is the truth.
_CANCELLED = {"f32": 2**-21, "tf32": 2**-21, "f64": 2**-50}


@functools.partial(jax.jit, static_argnames="name")
def _value_and_slope(name, x):
    value, pull = jax.vjp(ACTIVATIONS[name], x)
    return value, pull(jnp.ones_like(x))[0]


def evaluate(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An activation and its derivative, by JAX in float64.

    At as many points as a power of two, so that few programs are compiled for many shapes.
    """
    points = np.zeros(1 << max(10, (x.size - 1).bit_length()))
    points[: x.size] = x.ravel()
    return tuple(np.asarray(y)[: x.size].reshape(x.shape) for y in _value_and_slope(name, points))


@dataclasses.dataclass(frozen=True)
class Fused:
    """A product with an epilogue; `types` is "<inputs> [<result>]" or "tf32"."""

    m: int = 40
    n: int = 72
    k: int = 64
    types: str = "bf16"
    layout: str = "NN"
    batch: tuple[int, int] = (1, 1)
    activation: str = "none"
    derivative: bool = False
    gated: bool = False
    pair: bool = False  # The second B is an operand of its own.
    bias: str = "none"
    bias_f32: bool = False
    bias_per_batch: bool = False
    aux_out: bool = False
    column_sums: bool = False
    alpha: float = 1.0
    beta: float = 0.0

    @property
    def in_dtype(self) -> str:
        inputs = self.types.split()[0]
        return "f32" if inputs == "tf32" else inputs

    @property
    def out_dtype(self) -> str:
        out = self.types.split()[-1]
        return "f32" if out == "tf32" else out

    @property
    def compute(self) -> str:
        return self.types if self.types in ("tf32", "f64") else "f32"

    @property
    def num_batch(self) -> int:
        return self.batch[0] * self.batch[1]

    @property
    def num_b(self) -> int:
        return 2 if self.gated and not self.derivative else 1

    @property
    def packed(self) -> bool:
        """Whether one array has both matrices B."""
        return self.num_b == 2 and not self.pair

    @property
    def bias_dtype(self) -> str:
        if self.bias == "none":
            return ""
        return "f32" if self.bias_f32 and self.compute != "f64" else self.out_dtype

    @property
    def problem(self) -> Problem:
        return self.folded.problem

    @property
    def d_shape(self) -> tuple[int, ...]:
        gate_and_up = (2,) if self.gated and self.derivative else ()
        return (self.num_batch, self.m, *gate_and_up, self.n)

    @property
    def saved_shape(self) -> tuple[int, ...]:
        """Of Z, or of what a derivative has in its place."""
        return (self.num_batch, self.m, *((2,) if self.gated else ()), self.n)

    def draw(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Normally distributed operands; Z is of order 1. Numbers that TF32 holds exactly."""

        def normal(shape, dtype, scale=1.0):
            values = rng.standard_normal(shape) * scale
            if self.types == "tf32":
                values = values.astype(jnp.bfloat16)
            return values.astype(DTYPES[dtype])

        batch, (a_layout, b_layout) = self.num_batch, self.layout
        a_shape = (self.k, self.m) if a_layout == "T" else (self.m, self.k)
        b_shape = (self.n, self.k) if b_layout == "T" else (self.k, self.n)
        scale = max(self.k, 1) ** -0.5
        arrays = {"a": normal((batch, *a_shape), self.in_dtype)}
        b = [normal((batch, *b_shape), self.in_dtype, scale) for _ in range(self.num_b)]
        if self.packed:
            arrays["b"] = np.stack(b, axis=1 if b_layout == "T" else 2)
        else:
            arrays |= dict(zip(("b", "b_up"), b, strict=False))
        if self.beta:
            arrays["c"] = normal(self.d_shape, self.out_dtype)
        if self.bias != "none":
            size = self.m if self.bias == "m" else self.n * self.num_b
            batches = batch if self.bias_per_batch else 1
            arrays["bias"] = normal((batches, size), self.bias_dtype)
        if self.derivative:
            arrays["aux_in"] = normal(self.saved_shape, self.out_dtype, 2.0)
        return arrays

    def call(self, arrays: dict, choice):
        """All results, as a tuple."""
        plan = fused.Plan(self.product, self.folded, choice)
        return tuple(plan.run(*self.given(arrays)))

    @property
    def operands(self) -> dict[str, tuple]:
        """Name, shape and dtype of each operand of the function, in their order."""
        batch, out, found = self.num_batch, DTYPES[self.out_dtype], {}
        if self.bias != "none":
            gate_and_up = (2,) * (self.num_b == 2)
            shape = (self.m,) if self.bias == "m" else (*gate_and_up, self.n)
            shape = (batch, *shape) if self.bias_per_batch else shape
            found["bias"] = shape, DTYPES[self.bias_dtype]
        if self.derivative:
            found["aux_in"] = self.saved_shape, out
        if self.beta:
            found["residual"] = self.d_shape, out
        return found

    def given(self, arrays: dict) -> list:
        """The operands of the call, those of its function last."""
        found = [arrays[name] for name in ("a", "b", "b_up") if name in arrays]
        own = dict(arrays)
        if self.beta:
            own["residual"] = (self.beta * arrays["c"]).astype(arrays["c"].dtype)
        return found + [own[name].reshape(shape) for name, (shape, _) in self.operands.items()]

    def apply(self, *arguments) -> list:
        """What follows the product: of the accumulators and the operands."""
        accs, operands = arguments[: self.num_b], arguments[self.num_b :]
        given = dict(zip(self.operands, operands, strict=True))
        out, accumulated = DTYPES[self.out_dtype], accs[0].dtype
        zs = [self.alpha * acc if self.alpha != 1 else acc for acc in accs]
        if "bias" in given:
            bias = given["bias"].astype(accumulated)
            if self.bias == "m":
                biases = [bias[..., None]] * self.num_b
            elif self.num_b == 2:
                biases = [bias[..., None, half, :] for half in range(2)]
            else:
                biases = [bias[..., None, :]]
            zs = [z + b for z, b in zip(zs, biases, strict=True)]
        if self.derivative:
            saved = given["aux_in"].astype(accumulated)
            ds = pull_back(self.activation, gate_and_up(saved, 2) if self.gated else [saved], *zs)
        else:
            ds = [activated(self.activation, zs)]
        if self.beta:
            residual = given["residual"].astype(accumulated)
            added = [residual] if len(ds) == 1 else gate_and_up(residual, 2)
            ds = [d + x for d, x in zip(ds, added, strict=True)]
        ds = [d.astype(out) for d in ds]
        results = [ds]
        if self.aux_out:
            results.append([z.astype(out) for z in zs])
        results = [xs[0] if len(xs) == 1 else jnp.stack(xs, 2) for xs in results]
        if self.column_sums:
            results += [jnp.sum(d.astype(accumulated), 1) for d in ds]
        return results

    @functools.cached_property
    def function(self):
        """What follows the product, as a jaxpr."""
        acc = jax.ShapeDtypeStruct((self.num_batch, self.m, self.n), self.product_dtype)
        operands = [jax.ShapeDtypeStruct(*x) for x in self.operands.values()]
        return jax.make_jaxpr(self.apply)(*[acc] * self.num_b, *operands)

    @property
    def product_dtype(self) -> np.dtype:
        """In which the product accumulates."""
        return np.dtype(wide_dtype(DTYPES[self.out_dtype]))

    @functools.cached_property
    def product(self) -> epilogue.Product:
        """What a call of the primitive says: of arrays as they are drawn."""
        batch, (a_layout, b_layout) = self.num_batch, self.layout
        a = (batch, self.k, self.m) if a_layout == "T" else (batch, self.m, self.k)
        columns = (2, self.n) if self.packed else (self.n,)
        b = (batch, *columns, self.k) if b_layout == "T" else (batch, self.k, *columns)
        contracted = (1 if a_layout == "T" else 2,), (len(b) - 1 if b_layout == "T" else 1,)
        bare = dense.Product(
            options=CallOptions("test"),
            lhs_shape=a,
            lhs_dtype=DTYPES[self.in_dtype],
            rhs_shape=b,
            rhs_dtype=DTYPES[self.in_dtype],
            result_shape=(batch, self.m, *columns),
            result_dtype=self.product_dtype,
            dimension_numbers=(contracted, ((0,), (0,))),
            permutation=tuple(range(2 + len(columns))),
            precision="TF32_TF32_F32" if self.types == "tf32" else None,
        )
        names = list(self.operands)
        return epilogue.Product(
            bare,
            self.function,
            tuple(shape for shape, _ in self.operands.values()),
            num_rhs=2 if self.pair else 1,
            pair=2 if self.packed else None,
            in_place=next((names.index(x) for x in ("residual", "aux_in") if x in names), None),
        )

    @functools.cached_property
    def folded(self):
        """The problem, with what else a plan has of it."""
        found = self.product.folded(ASSUMED_GPU)
        assert not isinstance(found, str), found
        return found

    def run(self, arrays: dict[str, np.ndarray], choice) -> list[np.ndarray]:
        """All results in float64."""
        program = jax.jit(functools.partial(self.call, choice=choice))
        return [wide(x) for x in jax.device_get(program(arrays))]

    def parts(self, arrays) -> dict[str, np.ndarray]:
        """Z (and Z_up), the magnitudes that went into them, and the saved ones, in float64."""
        a_layout, b_layout = self.layout
        a = wide(arrays["a"])
        a = a.swapaxes(1, 2) if a_layout == "T" else a
        if self.packed:
            axis = 1 if b_layout == "T" else 2
            matrices = [wide(arrays["b"].take(i, axis)) for i in range(2)]
        else:
            matrices = [wide(arrays[name]) for name in ("b", "b_up") if name in arrays]
        found = {}
        for i, (name, b) in enumerate(zip(("z", "up"), matrices, strict=False)):
            b = b.swapaxes(1, 2) if b_layout == "T" else b
            bias = 0.0
            if self.bias == "n":
                bias = wide(arrays["bias"])[:, None, i * self.n : (i + 1) * self.n]
            elif self.bias == "m":
                bias = wide(arrays["bias"])[:, :, None]
            found[name] = self.alpha * (a @ b) + bias
            found[name + " size"] = abs(self.alpha) * (np.abs(a) @ np.abs(b)) + np.abs(bias)
        if self.derivative:
            saved = wide(arrays["aux_in"])
            found["saved"] = saved[:, :, 0] if self.gated else saved
            if self.gated:
                found["saved up"] = saved[:, :, 1]
        return found

    def expected(self, arrays, parts=None) -> list[np.ndarray]:
        """D and aux_out, in float64; from `parts` where those are there already."""
        parts = self.parts(arrays) if parts is None else parts
        z = parts["z"]
        if self.derivative:
            value, slope = evaluate(self.activation, parts["saved"])
            d = np.stack([parts["saved up"] * z * slope, value * z], 2) if self.gated else z * slope
        else:
            d = evaluate(self.activation, z)[0]
            d = d * parts["up"] if self.gated else d
        if self.beta:
            d = d + self.beta * wide(arrays["c"])
        if not self.aux_out:
            return [d]
        return [d, np.stack([z, parts["up"]], axis=2) if self.gated else z]

    def check(self, arrays, choice) -> None:
        """Asserts that a run gives what is expected."""
        self.compare(self.run(arrays, choice), arrays)

    def compare(self, got: list[np.ndarray], arrays) -> None:
        """Asserts that results are what is expected."""
        got = list(got)
        if self.column_sums:
            # Of D as stored, so that its own rounding plays no part.
            d, sums = got[0], got.pop()
            if self.derivative and self.gated:
                sums = np.stack([got.pop(), sums], 1)
            assert sums.shape == (d.shape[0], *d.shape[2:])
            limit = (2e-6 if self.compute != "f64" else 1e-14) * np.abs(d).sum(1)
            np.testing.assert_array_less(np.abs(sums - d.sum(1)), limit + 1e-30)
        parts = self.parts(arrays)
        expected = self.expected(arrays, parts)
        limits = tolerance(self, arrays, parts, expected)
        for name, x, want, limit in zip(("d", "aux_out"), got, expected, limits, strict=False):
            assert x.shape == want.shape, name
            excess = np.abs(x - want) - limit
            if x.size and not (excess <= 0).all():
                worst = np.unravel_index(
                    np.nanargmax(np.where(np.isnan(x), np.inf, excess)), x.shape
                )
                raise AssertionError(
                    f"{self.problem}: {name} has {int((~(excess <= 0)).sum())} wrong of {x.size}; "
                    f"the worst is {worst}: got {x[worst]}, expected {want[worst]}, "
                    f"within {limit[worst]}"
                )


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def tolerance(case: Fused, arrays, parts=None, expected=None) -> list[np.ndarray]:
    """The largest error of each element of D and aux_out.

    The rounding of the result, what the error of a sum becomes by the activation's slope, and the
    evaluation of the activation.
    """
    parts = case.parts(arrays) if parts is None else parts
    expected = case.expected(arrays, parts) if expected is None else expected
    tables = _SUMMING, _EVALUATING, _CANCELLED
    summing, evaluating, cancelled = (table[case.compute] for table in tables)
    z, z_error = np.abs(parts["z"]), summing * parts["z size"]
    if case.derivative:
        saved = parts["saved"]
        value, slope = evaluate(case.activation, saved)
        slope = np.abs(slope) + evaluating * (1 + np.abs(saved))
        error = slope * z_error + evaluating * (1 + np.abs(saved)) * z
        if case.gated:
            second = np.abs(value) * (z_error + evaluating * z) + cancelled * np.abs(saved) * z
            error = np.stack([np.abs(parts["saved up"]) * error, second], axis=2)
    else:
        slope = 2 * z + 1 if case.activation == "relu2" else 1.2
        value = np.abs(evaluate(case.activation, parts["z"])[0])
        error = slope * z_error + evaluating * value * (1 + z) + cancelled * z
        if case.gated:
            error = np.abs(parts["up"]) * error + value * summing * parts["up size"]
    if case.beta:
        error = error + summing * np.abs(case.beta * wide(arrays["c"]))
    sizes = [error]
    if case.aux_out:
        up_error = summing * parts["up size"] if case.gated else None
        sizes.append(np.stack([z_error, up_error], axis=2) if case.gated else z_error)
    return [
        error + ROUNDING[case.out_dtype] * np.abs(want) + _SMALLEST[case.out_dtype]
        for error, want in zip(sizes, expected, strict=True)
    ]


FORMS = {
    "bias": Fused(bias="n"),
    "bias_aux": Fused(bias="n", aux_out=True),
    "bias_of_rows": Fused(bias="m", activation="tanh"),
    "bias_f32": Fused(bias="n", bias_f32=True, activation="sigmoid"),
    "gelu": Fused(activation="gelu_tanh", bias="n"),
    "gelu_aux": Fused(activation="gelu_tanh", bias="n", aux_out=True),
    "gelu_bare": Fused(activation="gelu_tanh"),
    "relu": Fused(activation="relu", bias="n"),
    "silu_residual": Fused(activation="silu", beta=0.5),
    "alpha_relu2_aux": Fused(activation="relu2", bias="n", alpha=0.5, aux_out=True),
    "residual": Fused(bias="n", beta=1.0),
    "dgelu": Fused(activation="gelu_tanh", derivative=True),
    "dgelu_erf": Fused(activation="gelu_erf", derivative=True),
    "dsilu_sums": Fused(activation="silu", derivative=True, column_sums=True, alpha=2.0),
    "drelu_residual": Fused(activation="relu", derivative=True, beta=1.0, bias="n"),
    "sums": Fused(column_sums=True),
    "gated": Fused(activation="silu", gated=True),
    "gated_pair": Fused(activation="gelu_erf", gated=True, pair=True, bias="n"),
    "gated_all": Fused(activation="silu", gated=True, bias="n", aux_out=True, beta=-1.0),
    "gated_sums": Fused(activation="none", gated=True, column_sums=True),
    "dgated": Fused(activation="silu", gated=True, derivative=True),
    "dgated_sums": Fused(
        activation="gelu_tanh", gated=True, derivative=True, column_sums=True, beta=1.0
    ),
}

# --- activations by themselves ------------------------------------------------------------------

_POINTS = np.array([*np.linspace(-12, 12, 2401), -0.0, 1e-6, -1e-6, 80.0, -80.0, 250.0, -250.0])


def _pointwise(choose, activation: str, types: str, x: np.ndarray, derivative: bool):
    """The activation of each x, or its derivative, as the epilogue of a product that is 0.

    The argument, or what the derivative is multiplied by, comes as the bias: as an operand TF32
    would round it.
    """
    layer = {"activation": activation, "derivative": derivative, "bias": "m"}
    case = Fused(x.size, 1, 1, types=types, **layer)
    x = x.astype(DTYPES[case.out_dtype])[None]
    arrays = {"a": np.zeros_like(x)[:, :, None], "b": np.ones((1, 1, 1), x.dtype), "bias": x}
    if derivative:
        arrays |= {"bias": np.ones_like(x), "aux_in": x[:, :, None]}
    return case.run(arrays, choose(case.problem))[0].ravel()


def check_activation(choose, activation: str, types: str, rtol: float, atol: float) -> None:
    """Asserts that an activation and its derivative are JAX's, between -12 and 12 and far out.

    Errors are relative, and absolute where the value is a difference of numbers near 1. `choose`
    makes the choice for a problem.
    """
    dtype = Fused(types=types).out_dtype
    x = _POINTS.astype(DTYPES[dtype]).astype(np.float64)
    atol += _SMALLEST[dtype]
    for derivative, expected in enumerate(evaluate(activation, x)):
        got = _pointwise(choose, activation, types, x, bool(derivative))
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)


def check_limits(choose, activation: str, types: str) -> None:
    """Asserts what an activation and its derivative make of huge numbers, infinities and NaN."""
    huge = np.array([1e19, -1e19, 3e38, -3e38], np.float32)
    # Those of float32: the derivative of gelu is the product of 0 and infinity there.
    for derivative, expected in enumerate(_value_and_slope(activation, jnp.asarray(huge))):
        got = _pointwise(choose, activation, types, huge, bool(derivative))
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    special = np.array([np.inf, -np.inf, np.nan], np.float32)
    expected = np.asarray(ACTIVATIONS[activation](jnp.asarray(special)))
    got = _pointwise(choose, activation, types, special, False)
    np.testing.assert_array_equal(got, expected)
