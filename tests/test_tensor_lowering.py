"""tensor: what operations are folded to, and what a program is lowered to."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_arrays import draw

import jax_tcgemm
from jax_tcgemm import tensor
from jax_tcgemm.problem.tensor.folding import fold_permutation, fold_reduction
from jax_tcgemm.problem.tensor.operation import Operation
from jax_tcgemm.system import modules

pytestmark = pytest.mark.usefixtures("x64")

# --- folding ------------------------------------------------------------------------------------


def _operation(kind, extents, modes, result):
    return Operation(
        kind,
        np.dtype("f4"),
        tuple(extents),
        (tuple(modes),),
        tuple(result),
        ("identity",),
        ("add",),
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_folded_permutations_say_where_elements_go(data):
    extents = data.draw(st.lists(st.integers(1, 4), max_size=7))
    result = data.draw(st.permutations(range(len(extents))))
    folded = fold_permutation(_operation("permute", extents, range(len(extents)), result))
    a = np.arange(np.prod(extents, dtype=int)).reshape(extents)
    expected = a.transpose(result).reshape(-1)
    if isinstance(folded, str):
        stays = np.array_equal(expected, a.reshape(-1))
        squeezed = [mode for mode in range(len(extents)) if extents[mode] != 1]
        keeps_last = squeezed and [m for m in result if extents[m] != 1][-1] == squeezed[-1]
        assert stays or keeps_last or len(squeezed) > 6
        return
    got = np.full(a.size, -1)
    for batch in np.ndindex(*folded.batch_extents):
        first_in = int(np.dot(batch, folded.batch_in_strides))
        first_out = int(np.dot(batch, folded.batch_out_strides))
        for row in range(folded.rows):
            for col in range(folded.cols):
                source = first_in + row * folded.in_row_stride + col
                got[first_out + col * folded.out_col_stride + row] = a.reshape(-1)[source]
    np.testing.assert_array_equal(got, expected)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_folded_reductions_have_the_same_sums(data):
    extents = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    kept = data.draw(st.lists(st.booleans(), min_size=len(extents), max_size=len(extents)))
    result = [mode for mode, keep in enumerate(kept) if keep]
    folded = fold_reduction(_operation("reduce", extents, range(len(extents)), result))
    if isinstance(folded, str):
        return
    a = np.arange(np.prod(extents)).reshape(extents)
    axes = tuple(mode for mode, keep in enumerate(kept) if not keep)
    got = a.reshape(folded.outer, folded.reduced, folded.inner).sum(1)
    np.testing.assert_array_equal(got.reshape(-1), a.sum(axes).reshape(-1))


# --- what a program is lowered to ---------------------------------------------------------------


@pytest.fixture
def fake_cutensor(monkeypatch, fake_cuda):
    """A _cutensor module, and no GPU to ask."""
    module = types.SimpleNamespace(abi_version=7, workspace_alignment=256)
    monkeypatch.setattr(modules, "cutensor", module)
    monkeypatch.setattr(modules, "cutensor_reason", lambda: "")
    return module


def lowered(f, *shapes, dtype="float32"):
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_attributes_of_a_contraction(fake_cutensor):
    text = lowered(
        lambda a, b, c: tensor.contract(
            "mhkn,ukvh->munv", a, b, c=c, alpha=1.5, beta=-2, implementation="cutensor",
            algorithm="ttgt", compute_type="3xtf32",
        ),
        (2, 3, 4, 5), (6, 4, 7, 3), (2, 6, 5, 7),
    )  # fmt: skip
    assert "tcgemm_tensor" in text
    for attribute in (
        'operation = "contract"', 'compute = "3xtf32"', 'algorithm = "ttgt"', 'dtype = "f32"',
        "abi = 7", "extents = dense<[2, 3, 4, 5, 6, 7]>", "a_modes = dense<[0, 1, 2, 3]>",
        "b_modes = dense<[4, 2, 5, 1]>", "c_modes = dense<[0, 4, 3, 5]>",
        "d_modes = dense<[0, 4, 3, 5]>", "has_c = true",
    ):  # fmt: skip
        assert attribute in text, attribute
    assert "1.500000e+00, 0.000000e+00, -2.000000e+00" in text
    # All arrays have 2 * 3 * 4 * 5 + 504 + 2 * 420 float32 elements: the bound without a GPU.
    total = -(-4 * (120 + 504 + 420 + 420) // 256) * 256
    assert f"workspace_bytes = {total} " in text
    assert f"tensor<{total + 256}xui8>" in text


@pytest.mark.parametrize(
    ("f", "attributes"),
    [
        (
            lambda a: tensor.permute("ij->ji", a, op_a="exp", implementation="cutensor"),
            ('operation = "permute"', 'a_op = "exp"', "d_modes = dense<[1, 0]>"),
        ),
        (
            lambda a: tensor.elementwise_binary(
                "ij,ji->ji", a, a.T, op="max", op_c="sin", implementation="cutensor"
            ),
            ('combine = "max"', 'c_op = "sin"', "c_modes = dense<[1, 0]>", "has_c = true"),
        ),
        (
            lambda a: tensor.elementwise_trinary(
                "ij,j,ij->ij", a, a[0], a, op_ab="mul", op_abc="min", op_b="abs",
                implementation="cutensor",
            ),
            ('combine_ab = "mul"', 'combine = "min"', 'b_op = "abs"', "b_modes = dense<1>"),
        ),
        (
            lambda a: tensor.reduce("ij->j", a, op="mul", implementation="cutensor"),
            ('operation = "reduce"', 'combine = "mul"', "d_modes = dense<1>"),
        ),
    ],
    ids=["permute", "binary", "trinary", "reduce"],
)  # fmt: skip
def test_attributes(f, attributes, fake_cutensor):
    text = lowered(f, (3, 4))
    for attribute in attributes:
        assert attribute in text, attribute


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (
            lambda a: tensor.elementwise_binary("ij,ji->ij", a, a.T, implementation="cutensor"),
            "the last operand must have the result's modes",
        ),
        (
            lambda a: tensor.permute("ij->ji", a[:0], implementation="cutensor"),
            "a mode has extent 0",
        ),
        (
            lambda a: tensor.einsum(
                "ij,kj", a, a, preferred_element_type="float64", implementation="cutensor"
            ),
            "cuTENSOR makes float32 from float32, not float64",
        ),
        (
            lambda a: tensor.einsum("ij,kj", a > 0, a > 0, implementation="cutensor"),
            "cuTENSOR does not contract bool",
        ),
        (
            lambda a: tensor.reduce(
                "ij->i", a.astype("bfloat16"), op="mul", implementation="cutensor"
            ),
            "cuTENSOR rounds products of bfloat16 to 16 bits on the way",
        ),
        (
            lambda a: tensor.contract(
                "ij,kj->ik", a, a, compute_type="4xf16", implementation="gemm"
            ),
            "our products have no compute type 4xf16",
        ),
    ],
)
def test_refusals_when_lowered(call, reason, fake_cutensor):
    with pytest.raises(ValueError, match=f"cannot run this: {reason}"):
        lowered(call, (3, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "s8"}, "dtype must be f16, bf16, f32, f64, c64 or c128, got s8"),
        ({"dtype": "f8"}, "f8e5m2 or f8e8m0fnu, got f8"),
        ({"operation": "convolve"}, "elementwise_trinary or reduce, got convolve"),
        ({"extents": [4, 0, 6]}, "every extent must be at least 1, got 0"),
        ({"extents": [2**32, 2**32, 6]}, r"an array must have fewer than 2\^59 elements"),
        ({"a_modes": [0, 0]}, "a must have distinct modes"),
        ({"a_modes": [0, 9]}, "a mode has no extent"),
        ({"d_modes": [0]}, "every mode must be in two of a, b and d"),
        ({"has_c": True, "c_modes": [2, 0]}, "c must have the modes of d, in their order"),
        ({"operation": "permute"}, "a and d must have one set of modes"),
        ({"operation": "elementwise_binary"}, "c must be given"),
        ({"a_op": "cube"}, "a unary operator is unknown: cube"),
        ({"combine": "sub"}, "a binary operator is unknown: sub"),
        ({"algorithm": "fastest"}, "algorithm is unknown: fastest"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_the_cutensor_module_checks_again(change, message):
    """As an exported program may say anything."""
    if modules.cutensor is None:
        pytest.skip("this build has no _cutensor")
    modes = ((0, 1), (1, 2))
    operation = Operation("contract", np.dtype("f4"), (4, 5, 6), modes, (0, 2), ("identity",) * 2)
    modules.cutensor.check(operation.query())
    with pytest.raises(ValueError, match=message):
        modules.cutensor.check(operation.query() | change)


def test_without_cutensor_the_error_says_what_to_install():
    if modules.cutensor is not None and not modules.reason("cutensor"):
        pytest.skip("cuTENSOR is here")
    a = jnp.ones((3, 4))
    with pytest.raises(ValueError, match=r"pip install 'jax_tcgemm\[cutensor\]'"):
        tensor.permute("ij->ji", a, implementation="cutensor")
    entry = {x.name: x for x in jax_tcgemm.info().implementations}["cutensor"]
    assert not entry.available
    assert entry.reason
    assert tensor.plan_cache()["size"] == 0


def test_choice_saves_copies(fake_cutensor):
    """Scores of attention: XLA would copy both operands, our products read them in place."""
    q = jax.ShapeDtypeStruct((8, 1024, 16, 64), "bfloat16")
    report = jax_tcgemm.explain(
        lambda q, k: tensor.einsum("bqhd,bkhd->bhqk", q, k), q, q, platform="cuda"
    )
    (call,) = report
    assert call.implementation == "gemm"
    assert call.copies == ()
    assert "for xla" in call.why


def test_choice_is_xla_for_a_plain_product(fake_cutensor):
    """Nothing is saved, so that XLA's own is taken, which fuses with its neighbors."""
    a = jax.ShapeDtypeStruct((512, 512), "float64")
    (call,) = jax_tcgemm.explain(
        lambda a, b: tensor.einsum("ij,jk->ik", a, b), a, a, platform="cuda"
    )
    assert call.implementation == "xla"


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("bhd,bkhd->bhk", [(64, 32, 128), (64, 1024, 32, 128)]),
        ("bikc,bjkc->bijc", [(1, 384, 384, 128), (1, 384, 384, 128)]),
    ],
    ids=["a vector", "the batch fastest"],
)
def test_choice_is_xla_where_others_are_slow(subscripts, shapes, fake_cutensor):
    operands = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    f = functools.partial(tensor.einsum, subscripts)
    (call,) = jax_tcgemm.explain(f, *operands, platform="cuda")
    assert call.implementation == "xla", call.why


