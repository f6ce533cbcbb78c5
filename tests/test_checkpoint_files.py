"""Loaders of packed weights on files that the formats' own libraries wrote.

The files are in tests/data/checkpoints, beside the script that writes them. Where a library is
installed, it also writes others here, of other random weights.
"""

import functools
import importlib.util
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from packed_cases import dequantize, unpack
from random_arrays import normal

import jax_tcgemm

safetensors = pytest.importorskip("safetensors")

FILES = pathlib.Path(__file__).parent / "data" / "checkpoints"


def _writer():
    spec = importlib.util.spec_from_file_location("checkpoints_write", FILES / "write.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WRITER = _writer()


def loader_of(path):
    """The loader of a file with its options and the prefix that the format takes."""
    with safetensors.safe_open(str(path), framework="numpy") as file:
        about = json.loads(file.metadata()["case"])
    load = getattr(jax_tcgemm, about["loader"])
    prefix = WRITER.PREFIX + "weight" * (load is jax_tcgemm.from_bitsandbytes)
    return functools.partial(load, path, prefix, **about["options"])


def check(path):
    """Compare a weight with what its library dequantized, and a product with it.

    Bit for bit, unless scales are the product of two.
    """
    with safetensors.safe_open(str(path), framework="numpy") as file:
        expected = file.get_tensor("dequantized")
    w = loader_of(path)()
    assert w.shape == expected.shape
    assert expected.any()
    got = np.asarray(dequantize(w, dtype=jnp.float32))
    if w.format.has_column_scales:  # Libraries round the product of both scales.
        np.testing.assert_allclose(got, expected, rtol=2**-22)
    else:
        np.testing.assert_array_equal(got, expected)

    # Codes less zero points, from the library's weight divided by our scales.
    unpacked, k = unpack(w), len(expected)
    rows = np.arange(k) * len(unpacked.scale) // k
    rows = rows if unpacked.g_idx is None else np.asarray(unpacked.g_idx)
    scale = np.asarray(unpacked.scale).astype(np.float64)[rows]
    if unpacked.column_scale is not None:
        scale = scale * np.asarray(unpacked.column_scale, np.float64)
    codes = np.asarray(unpacked.q, np.float64)
    if w.format.table is not None:
        codes = np.asarray(w.format.table)[np.asarray(unpacked.q, int)]
        np.testing.assert_allclose(expected / scale, codes, rtol=1e-6)
    else:
        if unpacked.zero_point is not None:
            codes -= np.asarray(unpacked.zero_point, np.float64)[rows]
        np.testing.assert_array_equal(np.rint(expected / scale), codes)

    # bfloat16 rounds each weight and the result by 2**-9 of it.
    x = normal(8, k, dtype="bfloat16")
    exact = np.asarray(x, np.float64) @ expected
    bound = 2**-8 * (np.abs(np.asarray(x, np.float64)) @ np.abs(expected) + np.abs(exact))
    product = np.asarray(jax_tcgemm.matmul(x, w), np.float64)
    assert (np.abs(product - exact) <= bound).all()


@pytest.mark.all_cases
@pytest.mark.parametrize("name", WRITER.CASES)
def test_committed_file(name):
    check(FILES / f"{name}.safetensors")


@pytest.mark.all_cases
@pytest.mark.parametrize("name", WRITER.CASES)
def test_file_written_now(name, tmp_path):
    pytest.importorskip("torch")
    library = WRITER.CASES[name].library
    if importlib.util.find_spec(library) is None:  # Of auto_gptq only one module is imported.
        pytest.skip(f"needs {library}")
    for seed in (1, 2):
        try:
            path = WRITER.write(name, tmp_path, seed)
        except NotImplementedError as error:
            pytest.skip(str(error))
        check(path)


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("bitsandbytes-int8", ValueError, "from_bitsandbytes: source must have layer.weight.quant"),
        (
            "compressed-tensors-float8",
            TypeError,
            "from_compressed_tensors: layer.weight must be of int8, got layer.weight.dtype="
            "float8_e4m3fn; is it of another format",
        ),
    ],
)
def test_file_of_another_form_is_refused(name, error, says):
    with pytest.raises(error, match=f"^{says}"):
        loader_of(FILES / f"{name}.safetensors")()


def test_each_committed_file_has_a_case_and_is_small():
    sizes = {path.stem: path.stat().st_size for path in FILES.glob("*.safetensors")}
    assert {*sizes} == {*WRITER.CASES, *WRITER.REFUSED}
    assert sum(sizes.values()) < 320_000
