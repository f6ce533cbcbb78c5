"""Write the checkpoints of tests/test_checkpoint_files.py by the formats' own libraries.

Each file has one layer "layer." as its library saves it, and `dequantized`: the weight (k, n) in
float32 as that library dequantizes it. Its metadata have the loader, the loader's options and the
writer. Weights are random with a fixed seed.

The committed files were written on the CPU by gptqmodel 7.7.0, auto_gptq 0.7.1, autoawq 0.2.9,
bitsandbytes 0.50.2, compressed-tensors 0.20.0 and nvidia-modelopt 0.47.0 with torch 2.13.0; the one
with act-order of compressed-tensors by 0.12.2, as newer releases have none. The package auto_gptq
needs an older transformers: only the module of its linear layer is loaded. To write the files anew:

    pip install --no-deps gptqmodel auto_gptq autoawq  # and what they say that they lack
    pip install torch numpy bitsandbytes compressed-tensors nvidia-modelopt safetensors transformers
    python tests/data/checkpoints/write.py
"""

import functools
import importlib.metadata
import importlib.util
import inspect
import json
import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
SEED = 20
PREFIX = "layer."
# Names of distributions that differ from those of their modules.
DISTRIBUTIONS = {
    "awq": "autoawq",
    "compressed_tensors": "compressed-tensors",
    "modelopt": "nvidia-modelopt",
}


class Case(NamedTuple):
    """A file to write.

    Attributes:
      library: the module of the library that writes it.
      loader: name of our loader, and its options.
      write: function of a generator, which returns arrays and the dequantized weight.
    """

    library: str
    loader: str
    options: dict
    write: Callable


def weights(generator, n: int, k: int, has_one_sign: bool = False):
    """Return a random weight (n, k); in some rows all elements have the same sign."""
    import torch

    w = torch.randn(n, k, generator=generator)
    if has_one_sign:  # Zero points at both ends.
        w[::5], w[1::5] = w[::5].abs(), -w[1::5].abs()
    return w


def min_max(w, group: int, bits: int, is_symmetric: bool, order=None):
    """Return scales and zero points (n, groups) of a weight (n, k), rounded to float16."""
    import torch

    w = w if order is None else w[:, torch.argsort(order, stable=True)]
    w = w.reshape(len(w), -1, group)
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
    if is_symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scale = ((high - low) / (2**bits - 1)).half().float()
    zero = torch.round(-low / scale).clamp(0, 2**bits - 1)
    return scale, torch.full_like(zero, 2 ** (bits - 1)) if is_symmetric else zero


def linear_of(w):
    """Return a linear layer without bias that has a weight (n, k)."""
    import torch

    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    linear.weight.data = w
    return linear


def in_order(generator, k: int, group: int, is_act_order: bool):
    """Return the number of the group of each row."""
    import torch

    g_idx = torch.arange(k, dtype=torch.int32) // group
    return g_idx[torch.randperm(k, generator=generator)] if is_act_order else g_idx


# --- GPTQ and AWQ -------------------------------------------------------------------------------