def test_choice_is_cutensor_where_all_arrays_would_be_copied(fake_cutensor):
    a = jax.ShapeDtypeStruct((96, 14, 14, 96), "float32")
    b = jax.ShapeDtypeStruct((96, 14, 64, 14), "float32")
    f = functools.partial(tensor.einsum, "mhkn,ukvh->munv", precision="highest")
    (call,) = jax_tcgemm.explain(f, a, b, platform="cuda")
    assert call.implementation == "cutensor", call.why


def test_choice_is_a_product_where_cutensor_is_slow(fake_cutensor):
    a = jax.ShapeDtypeStruct((96, 64, 64, 96), "float32")
    b = jax.ShapeDtypeStruct((96, 64, 64, 64), "float32")
    f = functools.partial(tensor.einsum, "mhkn,ukvh->munv")
    (call,) = jax_tcgemm.explain(f, a, b, platform="cuda")
    assert call.implementation == "gemm", call.why


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "complex64"])
@pytest.mark.parametrize("modes", ["ab,bc->ac", "ab,cb->ca", "abc,bad->dca", "zab,zbc->azc"])
@pytest.mark.parametrize("extent", [1, 3, 17, 64])
@pytest.mark.usefixtures("fake_cuda", "x64")
def test_gemm_runs_where_it_is_asked_for(modes, extent, dtype, platform):
    """Also where XLA's own product is faster."""
    terms = modes.partition("->")[0].split(",")
    a, b = (jax.ShapeDtypeStruct((extent,) * len(term), dtype) for term in terms)
    f = functools.partial(tensor.contract, modes, implementation="gemm")
    with jax.default_matmul_precision("highest"):
        (call,) = jax_tcgemm.explain(f, a, b, platform=platform)
    assert call.implementation == "gemm"
    assert not call.config.startswith("xla")


def test_explain_names_every_operation():
    a = jnp.ones((3, 4))
    report = jax_tcgemm.explain(
        lambda a: tensor.reduce("ij->i", tensor.permute("ji->ij", tensor.einsum("ij,kj", a, a))),
        a,
        platform="cpu",
    )
    assert [call.problem.kind for call in report] == ["contract", "permute", "reduce"]
    assert report[0].flops == 2 * 3 * 3 * 4


def test_exports():
    exported = jax.export.export(
        jax.jit(lambda a: tensor.einsum("ij,kj->ik", a, a)),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("tcgemm_gemm")],
    )(jax.ShapeDtypeStruct((3, 4), "float32"))
    a = draw((3, 4), "float32")
    np.testing.assert_allclose(exported.call(a), a @ a.T, rtol=1e-5)
