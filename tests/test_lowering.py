"""What a program becomes, lowered for the host's platform and, on any machine, for CUDA."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.gemm_call import split_base
from jax import lax

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.device.dense import call as dense_call
from jax_tcgemm.primitives import lowering
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.gemm import Operand, Problem

NT = (((1,), (1,)), ((), ()))
TN = (((0,), (0,)), ((), ()))
TT = (((0,), (1,)), ((), ()))
NN = (((1,), (0,)), ((), ()))


def lower(f, *args, platform="cuda"):
    return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def attributes(text):
    """The gemm attribute of the only custom call."""
    (gemm,) = re.findall(r"gemm = \{([^}]*)\}", text)
    found = {}
    for name, value in re.findall(r'(\w+) = ("[^"]*"|dense<.*?>|[^,: ]+)', gemm):
        if value.startswith('"'):
            found[name] = value.strip('"')
        elif value.startswith("dense<"):
            found[name] = json.loads(value[len("dense<") : -1] or "[]")
        elif value in ("true", "false"):
            found[name] = value == "true"
        else:
            found[name] = float(value) if "." in value else int(value)
    return found


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_attributes_of_the_custom_call(fake_cuda):
    text, empty = lower(jax_tcgemm.matmul, struct(128, 256), struct(256, 64)), []
    assert "custom_call @tcgemm_gemm" in text
    assert attributes(text) == {
        "abi": 1,
        "implementation": "wgmma",
        "config": "small",
        "compute": "f32",
        "batch": 1,
        "batch_inner": 1,
        "m": 128,
        "n": 64,
        "k": 256,
        "a_transposed": False,
        "b_transposed": False,
        "a_ld": 256,
        "a_outer_stride": 0,
        "a_inner_stride": 0,
        "b_ld": 64,
        "b_outer_stride": 0,
        "b_inner_stride": 0,
        "alpha": 1.0,
        "beta": 0.0,
        "scales": empty,
        "symmetric": False,
        "gated": False,
        "up_offset": 0,
        "function": "",
        "function_library": "none",
        **dict.fromkeys(("function_reads", "function_indices", "function_results"), empty),
    }


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("numbers", "lhs", "rhs", "flags"),
    [
        (NN, (128, 256), (256, 64), (False, False)),
        (NT, (128, 256), (64, 256), (False, True)),
        (TN, (256, 128), (256, 64), (True, False)),
        (TT, (256, 128), (64, 256), (True, True)),
    ],
    ids=["NN", "NT", "TN", "TT"],
)
def test_layouts_are_data(numbers, lhs, rhs, flags, platform, fake_cuda):
    implementation = {"cuda": "mma_sync", "cpu": "host"}[platform]

    def f(a, b):
        return jax_tcgemm.dot_general(a, b, numbers, implementation=implementation)

    text = lower(f, struct(*lhs), struct(*rhs), platform=platform)
    assert "transpose " not in text
    assert "dot_general" not in text
    found = attributes(text)
    assert (found["a_transposed"], found["b_transposed"]) == flags
    assert (found["m"], found["n"], found["k"]) == (128, 64, 256)


def test_attention_is_two_custom_calls_and_nothing_moved(fake_cuda):
    def attention(q, k, v):
        scores = jax_tcgemm.dot_general(q, k, (((3,), (3,)), ((0, 2), (0, 2))))
        return jax_tcgemm.dot_general(scores, v, (((3,), (1,)), ((0, 1), (0, 2))))

    x = struct(2, 128, 8, 64)
    text = lower(attention, x, x, x)
    assert text.count("custom_call @tcgemm_gemm") == 2
    assert "transpose " not in text
    assert "reshape" not in text


def test_gradients_move_nothing(fake_cuda):
    def loss(x, w):
        return jnp.sum(jax_tcgemm.matmul(x, w).astype(jnp.float32) ** 2)

    text = lower(jax.grad(loss, (0, 1)), struct(4, 32, 256), struct(256, 64))
    assert text.count("custom_call @tcgemm_gemm") == 3
    assert "transpose " not in text
    assert "stablehlo.dot_general" not in text


def test_only_the_offending_operand_is_transposed(fake_cuda):
    def f(a, b):
        return jax_tcgemm.dot_general(a, b, (((0, 2), (0, 1)), ((), ())))

    text = lower(f, struct(30, 500, 40), struct(30, 40, 60))
    assert text.count("stablehlo.transpose ") == 1
    assert "(tensor<30x500x40xbf16>) -> tensor<500x30x40xbf16>" in text


def test_workspace_is_an_extra_result(fake_cuda):
    f = functools.partial(jax_tcgemm.matmul, implementation="mma_sync")
    text = lower(f, struct(64, 64), struct(64, 64))
    assert "-> (tensor<64x64xbf16>, tensor<4096xui8>)" in text
    assert "tensor<4096xui8>" not in lower(jax_tcgemm.matmul, struct(64, 64), struct(64, 64))


@pytest.mark.parametrize(
    ("dtype", "precision", "compute"),
    [
        ("float32", None, "tf32"),
        ("float32", "highest", "f32"),
        ("complex64", None, "tf32"),
        ("float16", None, "f32"),
        ("float16", "F16_F16_F16", "f16"),
        ("int8", None, "s32"),
    ],
)
def test_precision_becomes_compute(dtype, precision, compute, fake_cuda):
    x = struct(64, 64, dtype=dtype)
    f = functools.partial(jax_tcgemm.matmul, precision=precision)
    assert attributes(lower(f, x, x))["compute"] == compute
    if precision == "highest":
        with jax.default_matmul_precision("float32"):
            text = lower(lambda a, b: jax_tcgemm.matmul(a, b), x, x)
        assert attributes(text)["compute"] == compute


def test_narrow_integers_are_written_wide_and_converted(fake_cuda):
    x = struct(64, 64, dtype=jnp.int8)
    text = lower(jax_tcgemm.matmul, x, x)
    assert "-> tensor<64x64xi32>" in text
    assert "stablehlo.convert" in text


def test_platforms_lower_each_in_its_way(fake_cuda):
    x = struct(64, 64)
    assert "stablehlo.dot_general" in lower(jax_tcgemm.matmul, x, x, platform="tpu")
    both = jax.jit(jax_tcgemm.matmul).trace(x, x).lower(lowering_platforms=("cpu", "cuda"))
    text = both.as_text()
    assert "stablehlo.case" in text
    assert re.findall(r'implementation = "(\w+)"', text) == ["host", "wgmma"]
    with pytest.raises(ValueError, match="no implementation runs on tpu"):
        lower(functools.partial(jax_tcgemm.matmul, implementation="wgmma"), x, x, platform="tpu")


@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (jnp.matmul, ((8, 16), (16, 4))),
        (jnp.matmul, ((2, 3, 8, 16), (2, 3, 16, 4))),
        (jnp.dot, ((16,), (16,))),
        (functools.partial(jnp.einsum, "ik,kj->ji"), ((8, 16), (16, 4))),
        (
            functools.partial(jnp.einsum, "bqhd,bkhd->bhqk", precision="highest"),
            ((2, 5, 3, 4),) * 2,
        ),
        (functools.partial(jnp.einsum, "bsd,dhe->bhse"), ((2, 5, 8), (8, 3, 4))),
        (functools.partial(jnp.einsum, "ij,kl->jlik"), ((2, 3), (4, 5))),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_xlas_own_product_is_what_jax_lowers_it_to(f, shapes, dtype):
    """With nothing traced on the way: a program of many products is lowered as fast."""
    args = [struct(*shape, dtype=dtype) for shape in shapes]

    def program(*args):
        return f(*args)

    ours = jax_tcgemm.patch(implementation="xla")(program)
    assert lower(ours, *args, platform="cpu") == lower(program, *args, platform="cpu")


@pytest.mark.parametrize("precision", [None, ("highest", "default")])
def test_xlas_own_product_comes_out_in_the_order_wanted(precision):
    """XLA would copy a result that it is told to permute."""

    def loss(w, x):
        product = functools.partial(
            jax_tcgemm.dot_general,
            w,
            dimension_numbers=(((1,), (0,)), ((), ())),
            precision=precision,
            implementation="xla",
        )
        return jnp.sum(jax.vmap(product)(x) ** 2)

    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 7), (3, 7)))
    text = lower(jax.grad(loss, (0, 1)), w, x, platform="cpu")
    assert text.count("stablehlo.dot_general") == 3
    assert "stablehlo.transpose" not in text
    # In the two that come out in order with their operands exchanged.
    assert text.count("precision = [DEFAULT, HIGHEST]") == (2 if precision else 0)
    y_bar = 2 * x.astype(np.float64) @ w.T
    bars = jax.grad(loss, (0, 1))(w, x)
    for got, expected in zip(bars, (y_bar.T @ x, y_bar @ w), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_the_cotangents_of_gate_and_up_are_put_together_in_one_step():
    """XLA:CPU computes both everywhere where each is padded to the whole and they are added."""

    def loss(x, w):
        return jnp.sum(jax_tcgemm.gated_linear(x, w, implementation="xla") ** 2)

    x, w = struct(8, 16, dtype=jnp.float32), struct(16, 2, 4, dtype=jnp.float32)
    text = lower(jax.grad(loss, (0, 1)), x, w, platform="cpu")
    assert "stablehlo.pad" not in text
    assert text.count("stablehlo.concatenate") == 1


def test_an_algorithm_is_not_exchanged_with_the_operands(fake_cuda):
    algorithm = lax.DotAlgorithm(*[np.float32] * 3)

    def product(dot_general, **how):
        return lambda w, x: jax.vmap(
            lambda x: dot_general(w, x, (((1,), (0,)), ((), ())), precision=algorithm, **how)
        )(x)

    args = struct(5, 7, dtype=jnp.float32), struct(3, 7, dtype=jnp.float32)
    ours, plain = (
        re.findall(r"algorithm = <[^>]*>", lower(f, *args))
        for f in (
            product(jax_tcgemm.dot_general, implementation="xla"),
            product(jax.lax.dot_general),
        )
    )
    assert ours == plain != []


def test_unsharded_programs_have_no_custom_partitioning(fake_cuda):
    text = lower(jax.grad(lambda x: jnp.sum(jax_tcgemm.matmul(x, x))), struct(64, 64))
    assert set(re.findall(r"custom_call @(\w+)", text)) == {"tcgemm_gemm"}


def test_the_real_cuda_module_lowers_what_it_accepts(request):
    from jax_tcgemm.system import modules

    if modules.cuda is None:
        pytest.skip(modules.reason("cuda"))
    x = struct(256, 256)
    for name, configs in modules.cuda.implementations().items():
        dtype = "float32" if name.startswith("simt") else "bfloat16"
        x = struct(256, 256, dtype=dtype)
        # Every kernel, and the first one with K split in every way; some of them by default.
        own = [c for c in configs if split_base(c) in ("", configs[0])]
        if not request.config.option.all_cases:
            own = own[:: max(len(own) // 2, 1)]
        for config in own:
            f = functools.partial(
                jax_tcgemm.matmul, implementation=name, config=config, precision="highest"
            )
            try:
                found = attributes(lower(f, x, x))
            except ValueError as error:
                assert f"{name} cannot run this: " in str(error)  # noqa: PT017
            else:
                assert (found["implementation"], found["config"]) == (name, config)


def test_alpha_beta_c_and_batch_levels_on_the_host():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 5, 3, 7)), rng.standard_normal((3, 7, 4))
    c = rng.standard_normal((2, 3, 5, 4))
    problem = Problem(
        batch=6,
        batch_inner=3,
        m=5,
        n=4,
        k=7,
        a=Operand("f32", False, 21, 105, 7),
        b=Operand("f32", False, 4, 0, 28),
        out_dtype="f32",
        compute="f32",
        alpha=1.5,
        beta=-0.5,
    )
    choice = selection.select(CallOptions("local_gemm", "host"), problem, selection.Device("cpu"))
    f = jax.jit(functools.partial(dense_call.local_gemm, problem, choice=choice))
    args = [jnp.asarray(x, jnp.float32) for x in (a, b, c)]
    expected = 1.5 * np.einsum("bmik,ikn->bimn", a, b) - 0.5 * c
    out = f(*args)
    assert out.shape == (6, 5, 4)
    np.testing.assert_allclose(out.reshape(2, 3, 5, 4), expected, rtol=1e-5, atol=1e-5)
    assert "output_operand_alias" in f.lower(*args).as_text()
    # C was not donated, so it is as it was.
    np.testing.assert_array_equal(args[2], c.astype(np.float32))


@pytest.fixture
def started(fake_cuda, monkeypatch):
    """Kernels that begin to be compiled where a GPU is the default device and each call has one."""
    found = []
    fake_cuda.kernels = lambda name, config, problem, device: (("a.cuh", f"{name}_{config}", "sm"),)
    monkeypatch.setattr(lowering, "started_platform", lambda: "gpu")
    monkeypatch.setattr(lowering.compiler, "start", lambda kernels: found.extend(kernels))
    lowering._expect.cache_clear()
    yield found
    lowering._expect.cache_clear()


def test_kernels_begin_to_be_compiled_while_a_program_is_traced(started, capfd, monkeypatch):
    monkeypatch.setenv("TCGEMM_PRINT_CHOICE", "1")

    def f(x):
        for config in ("small", "large", "small"):
            x = jax_tcgemm.matmul(x, x, implementation="wgmma", config=config)
        return jax_tcgemm.linear(x, x, activation="relu", implementation="mma_sync", config="large")

    with selection.collect() as collected:
        jax.make_jaxpr(f)(struct(64, 64))
    # Of the linear layer its own kernel, and not that of a product without what follows.
    assert [x.kernel for x in started] == ["wgmma_small", "wgmma_large", "mma_sync_large"]
    # Programs say what they were lowered with.
    assert not collected
    assert not capfd.readouterr().err


@pytest.mark.parametrize("platform", ["cpu", ""])
def test_no_kernel_is_expected_elsewhere(platform, started, monkeypatch):
    monkeypatch.setattr(lowering, "started_platform", lambda: platform)
    jax.make_jaxpr(jax_tcgemm.matmul)(struct(64, 64), struct(64, 64))
    assert not started


def test_what_cannot_run_is_said_when_it_is_lowered(started, fake_cuda):
    fake_cuda.rejects["wgmma"] = "it cannot"
    call = functools.partial(jax_tcgemm.matmul, implementation="wgmma", config="small")
    jaxpr = jax.make_jaxpr(call)(struct(8, 8), struct(8, 8))
    assert len(jaxpr.eqns) == 1
    assert not started
    with pytest.raises(ValueError, match="wgmma cannot run this: it cannot"):
        lower(call, struct(8, 8), struct(8, 8))