def gptqmodel(generator, *, n=32, k=64, group=32, bits=4, sym=False, act_order=False, version=1):
    """Write a layer by gptqmodel, its zero points in the first or second format."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    w = weights(generator, n, k, not sym)
    g_idx = in_order(generator, k, group, act_order)
    scale, zero = min_max(w, group, bits, sym, g_idx)
    layer = TorchLinear(
        bits=bits, group_size=group, sym=sym, desc_act=act_order, in_features=k, out_features=n
    )
    layer.pack(linear_of(w), scale, zero, g_idx)
    layer.eval()
    scales, layer.scales = layer.scales, layer.scales.float()
    dequantized = layer.dequantize_weight().clone()
    layer.scales = scales
    if version == 1:
        config = QuantizeConfig(bits=bits, group_size=group, sym=sym, desc_act=act_order)
        convert_gptq_v2_to_v1_format_module(layer, config)
    names = "qweight", "qzeros", "scales", "g_idx"
    return {name: getattr(layer, name) for name in names}, dequantized


@functools.cache
def auto_gptq_linear():
    """Return the linear layer of auto_gptq from its own module alone."""
    files = importlib.metadata.files("auto_gptq")
    path = next(file for file in files if file.match("qlinear/qlinear_cuda.py")).locate()
    spec = importlib.util.spec_from_file_location("qlinear_cuda", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.QuantLinear


def auto_gptq(generator, *, n=32, k=64, group=32, bits=4, sym=False, act_order=False):
    """Write a layer by auto_gptq; a zero point of 0 it writes over the next ones."""
    import torch

    w = weights(generator, n, k)
    g_idx = in_order(generator, k, group, act_order)
    scale, zero = min_max(w, group, bits, sym, g_idx)
    layer = auto_gptq_linear()(bits, group, k, n, bias=False, weight_dtype=torch.float16)
    linear = linear_of(w).half()
    layer.pack(linear, scale.half(), zero.half().clamp(min=1), g_idx)
    scales, layer.scales = layer.scales, layer.scales.float()
    dequantized = layer(torch.eye(k))
    layer.scales = scales
    names = "qweight", "qzeros", "scales", "g_idx"
    return {name: getattr(layer, name) for name in names}, dequantized


def awq(generator, *, n=32, k=64, group=32):
    """Write a layer by autoawq, in its layout "gemm"."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    w = weights(generator, n, k, True)
    scale, zero = (x.T.contiguous() for x in min_max(w, group, 4, False))
    layer = WQLinear_GEMM.from_linear(linear_of(w), 4, group, scales=scale, zeros=zero)
    tensors = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    return tensors, dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, group)


# --- bitsandbytes -------------------------------------------------------------------------------


def bitsandbytes(generator, *, n=16, k=64, kind="nf4", block=64, is_nested=False, storage="uint8"):
    """Write a layer by bitsandbytes, of NF4 or FP4, its scales quantized or not."""
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit

    layer = Linear4bit(
        k,
        n,
        bias=False,
        compute_dtype=torch.float32,
        compress_statistics=is_nested,
        quant_type=kind,
        quant_storage=getattr(torch, storage),
    )
    layer.weight = Params4bit(
        weights(generator, n, k),
        requires_grad=False,
        compress_statistics=is_nested,
        blocksize=block,
        quant_type=kind,
        quant_storage=getattr(torch, storage),
        module=layer,
    )
    layer.to("cpu")
    state, tensors = layer.weight.quant_state, layer.state_dict()
    # As one row: blocks that go on in the next row the CPU kernel of 0.50.2 reads wrongly.
    state.shape = torch.Size((1, n * k))
    return tensors, dequantize_4bit(layer.weight.data, state).reshape(n, k).T


def bitsandbytes_int8(generator, *, n=16, k=64):
    """Write a layer of 8 bits by bitsandbytes."""
    from bitsandbytes.functional import int8_vectorwise_dequant
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    layer = Linear8bitLt(k, n, bias=False, has_fp16_weights=False)
    layer.weight = Int8Params(weights(generator, n, k), requires_grad=False, has_fp16_weights=False)
    layer.to("cpu")
    return layer.state_dict(), int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB).T


# --- compressed-tensors -------------------------------------------------------------------------


def compressed_tensors(
    generator, *, form, strategy, n=16, k=64, bits=4, group=None, sym=True, dtype="float32"
):
    """Write a layer by compressed-tensors, in its format `form`."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    is_int = "float" not in form
    args = QuantizationArgs(
        num_bits=bits,
        type="int" if is_int else "float",
        strategy=strategy,
        group_size=group,
        symmetric=sym,
        zp_dtype=torch.int8 if is_int else torch.float8_e4m3fn,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    w = weights(generator, n, k, not sym).to(getattr(torch, dtype))
    parts = w.reshape(n, -1, group or k)
    low, high = parts.amin(-1), parts.amax(-1)
    state = {"weight": w}
    if strategy == "tensor":
        low, high = low.amin().reshape(1), high.amax().reshape(1)
    scale, zero = calculate_qparams(low, high, args)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(form)
    written = compressor.compress(state, scheme)
    read = {
        name: x.float() if name == "weight_scale" and dtype != "float32" else x
        for name, x in written.items()
    }
    return written, compressor.decompress(read, scheme)["weight"].T


def compressed_tensors_fp4(generator, *, form, n=24, k=64):
    """Write a layer of 4-bit floats by compressed-tensors, in its format `form`."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    is_nvfp4 = form.startswith("nvfp4")
    args = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group" if is_nvfp4 else "group",
        group_size=16 if is_nvfp4 else 32,
        scale_dtype=torch.float8_e4m3fn if is_nvfp4 else torch.uint8,
        zp_dtype=torch.float8_e4m3fn,
    )
    w = weights(generator, n, k) * torch.exp2(torch.arange(n) % 7 - 5)[:, None]
    parts = w.reshape(n, -1, args.group_size)
    low, high = parts.amin(-1), parts.amax(-1)
    state = {"weight": w}
    if is_nvfp4:
        state["weight_global_scale"] = generate_gparam(low.amin(), high.amax()).reshape(1)
    scale, zero = calculate_qparams(low, high, args, state.get("weight_global_scale"))
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(form)
    written = compressor.compress(state, QuantizationScheme(targets=[], weights=args, format=form))
    q = unpack_fp4_from_uint8(written["weight_packed"], n, k, dtype=torch.float32)
    scale = compressor._decompress_scale(written["weight_scale"], torch.float32)
    whole = written.get("weight_global_scale")
    return written, dequantize(q, scale, args=args, global_scale=whole, dtype=torch.float32).T


