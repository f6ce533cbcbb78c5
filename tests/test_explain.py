"""explain: every call found, wherever it is, and described as it will run."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import jax_tcgemm

X = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)


def test_a_call_is_described_in_full(fake_cuda):
    fake_cuda.rejects["wgmma"] = "needs sm_90a"
    report = jax_tcgemm.explain(
        lambda a, b: jax_tcgemm.matmul(a, b, preferred_element_type=jnp.float32),
        jax.ShapeDtypeStruct((4096, 8192), jnp.bfloat16),
        jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16),
        platform="cuda",
    )
    (call,) = report
    problem = call.problem
    assert (problem.m, problem.n, problem.k, problem.layout) == (4096, 2048, 8192, "NN")
    assert (call.implementation, call.config) == ("cublaslt", "small")
    assert call.rejected == {"wgmma": "needs sm_90a"}
    assert call.flops == 2 * 4096 * 2048 * 8192
    assert call.bytes == 2 * (4096 + 2048) * 8192 + 4 * 4096 * 2048
    assert call.roofline_us == pytest.approx(call.flops / 989.4e12 * 1e6)
    assert (call.times, call.path, call.copies) == (1, (), ())
    assert "test_explain.py" in call.source
    text = str(report)
    for part in ("4096x2048x8192 NN bf16->f32 (f32)", "cublaslt/small", "needs sm_90a", "H200"):
        assert part in text


def test_calls_have_estimated_times():
    """Of the kernel with an epilogue, and of XLA's product and loop, as numbers and in `why`."""
    x, w, bias = (
        jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2048, 4096), (4096, 1024), (1024,))
    )

    def layer(x, w, bias):
        return jax.nn.relu(x @ w + bias)

    (fused,) = jax_tcgemm.explain(jax_tcgemm.accelerate(layer), x, w, bias, platform="cuda")
    (bare,) = jax_tcgemm.explain(jax_tcgemm.matmul, x, w, platform="cuda")
    if fused.implementation != "wgmma":
        pytest.skip("the GPU here has no wgmma")
    assert fused.epilogue == ("add", "relu")
    assert f"predicts {fused.estimated_us:.4g} us" in fused.why
    assert bare.roofline_us < bare.estimated_us <= bare.xla_estimated_us
    # XLA reads its product again and writes the result: 8 MB at 4.4 TB/s, or slower.
    loop_us = fused.xla_estimated_us - bare.xla_estimated_us
    assert 8 * 2**20 / 4.8e6 < loop_us < 10
    assert f"and {loop_us:.4g} us for its function" in fused.why
    assert fused.as_dict()["epilogue"] == ["add", "relu"]


def test_a_product_of_xla_has_its_estimate():
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2048, 16, 64), (2048, 16, 64)))
    scores = jax_tcgemm.accelerate(lambda x, w: jnp.einsum("thd,shd->hts", x, w))
    (call,) = jax_tcgemm.explain(scores, x, w, platform="cuda")
    assert (call.implementation, call.epilogue) == ("xla", ())
    assert call.roofline_us < call.estimated_us == call.xla_estimated_us


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_calls_without_estimate_have_none(platform):
    """Nothing is known of CPUs, and of float64 on GPUs."""
    x = X.update(dtype=jnp.float32 if platform == "cpu" else jnp.float64)
    with jax.enable_x64(True):
        (call,) = jax_tcgemm.explain(jax_tcgemm.matmul, x, x, platform=platform)
    assert (call.estimated_us, call.xla_estimated_us) == (None, None)


def test_an_unfused_epilogue_is_named():
    accelerated = jax_tcgemm.accelerate(lambda x, w: jnp.tanh(x @ w))
    (call,) = jax_tcgemm.explain(accelerated, X, X, platform="cpu")
    assert "its product" in call.why
    assert call.epilogue == ("tanh",)


