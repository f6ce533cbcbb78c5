"""GEMM kernels for JAX.

`matmul` and `dot_general` are drop-ins for JAX's functions. `info()` reports which implementations
can run on this machine, `explain(f, *args)` reports the implementation of each product of a
function and the reason, and `autotune(f, *args)` measures the fastest implementations.
"""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

# In a checkout's root this folder comes before the installed package and lacks what was compiled.
# `python -m jax_tcgemm` must work there too: every submodule then comes from the installation.
if importlib.util.find_spec("jax_tcgemm._build") is None:
    _installed = [
        folder
        for entry in sys.path
        if (folder := Path(entry, __name__)).joinpath("_build.py").exists()
    ]
    if not _installed:
        raise ImportError(
            "jax_tcgemm: these are its sources; run pip install . to build and install"
        )
    __path__.insert(0, str(_installed[0]))

from jax_tcgemm import blas, checkpoint_policies, tensor, tuning
from jax_tcgemm.inspect.explain import explain
from jax_tcgemm.inspect.info import info
from jax_tcgemm.losses.cross_entropy import linear_cross_entropy, linear_log_prob
from jax_tcgemm.losses.top_k import linear_top_k
from jax_tcgemm.passes.accelerate import accelerate
from jax_tcgemm.problem.operands.packed_weight import PackedWeight
from jax_tcgemm.problem.operands.quantized import QuantizedArray
from jax_tcgemm.products.batch_invariant import batch_invariant
from jax_tcgemm.products.collective import (
    all_gather_matmul,
    all_reduce,
    matmul_reduce_scatter,
)
from jax_tcgemm.products.dot_general import dot_general
from jax_tcgemm.products.gram import gram
from jax_tcgemm.products.linear import gated_linear, linear
from jax_tcgemm.products.matmul import matmul
from jax_tcgemm.products.mlp import mlp
from jax_tcgemm.products.muon import scale_by_muon
from jax_tcgemm.products.newton_schulz import newton_schulz
from jax_tcgemm.products.patch import patch
from jax_tcgemm.products.ragged.combine_rows import combine_rows
from jax_tcgemm.products.ragged.gated_ragged_linear import gated_ragged_linear
from jax_tcgemm.products.ragged.ragged_dot import ragged_dot, ragged_dot_general
from jax_tcgemm.products.scaled_matmul import scaled_matmul
from jax_tcgemm.quantization.block_formats import pack_mxfp4, pack_mxfp8, pack_nvfp4
from jax_tcgemm.quantization.checkpoints import (
    from_awq,
    from_bitsandbytes,
    from_compressed_tensors,
    from_float8,
    from_gptq,
    from_qwix,
)
from jax_tcgemm.quantization.float4_checkpoints import from_gpt_oss, from_modelopt
from jax_tcgemm.quantization.fp8_dot_general import Fp8DotGeneral
from jax_tcgemm.quantization.fp8_mlp import Fp8Mlp
from jax_tcgemm.quantization.fp8_ragged_dot import Fp8RaggedDot
from jax_tcgemm.quantization.fp8_ragged_mlp import Fp8RaggedMlp
from jax_tcgemm.quantization.pack import pack_weights, stack_packed
from jax_tcgemm.quantization.quantize import dequantize, quantize
from jax_tcgemm.system.switches import debug_switches
from jax_tcgemm.tuning.autotune import autotune
from jax_tcgemm.tuning.first_use import tune_on_first_use

__version__ = importlib.metadata.version("jax_tcgemm")

__all__ = [
    "Fp8DotGeneral",
    "Fp8Mlp",
    "Fp8RaggedDot",
    "Fp8RaggedMlp",
    "PackedWeight",
    "QuantizedArray",
    "accelerate",
    "all_gather_matmul",
    "all_reduce",
    "autotune",
    "batch_invariant",
    "blas",
    "checkpoint_policies",
    "combine_rows",
    "debug_switches",
    "dequantize",
    "dot_general",
    "explain",
    "from_awq",
    "from_bitsandbytes",
    "from_compressed_tensors",
    "from_float8",
    "from_gpt_oss",
    "from_gptq",
    "from_modelopt",
    "from_qwix",
    "gated_linear",
    "gated_ragged_linear",
    "gram",
    "info",
    "linear",
    "linear_cross_entropy",
    "linear_log_prob",
    "linear_top_k",
    "matmul",
    "matmul_reduce_scatter",
    "mlp",
    "newton_schulz",
    "pack_mxfp4",
    "pack_mxfp8",
    "pack_nvfp4",
    "pack_weights",
    "patch",
    "quantize",
    "ragged_dot",
    "ragged_dot_general",
    "scale_by_muon",
    "scaled_matmul",
    "stack_packed",
    "tensor",
    "tune_on_first_use",
    "tuning",
]