def modelopt(generator, *, n=24, k=64):
    """Write a layer of NVFP4 by Model Optimizer."""
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    w = weights(generator, n, k) * torch.exp2(torch.arange(n) % 7 - 5)[:, None]
    q, scale, second = NVFP4QTensor.quantize(w.clone(), 16)
    how = {"scale": scale, "double_scale": second, "block_sizes": {-1: 16}}
    tensors = {"weight": q._quantized_data, "weight_scale": scale, "weight_scale_2": second}
    return tensors, q.dequantize(dtype=torch.float32, **how).T


def compressed_tensors_order(generator, *, n=16, k=64, group=32, bits=4):
    """Write a layer with act-order by compressed-tensors of a release that has weight_g_idx."""
    import torch
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle import forward
    from compressed_tensors.quantization.utils import calculate_qparams

    if "g_idx" not in inspect.signature(forward.dequantize).parameters:
        raise NotImplementedError("needs compressed-tensors 0.12, which has weight_g_idx")
    args = QuantizationArgs(
        num_bits=bits, strategy="group", group_size=group, symmetric=False, actorder="group"
    )
    w = weights(generator, n, k, True)
    g_idx = in_order(generator, k, group, True)
    parts = w[:, torch.argsort(g_idx)].reshape(n, -1, group)
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    state = {"weight": w, "weight_scale": scale, "weight_zero_point": zero, "weight_g_idx": g_idx}
    tensors = PackedQuantizationCompressor().compress(
        {PREFIX + name: x for name, x in state.items()},
        {PREFIX[:-1]: QuantizationScheme(targets=["Linear"], weights=args)},
    )
    q = forward.quantize(w, scale, zero, args, torch.int8, g_idx)
    dequantized = forward.dequantize(q, scale, zero, args, g_idx=g_idx)
    return {name.removeprefix(PREFIX): x for name, x in tensors.items()}, dequantized.T


# --- the files ----------------------------------------------------------------------------------