def test_memory_bound_calls_have_the_time_of_their_bytes(fake_cuda):
    row = jax.ShapeDtypeStruct((1, 4096), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    (call,) = jax_tcgemm.explain(jax_tcgemm.matmul, row, weights, platform="cuda")
    assert call.roofline_us == pytest.approx(call.bytes / 4.8e12 * 1e6)


def test_calls_are_found_in_every_nesting():
    mm = jax_tcgemm.matmul

    @jax.custom_vjp
    def custom(x):
        return mm(x, x)

    custom.defvjp(lambda x: (custom(x), None), lambda _, g: (g,))
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    sharded = jax.shard_map(
        lambda x: mm(x, x), mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()
    )

    def f(x):
        x = jax.jit(lambda x: mm(x, x))(x)
        x = jax.checkpoint(lambda x: mm(x, x))(x)
        x = custom(x)
        x = sharded(x)
        x, _ = lax.scan(
            lambda x, _: (lax.scan(lambda x, _: (mm(x, x), None), x, length=3)[0], None),
            x,
            length=5,
        )
        x = lax.while_loop(lambda x: mm(x, x)[0, 0] < 0, lambda x: mm(x, x), x)
        return lax.cond(x[0, 0] > 0, lambda x: mm(x, x), lambda x: x, x)

    report = jax_tcgemm.explain(f, X, platform="cpu")
    assert [(call.times, " ".join(call.path)) for call in report] == [
        (1, ""),
        (1, ""),
        (1, ""),
        (1, "shard_map"),
        (15, "scan[5] scan[3]"),
        (None, "while.cond"),
        (None, "while.body"),
        (None, "cond[1]"),
    ]
    assert "15 scan[5] scan[3]" in str(report)


def num_calls(lowered: str) -> int:
    """How many calls of ours a program has, those of a function as often as it is called."""
    functions = re.split(r"func\.func (?:public|private) @", lowered)[1:]
    bodies = {re.match(r'"[^"]*"|[\w.]+', text)[0]: text for text in functions}

    @functools.cache
    def number_in(name):
        called = re.findall(r'\bcall @("[^"]*"|[\w.]+)', bodies[name])
        return bodies[name].count("custom_call @tcgemm_") + sum(map(number_in, called))

    return number_in("main")


mm = functools.partial(jax_tcgemm.matmul, implementation="host")


@jax.custom_jvp
def with_jvp(x):
    return mm(x, x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), mm(primals[0], tangents[0])))


@jax.custom_vjp
def with_vjp(x):
    return mm(x, x)


with_vjp.defvjp(lambda x: (mm(x, x), x), lambda x, g: (mm(g, x),))


def solution(x):
    return lax.custom_linear_solve(
        lambda v: mm(x, v),
        jnp.ones_like(x),
        lambda matvec, b: mm(mm(x, x), b),
        transpose_solve=lambda vecmat, b: mm(x.T, b),
    )


def root(x):
    return lax.custom_root(
        lambda v: mm(x, v) - 1,
        jnp.ones_like(x),
        lambda f, guess: f(guess) + mm(x, guess),
        lambda g, y: mm(x, y),
    )


NESTED = {
    "jit": lambda x: jax.jit(lambda x: (mm(x, x), mm(x, x.T)))(jax.jit(mm)(x, x))[0],
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "checkpoint": jax.checkpoint(lambda x: jnp.tanh(mm(x, x))),
    "custom_linear_solve": solution,
    "vmap": lambda x: jax.vmap(lambda x: solution(x))(jnp.stack([x, x])),
    "custom_root": root,
    "cond": lambda x: lax.cond(x[0, 0] > 0, lambda x: mm(x, x), lambda x: mm(x, mm(x, x)), x),
    "switch": lambda x: lax.switch(jnp.int32(x[0, 0]), [with_vjp, with_jvp, jnp.sin], x),
    "while": lambda x: lax.fori_loop(0, 3, lambda _, y: mm(y, x), x),
    "scan": lambda x: lax.scan(lambda y, _: (mm(y, x), mm(x, y)), x, length=3)[0],
    "scan of checkpoint": lambda x: lax.scan(
        jax.checkpoint(lambda y, _: (jnp.tanh(mm(y, x)), None)), x, length=3
    )[0],
    "platform": lambda x: lax.platform_dependent(
        x, cpu=lambda x: mm(x, x), default=lambda x: mm(x, mm(x, x))
    ),
    "unused": lambda x: (mm(x, x), jnp.sin(x))[1],
}


