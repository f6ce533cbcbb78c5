"""The benchmark's suites, the operands it draws for them, and its check of results."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_cases import make_case, make_workload
from jax import lax

from jax_tcgemm.bench import contenders, reference, suites
from jax_tcgemm.bench.workloads.packed import formats as packed_formats


@pytest.mark.parametrize("name", suites.suite_names())
def test_every_suite_loads(name):
    suite = suites.load_suite(name)
    assert suite.cases
    assert suite.description
    assert len(set(suite.cases)) == len(suite.cases)
    # Traces references whose traffic is not given.
    assert all(case.bytes > 0 for case in suite.cases)


def test_suites_hold_the_shapes_they_are_named_after():
    def shapes(name):
        return {(c.m, c.n, c.k, c.layout) for c in suites.load_suite(name).cases}

    assert {(s, s, s, "NN") for s in (128, 2048, 16384)} <= shapes("squares")
    assert (128, 24576, 1536, "NN") in shapes("deepseek128")
    assert (1, 28672, 4096, "NN") in shapes("decode")
    assert (4097, 4095, 4104, "NN") in shapes("unaligned")
    assert len(shapes("residues")) == 512
    # The gradients of a projection from 4096 to 6144 with 8192 tokens.
    llama = {(8192, 6144, 4096, "NN"), (8192, 4096, 6144, "NT"), (4096, 6144, 8192, "TN")}
    assert llama <= shapes("llama")


def test_parts_share_the_cases():
    chosen = [suites.load_suite(name) for name in ("squares", "decode", "longk")]
    cases = [case for suite in chosen for case in suite.cases]
    parts = [
        [case for suite in suites.part_of(chosen, f"{i}/4") for case in suite.cases]
        for i in range(1, 5)
    ]
    assert parts == [cases[i::4] for i in range(4)]
    for wrong in ("0/4", "5/4", "2", "a/b", "-1/2"):
        with pytest.raises(ValueError, match="part must be I/N"):
            suites.part_of(chosen, wrong)


@pytest.mark.parametrize("layout", suites.LAYOUTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_case_describes_the_product_it_stands_for(batch, layout):
    case = make_case(batch=batch, layout=layout)
    a = jnp.ones(case.a_shape)
    b = jnp.ones(case.b_shape)
    out = lax.dot_general(a, b, case.dimension_numbers)
    assert out.shape == ((batch, 24, 40) if batch > 1 else (24, 40))
    assert np.all(out == 56)
    assert case.flops == 2 * batch * 24 * 40 * 56
    assert case.bytes == a.nbytes + b.nbytes + out.nbytes


def test_double_precision_counts_eight_bytes():
    products = [c for c in suites.load_suite("blas", ["f64"]).cases if c.label == "gemv N"]
    assert products
    for case in products:
        m, n = case.sizes["m"], case.sizes["n"]
        assert case.bytes == 8 * (m * n + n + m)


def test_suite_keys_multiply_out():
    table = {
        "description": "",
        "dtypes": ["bf16", "f16"],
        "groups": [{"m": [1, 2], "n": 3, "k": [4, 5], "layout": ["NN", "TT"], "batch": 6}],
    }
    assert len(suites.parse_suite("x", table).cases) == 16
    assert len(suites.parse_suite("x", table, ["int8"]).cases) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": [{"m": 1, "n": 1, "k": 1, "rows": 2}]}, "keys of a group of x must be among"),
        ({"groups": [{"size": 1, "layout": "XY"}]}, "layout must be one of"),
        ({"dtypes": ["f12"]}, "dtype must be one of"),
        ({"shapes": []}, "keys of x must be among .* got shapes"),
    ],
)
def test_malformed_suites_are_refused(change, message):
    table = {"description": "", "dtypes": ["bf16"], "groups": [{"size": 8}]} | change
    with pytest.raises(ValueError, match=message):
        suites.parse_suite("x", table)


def test_unknown_suite_is_refused():
    with pytest.raises(ValueError, match=r"suite must be one of .*squares.*got suite='nope'"):
        suites.load_suite("nope")


def test_suite_files_name_the_module_that_makes_their_workloads(monkeypatch):
    module = types.ModuleType("jax_tcgemm.bench.workloads.invented")
    module.workloads = lambda suite, group, dtype: [
        make_workload(suite=suite, dtype=dtype, label=group["label"])
    ]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    groups = [{"label": "one"}, {"label": "two"}]
    table = {"description": "", "workload": "invented", "dtypes": ["f16"], "groups": groups}
    cases = suites.parse_suite("x", table).cases
    assert [case.title for case in cases] == ["x f16 one 8×12×16", "x f16 two 8×12×16"]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"kind": "mpl"}, "kind must be one of linear, gated, mlp, got kind='mpl'"),
        ({"kind": "gated", "rows": 1}, "keys of a group of x must be among .*, got rows"),
    ],
)
def test_malformed_groups_of_fused_layers_are_refused(group, message):
    table = {"description": "", "workload": "fused", "dtypes": ["bf16"], "groups": [group]}
    with pytest.raises(ValueError, match=message):
        suites.parse_suite("x", table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "backward"}, "kind must be one of forward, lhs_gradient, rhs_gradient"),
        ({"rows": 1}, "keys of a group of x must be among .*, got rows"),
    ],
)
def test_malformed_groups_of_grouped_products_are_refused(change, message):
    group = {"tokens": 8, "groups": 2, "n": 8, "k": 8} | change
    table = {"description": "", "workload": "ragged", "dtypes": ["bf16"], "groups": [group]}
    with pytest.raises(ValueError, match=message):
        suites.parse_suite("x", table)


@pytest.mark.parametrize("workload", ["packed.dense", "packed.grouped"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "mxfp6"}, "format must be one of int, mxfp4, mxfp8, nvfp4, got format='mxfp6'"),
        ({"format": "mxfp4", "bits": 8}, "bits must be one of 4, got bits=8"),
        ({"format": "nvfp4", "group": 32}, "group must be one of 16, got group=32"),
        ({"bits": 3, "group": 0}, "bits must be one of 4, 8, got bits=3"),
        ({"rows": 1}, "keys of a group of x must be among .*, got rows"),
    ],
)
def test_malformed_groups_of_packed_weights_are_refused(change, message, workload):
    group = {"n": 16, "k": 64} | change
    group |= {"m": 8} if workload == "packed.dense" else {"tokens": 8, "groups": 2}
    table = {"description": "", "workload": workload, "dtypes": ["bf16"], "groups": [group]}
    with pytest.raises(ValueError, match=message):
        suites.parse_suite("x", table)


@pytest.mark.parametrize(
    "group",
    [{"bits": 4, "group": 0}, {"bits": 8, "group": 64}, {"format": "mxfp4"}, {"format": "nvfp4"}],
    ids=["int4", "int8", "mxfp4", "nvfp4"],
)
def test_drawn_weights_are_of_order_1_and_equal_those_of_the_peer(group):
    (form,) = packed_formats.weight_formats(group, 256)
    drawn = form.draw(jax.random.key(0), (256, 48), jnp.bfloat16)
    w = form.pack(drawn).dequantize(jnp.bfloat16)
    of_peer = form.dequantize(form.typed(drawn), jnp.bfloat16)
    np.testing.assert_allclose(
        np.float32(w), np.float32(of_peer), rtol=2**-7 if drawn.column_scale is not None else 0
    )
    assert 0.5 < float(jnp.std(w.astype(jnp.float32))) * 16 < 2


@pytest.mark.parametrize(
    ("parse", "text"),
    [(contenders.parse_implementations, "nope"), (contenders.parse_peers, "xla,nope")],
)
def test_unknown_names_are_refused(parse, text):
    with pytest.raises(ValueError, match="got (impl|peers)='nope'"):
        parse(text)


# --- operands and checks -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", suites.DTYPES)
def test_check_accepts_xla_and_rejects_one_wrong_element(dtype, x64):
    case = make_case(dtype=dtype, layout="NT", k=300)
    (a, b), (other, _) = reference.make_inputs(case, 2)
    assert not np.array_equal(a, other)
    assert a.dtype == case.element_type
    preferred = case.out_type if case.out_type != case.element_type else None
    # XLA:CPU has no presets of 8-bit floats, and of parts not all, and none of complex numbers.
    is_known = not case.dtype.startswith("f8") and "_x" not in case.dtype
    precision = case.precision if is_known else "highest"
    good = lax.dot_general(
        a, b, case.dimension_numbers, precision=precision, preferred_element_type=preferred
    )
    assert good.dtype == case.out_type
    bad = good.at[3, 5].add(100)
    missing = good.at[3, 5].set(jnp.nan) if jnp.issubdtype(good.dtype, jnp.inexact) else bad
    errors = reference.errors(case, (a, b), [good, bad, missing])
    limit = reference.tolerance(case)
    assert errors[0] <= limit
    assert errors[1] > limit
    assert not errors[2] <= limit


@pytest.mark.parametrize("dtype", ["bf16", "int8", "c64"])
def test_large_arrays_are_compared_where_they_are(dtype, monkeypatch, x64):
    """With the errors that NumPy finds in small ones."""
    case = make_case(dtype=dtype, k=30)
    operands = reference.make_inputs(case, 1)[0]
    good = lax.dot_general(*operands, case.dimension_numbers, preferred_element_type=case.out_type)
    results = [good, good.at[3, 5].add(100)]
    if dtype != "int8":
        results.append(good.at[3, 5].set(jnp.nan))
    found = reference.errors(case, operands, results)
    monkeypatch.setattr(reference, "_FEW_ELEMENTS", good.size - 1)
    reference._comparison.cache_clear()
    reference.prepare(case, results)
    assert reference._comparison.cache_info().misses == 1  # one program for all of a shape
    np.testing.assert_allclose(reference.errors(case, operands, results), found, rtol=1e-5)
    assert reference._comparison.cache_info().misses == 1
    assert found[1] > reference.tolerance(case) >= found[0]


def test_float_inputs_are_normal_and_integers_fill_their_range():
    ((a, _),) = reference.make_inputs(make_case(m=256, k=256, dtype="bf16"), 1)
    values = np.asarray(a, np.float64)
    assert abs(values.mean()) < 0.02
    assert abs(values.std() - 1) < 0.02
    ((a, _),) = reference.make_inputs(make_case(m=256, k=256, dtype="int8"), 1)
    assert (a.min(), a.max()) == (-128, 127)


def test_workloads_draw_their_own_operands():
    shapes = make_workload().operands

    def draw(key):
        return tuple(jnp.ones(x.shape, x.dtype) for x in shapes)

    ((x, w, shift),) = reference.make_inputs(make_workload(draw=draw), 1)
    assert (x.shape, w.shape, shift.shape) == ((8, 16), (16, 12), ())
    assert float(jnp.sum(x.astype(jnp.float32))) == 8 * 16