def _cases() -> dict[str, Case]:
    def case(library, loader, options, write, **kwargs):
        return Case(library, loader, options, functools.partial(write, **kwargs))

    def gptq(bits=4, version=1, library="gptqmodel", **kwargs):
        options = {"bits": bits, "zero_offset": 2 - version}
        if library == "auto_gptq":
            return case(library, "from_gptq", options, auto_gptq, bits=bits, **kwargs)
        return case(library, "from_gptq", options, gptqmodel, bits=bits, version=version, **kwargs)

    nf4 = functools.partial(case, "bitsandbytes", "from_bitsandbytes", {}, bitsandbytes)

    def compressed(form, strategy, bits=4, **kwargs):
        kwargs |= {"form": form, "strategy": strategy, "bits": bits}
        return case(
            "compressed_tensors",
            "from_compressed_tensors",
            {"bits": bits},
            compressed_tensors,
            **kwargs,
        )

    def fp4(form):
        how = {"form": form}
        loader = "from_compressed_tensors"
        return case("compressed_tensors", loader, {}, compressed_tensors_fp4, **how)

    packed = functools.partial(compressed, "pack-quantized")
    return {
        "gptqmodel-4-sym-128": gptq(sym=True, group=128, k=256),
        "gptqmodel-4-asym-32": gptq(),
        "gptqmodel-4-asym-32-v2": gptq(version=2),
        "gptqmodel-4-sym-32-act-order": gptq(sym=True, act_order=True),
        "gptqmodel-4-asym-32-act-order": gptq(act_order=True),
        "gptqmodel-8-sym-channel": gptq(bits=8, sym=True, group=64),
        "gptqmodel-8-asym-32-act-order": gptq(bits=8, act_order=True),
        "auto_gptq-4-asym-32-act-order": gptq(library="auto_gptq", act_order=True),
        "auto_gptq-8-sym-32": gptq(library="auto_gptq", bits=8, sym=True),
        "autoawq-4-32": case("awq", "from_awq", {}, awq),
        "autoawq-4-128": case("awq", "from_awq", {}, awq, group=128, k=128),
        "bitsandbytes-nf4": nf4(),
        "bitsandbytes-nf4-nested": nf4(n=136, block=32, is_nested=True),
        "bitsandbytes-nf4-bfloat16": nf4(storage="bfloat16"),
        "bitsandbytes-nf4-block-128": nf4(block=128, k=192),
        "bitsandbytes-fp4-nested": nf4(kind="fp4", is_nested=True),
        "compressed-tensors-int4-sym-32": packed("group", group=32),
        "compressed-tensors-int4-sym-128": packed("group", group=128, n=8, k=256, dtype="bfloat16"),
        "compressed-tensors-int4-asym-32": packed("group", group=32, sym=False),
        "compressed-tensors-int4-asym-odd": packed("group", group=32, sym=False, n=13, k=96),
        "compressed-tensors-int4-asym-channel": packed("channel", sym=False, k=128),
        "compressed-tensors-int4-asym-tensor": packed("tensor", sym=False),
        "compressed-tensors-int4-act-order": case(
            "compressed_tensors", "from_compressed_tensors", {"bits": 4}, compressed_tensors_order
        ),
        "compressed-tensors-int8-asym-32": packed("group", group=32, bits=8, sym=False),
        "compressed-tensors-int8": compressed("int-quantized", "channel", bits=8),
        "compressed-tensors-int8-asym": compressed("int-quantized", "channel", bits=8, sym=False),
        "compressed-tensors-int8-tensor": compressed("int-quantized", "tensor", bits=8),
        "compressed-tensors-nvfp4": fp4("nvfp4-pack-quantized"),
        "compressed-tensors-mxfp4": fp4("mxfp4-pack-quantized"),
        "modelopt-nvfp4": case("modelopt", "from_modelopt", {}, modelopt),
    }


def _refused() -> dict[str, Case]:
    """Layers in forms that the loaders do not know."""

    def case(library, loader, write, **kwargs):
        return Case(library, loader, {}, functools.partial(write, n=8, **kwargs))

    compressed = functools.partial(
        case, "compressed_tensors", "from_compressed_tensors", compressed_tensors
    )
    return {
        "bitsandbytes-int8": case("bitsandbytes", "from_bitsandbytes", bitsandbytes_int8),
        "compressed-tensors-float8": compressed(form="float-quantized", strategy="channel", bits=8),
    }


CASES, REFUSED = _cases(), _refused()


def write(name: str, folder: pathlib.Path, seed: int = SEED) -> pathlib.Path:
    """Write the file of a case into a folder.

    Raises:
      NotImplementedError: where this release of the library does not write it.
    """
    import torch
    from safetensors.torch import save_file

    case = (CASES | REFUSED)[name]
    tensors, dequantized = case.write(torch.Generator().manual_seed(seed))
    tensors = {PREFIX + key: x.detach().clone().contiguous() for key, x in tensors.items()}
    if name in CASES:
        assert dequantized.dtype == torch.float32, dequantized.dtype
        tensors["dequantized"] = dequantized.detach().clone().contiguous()
    distribution = DISTRIBUTIONS.get(case.library, case.library)
    about = {
        "loader": case.loader,
        "options": case.options,
        "writer": f"{distribution} {importlib.metadata.version(distribution)}",
    }
    path = folder / f"{name}.safetensors"
    save_file(tensors, path, {"case": json.dumps(about)})
    return path


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES | REFUSED:
        try:
            path = write(name, HERE)
        except NotImplementedError as error:
            print(f"{name}: skipped, {error}")
        else:
            print(path.name, path.stat().st_size)