@pytest.mark.parametrize("f", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("is_gradient", [False, True], ids=["value", "gradient"])
def test_as_many_calls_as_the_program_has(f, is_gradient):
    g = jax.grad(lambda x: f(x).sum()) if is_gradient else f
    x = jnp.ones((16, 16))
    expected = num_calls(jax.jit(g).lower(x).as_text())
    assert len(jax_tcgemm.explain(g, x, platform="cpu")) == expected


def test_a_linear_call_runs_one_of_its_functions():
    def f(x):
        return jax.custom_derivatives.linear_call(
            lambda r, y: mm(r, y), lambda r, y: mm(r.T, y), x, x
        )

    assert len(jax_tcgemm.explain(f, jnp.ones((16, 16)), platform="cpu")) == 1


def test_programs_that_keep_what_no_result_needs():
    """JAX removes no equations under `keep_unused` and for symbolic shapes."""
    x = jnp.ones((16, 16))
    kept = jax.jit(lambda x: (mm(x, x), jnp.sin(x))[1], keep_unused=True)
    assert num_calls(kept.lower(x).as_text()) == 1
    assert len(jax_tcgemm.explain(kept, x, platform="cpu")) == 1

    (rows,) = jax.export.symbolic_shape("rows")
    shape = jax.ShapeDtypeStruct((rows, 16), jnp.float32)
    symbolic = jax.jit(lambda y: (jax_tcgemm.matmul(y, x), jnp.sin(y))[1])
    assert symbolic.lower(shape).as_text().count("dot_general") == 1
    assert len(jax_tcgemm.explain(symbolic, shape, platform="cpu")) == 1


def test_a_platform_without_branch_is_named():
    def f(x):
        return lax.platform_dependent(x, cuda=lambda x: mm(x, x), tpu=lambda x: mm(x, x.T))

    with pytest.raises(ValueError, match="must have a branch for cpu, got branches for cuda, tpu"):
        jax_tcgemm.explain(f, jnp.ones((16, 16)), platform="cpu")


def test_gradients_need_no_copy():
    def loss(x, w1, w2):
        return jnp.sum(jax_tcgemm.matmul(jnp.tanh(jax_tcgemm.matmul(x, w1)), w2))

    report = jax_tcgemm.explain(jax.grad(loss, (0, 1, 2)), X, X, X, platform="cpu")
    # In the order of the program: forward without the loss, then weights before inputs.
    layouts = [call.problem.layout for call in report]
    assert layouts == ["NN", "TN", "NT", "TN", "NT"]
    assert all(call.copies == () for call in report)


def test_copies_are_said():
    def f(a, b):
        numbers = (((0, 2), (0, 1)), ((), ()))
        return jax_tcgemm.dot_general(a, b, numbers, implementation="host")

    a, b = jnp.ones((30, 500, 40)), jnp.ones((30, 40, 60))
    report = jax_tcgemm.explain(f, a, b, platform="cpu")
    assert "copy: lhs permuted" in str(report)
    (call,) = report
    assert call.copies == ("lhs permuted to (1, 0, 2) (4.8 MB)",)


def test_conversions_are_said():
    def f(a, b):
        return jax_tcgemm.matmul(a, b, implementation="host")

    (call,) = jax_tcgemm.explain(f, X, X.update(dtype=jnp.float32), platform="cpu")
    assert call.copies == ("lhs converted to float32 (0.0246 MB)",)
    int8 = X.update(dtype=jnp.int8)
    (call,) = jax_tcgemm.explain(f, int8, int8, platform="cpu")
    assert call.copies == ("result converted to int8 (0.0205 MB)",)


def test_what_only_xla_runs_says_why():
    (call,) = jax_tcgemm.explain(jax_tcgemm.matmul, *[X.update(dtype=jnp.int32)] * 2)
    assert (call.implementation, call.problem) == ("xla", None)
    assert "int32" in call.why


def test_a_function_without_calls():
    report = jax_tcgemm.explain(jnp.matmul, X, X)
    assert len(report) == 0
    assert "No product" in str(report)


def test_refuses_other_platforms_and_impossible_calls():
    with pytest.raises(ValueError, match="explain: platform must be cuda or cpu, got"):
        jax_tcgemm.explain(jax_tcgemm.matmul, X, X, platform="tpu")
    with pytest.raises(ValueError, match="it runs on cuda, not on cpu"):
        jax_tcgemm.explain(
            lambda x: jax_tcgemm.matmul(x, x, implementation="wgmma"), X, platform="cpu"
        )
