"""The targets that only a GPU has, as fuzz_targets.py has the others."""

import base64

import numpy as np
from ffi_frame import NUMPY, Buffer
from fuzz_targets import (
    FLOATS,
    HOST,
    ROUNDING,
    Call,
    Expected,
    Platform,
    anything,
    draw,
    flip,
    one_of,
    wide,
)

from jax_tcgemm.inspect import fragments
from jax_tcgemm.kernels import Instance, program
from jax_tcgemm.primitives.packed_weight import problem_of
from jax_tcgemm.problem.compute_types import CONTRACTION_COMPUTE, ELEMENTWISE_COMPUTE
from jax_tcgemm.problem.function import Numbers
from jax_tcgemm.problem.operands.packed_weight import E2M1, TILE, PackedFormat
from jax_tcgemm.problem.operands.quantize import QuantizeProblem
from jax_tcgemm.problem.split import SplitProblem
from jax_tcgemm.selection import target_device
from jax_tcgemm.system import modules


class Transpose:
    """tcgemm_transpose: csrc/kernels/tensor/transposition.h."""

    target = "tcgemm_transpose"

    @staticmethod
    def draw(rng, platform: Platform) -> Call:
        extents = [int(x) for x in rng.integers(1, 40, 2)]
        extents += [int(x) for x in rng.integers(1, 4, int(rng.integers(0, 4)))]
        modes = np.arange(len(extents))
        order_in, order_out = rng.permutation(modes), rng.permutation(modes)
        # The last mode of either is a row or a column, and they are two.
        if order_in[-1] == order_out[-1]:
            order_out = np.roll(order_out, 1)
        strides = [_strides(order, extents) for order in (order_in, order_out)]
        row, col = int(order_out[-1]), int(order_in[-1])
        batch = [int(mode) for mode in modes if mode not in (row, col)]
        attributes = {"abi": platform.abi, "rows": extents[row], "cols": extents[col]}
        attributes |= {"in_row_stride": strides[0][row], "out_col_stride": strides[1][col]}
        attributes["batch_extents"] = [extents[mode] for mode in batch]
        attributes["batch_in_strides"] = [strides[0][mode] for mode in batch]
        attributes["batch_out_strides"] = [strides[1][mode] for mode in batch]
        dtype = one_of(rng, ["u8", "f16", "bf16", "f32", "f64", "c64", "c128", "s32"])
        a = draw(rng, dtype, (int(np.prod(extents)),))
        return Call(
            "tcgemm_transpose", "", attributes, [a], [Buffer(dtype, a.shape)], flip(rng, 0.7)
        )

    @staticmethod
    def names(attributes) -> tuple[list[str], list[str]]:
        return ["a"], ["out"]

    @staticmethod
    def expected(call: Call) -> list:
        p = call.attributes
        modes = [(p["rows"], p["in_row_stride"], 1), (p["cols"], 1, p["out_col_stride"])]
        batch = ("batch_extents", "batch_in_strides", "batch_out_strides")
        modes += zip(*(p[name] for name in batch), strict=True)
        source = target = np.zeros(1, np.int64)
        for extent, in_stride, out_stride in modes:
            index = np.arange(extent)
            source = (source[:, None] + index * in_stride).ravel()
            target = (target[:, None] + index * out_stride).ravel()
        if call.results[0].dtype not in NUMPY:
            return [None]
        values = np.full(int(np.prod(call.results[0].shape)), np.nan, np.complex128)
        values[target] = wide(call.operands[0])[source]
        return [Expected(values, np.ones(values.shape), 0)]


def _strides(order, extents) -> list[int]:
    """Of a packed array whose modes lie in an order, the last one fastest."""
    strides, stride = [0] * len(extents), 1
    for mode in reversed(order):
        strides[mode] = stride
        stride *= extents[mode]
    return strides


class Reduce:
    """tcgemm_reduce: csrc/kernels/common/reduction.h."""

    target = "tcgemm_reduce"

    @staticmethod
    def draw(rng, platform: Platform) -> Call:
        dtype = one_of(rng, FLOATS)
        out = dtype if dtype == "f64" or flip(rng) else "f32"
        op = one_of(rng, ["add", "max", "min"])
        outer, reduced, inner = (int(x) for x in rng.integers(1, 30, 3))
        if flip(rng, 0.3):
            reduced = int(rng.integers(200, 3000))
        if flip(rng, 0.3):
            inner = 1
        attributes = {"abi": platform.abi, "op": op, "outer": outer, "reduced": reduced}
        attributes["inner"] = inner
        workspace = platform.module.reduction_workspace_bytes(
            dtype, out, op, outer, reduced, inner, platform.device["num_sms"]
        )
        results = [Buffer(out, (outer, inner))]
        results += [Buffer("u8", (workspace,))] if workspace or flip(rng, 0.1) else []
        a = draw(rng, dtype, (outer, reduced, inner))
        return Call("tcgemm_reduce", "", attributes, [a], results, flip(rng, 0.7))

    @staticmethod
    def names(attributes) -> tuple[list[str], list[str]]:
        return ["a"], ["out"]

    @staticmethod
    def expected(call: Call) -> list:
        p = call.attributes
        a = wide(call.operands[0]).reshape(p["outer"], p["reduced"], p["inner"])
        reduce = {"add": np.sum, "max": np.max, "min": np.min}[p["op"]]
        return [Expected(reduce(a, 1), np.abs(a).sum(1) + 1, ROUNDING[call.results[0].dtype])]


class Packed:
    """tcgemm_packed: csrc/core/packed_problem.h. Of products a program must bring the kernels."""

    target = "tcgemm_packed"

    @staticmethod
    def draw(rng, platform: Platform) -> Call:
        form = _packed_format(rng)
        out = one_of(rng, ["f16", "bf16"])
        problem = problem_of(form.n // TILE, form, form="weight", m=0, in_dtype=out, out_dtype=out)
        packed = platform.module.packed
        p = {"abi": platform.abi} | problem.attributes()
        p["implementation"], p["config"], _ = platform.choose(rng, packed, problem.query())
        bytes_of = form.shapes.values()
        operands = [Buffer.of(rng.integers(0, 256, x, np.uint8), "u8") for x in bytes_of]
        operands += [draw(rng, "f32", (16,))] * form.has_lookup
        results = [Buffer(out, (p["n"], p["k"]))]
        return Call("tcgemm_packed", "packed", p, operands, results, flip(rng, 0.7))

    @staticmethod
    def names(attributes) -> tuple[list[str], list[str]]:
        names = ["x"] * (attributes["form"] == "product") + ["values", "scales"]
        for name in ("zero_points", "column_scales"):
            names += [name] * attributes[name]
        names += ["table"] * (attributes["code"] == "table")
        return names, ["d"]

    @staticmethod
    def expected(call: Call) -> list:
        return [anything(call.results[0])]


def _packed_format(rng) -> PackedFormat:
    """Return a format of any kind, of up to four groups of rows and four tiles of columns."""
    qtype = one_of(rng, ["int4", "uint4", "int8", "uint8", "table", "float8_e4m3fn", "float8_e5m2"])
    size = one_of(rng, [16, 32, 64, 128])
    groups, tiles = (int(x) for x in rng.integers(1, 5, 2))
    scale = one_of(rng, ["float16", "bfloat16", "float32", "float8_e8m0fnu", "float8_e4m3fn"])
    table = one_of(rng, [E2M1, tuple(map(float, range(16)))]) if qtype == "table" else None
    return PackedFormat(
        shape=(size * groups, TILE * tiles),
        group_size=size,
        qtype=qtype,
        scale_dtype=scale,
        table=table,
        has_zero_points="int" in qtype and flip(rng),
        has_column_scales=flip(rng),
    )


class Quantize:
    """tcgemm_quantize: csrc/core/quantize_problem.h. A program must bring the kernels."""

    target = "tcgemm_quantize"

    @staticmethod
    def draw(rng, platform: Platform) -> Call:
        form = one_of(rng, ["rows", "lines", "blocks", "scaled"])
        batch, rows, columns = (int(x) for x in rng.integers(1, 200, 3))
        p = {"abi": platform.abi, "form": form, "batch": batch % 4 + 1, "rows": rows}
        p |= {"columns": columns, "transposed": form != "rows" and flip(rng)}
        x, out = one_of(rng, ["f16", "bf16", "f32"]), one_of(rng, ["f8e4m3fn", "f8e5m2", "s8"])
        query = p | {"in_dtype": x, "out_dtype": out}
        queries = platform.module.quantize
        p["implementation"], p["config"], _ = platform.choose(rng, queries, query)
        problem = {k: v for k, v in query.items() if k != "abi"}
        dtypes = {"values": out, "scales": "f32"}
        results = [
            Buffer(dtypes[name.removeprefix("transposed_")], result.shape)
            for name, result in QuantizeProblem(**problem).results().items()
        ]
        operands = [draw(rng, x, (p["batch"], rows, columns))]
        operands += [draw(rng, "f32", (p["batch"],))] * (form == "scaled")
        return Call("tcgemm_quantize", "quantize", p, operands, results, flip(rng, 0.7))

    @staticmethod
    def names(attributes) -> tuple[list[str], list[str]]:
        is_scaled = attributes["form"] == "scaled"
        own = ["values"] if is_scaled else ["values", "scales"]
        transposed = [f"transposed_{name}" for name in own] * attributes["transposed"]
        return ["x"] + ["given"] * is_scaled, own + transposed

    @staticmethod
    def expected(call: Call) -> list:
        return [anything(result) for result in call.results]


class Split:
    """tcgemm_split: csrc/core/split_problem.h. A program must bring the kernels."""

    target = "tcgemm_split"

    @staticmethod
    def draw(rng, platform: Platform) -> Call:
        form = one_of(rng, ["real", "left", "right", "right_first"])
        x, out = "f32" if form == "real" else "c64", one_of(rng, ["bf16", "f32"])
        outer, middle, inner, columns, deeper = (int(x) for x in rng.integers(1, 30, 5))
        inner = inner if form.startswith("right") else 1
        filled = inner if form == "right_first" else middle
        p = {"abi": platform.abi, "form": form, "outer": outer, "middle": middle, "inner": inner}
        p |= {"columns": columns, "depth": filled + deeper, "pitch": -(-columns // 8) * 8}
        p["terms"] = Numbers.of([*rng.integers(0, 3, int(rng.integers(0, 9))), 0])
        query = p | {"in_dtype": x, "out_dtype": out}
        queries = platform.module.split
        p["implementation"], p["config"], _ = platform.choose(rng, queries, query)
        problem = {k: v for k, v in query.items() if k != "abi"}
        problem["terms"] = tuple(problem["terms"].tolist())
        shape = SplitProblem(**problem).shape
        operands = [draw(rng, x, (outer, middle, inner, columns))]
        return Call("tcgemm_split", "split", p, operands, [Buffer(out, shape)], flip(rng, 0.7))

    @staticmethod
    def names(attributes) -> tuple[list[str], list[str]]:
        return ["x"], ["d"]

    @staticmethod
    def expected(call: Call) -> list:
        return [anything(call.results[0])]


class FragmentProbe:
    """tcgemm_fragment_probe: csrc/kernels/wmma/fragment_probe.h."""

    target = "tcgemm_fragment_probe"

    @staticmethod
    def draw(rng, platform: Platform) -> Call:
        cases = [case for case in fragments.fragment_cases() if fragments.is_wmma(case[0])]
        case = cases[rng.integers(len(cases))]
        attributes = dict(zip(("shape", "dtype", "operand"), case, strict=True))
        attributes["column_major"] = flip(rng)
        size = fragments.fragment_size(*case)
        result = Buffer("s32", (fragments.LANES, size))
        return Call("tcgemm_fragment_probe", "", attributes, [], [result], flip(rng, 0.7))

    @staticmethod
    def names(attributes) -> tuple[list[str], list[str]]:
        return [], ["out"]

    @staticmethod
    def expected(call: Call) -> list:
        case = [call.attributes[name] for name in ("shape", "dtype", "operand")]
        elements = fragments.fragment_elements(*case)
        _, columns = fragments.fragment_shape(case[0], case[2])
        values = (elements["row"] * columns + elements["col"]).astype(np.float64)
        return [Expected(values, np.ones(values.shape), 0)]


class FragmentMma:
    """tcgemm_fragment_mma: csrc/kernels/wmma/fragment_probe.h."""

    target = "tcgemm_fragment_mma"

    @staticmethod
    def draw(rng, platform: Platform) -> Call:
        case = one_of(rng, _MMA_CASES)
        shape, dtype, accumulator = case
        attributes = {"shape": shape, "dtype": dtype, "accumulator": accumulator}
        operands = []
        for operand in "ab":
            where = (fragments.LANES, fragments.fragment_size(shape, dtype, operand))
            operands.append(Buffer.of(rng.integers(0, 4, where, np.int32), "s32"))
        size = fragments.fragment_size(shape, accumulator, "c")
        results = [Buffer("s32", (fragments.LANES, size))]
        return Call("tcgemm_fragment_mma", "", attributes, operands, results, flip(rng, 0.7))

    @staticmethod
    def names(attributes) -> tuple[list[str], list[str]]:
        return ["a", "b"], ["d"]

    @staticmethod
    def expected(call: Call) -> list:
        shape, dtype, accumulator = (
            call.attributes[name] for name in ("shape", "dtype", "accumulator")
        )
        matrices = []
        for operand, buffer in zip("ab", call.operands, strict=True):
            values = buffer.array().reshape(fragments.LANES, -1)
            if np.abs(values).max() > 8:  # Not every type holds them.
                return [anything(call.results[0])]
            where = fragments.fragment_map(shape, dtype, operand)
            matrices.append(values[where["lane"], where["index"]].astype(np.float64))
        product = matrices[0] @ matrices[1]
        elements = fragments.fragment_elements(shape, accumulator, "c")
        values = product[elements["row"], elements["col"]]
        return [Expected(values, np.ones(values.shape), 0)]


_MMA_CASES = [
    ("m16n8k16", "f16", "f16"),
    ("m16n8k16", "f16", "f32"),
    ("m16n8k16", "bf16", "f32"),
    ("m16n8k8", "tf32", "f32"),
    ("m16n8k32", "s8", "s32"),
    ("m16n8k32", "u8", "s32"),
]


class Tensor:
    """tcgemm_tensor: csrc/ffi/cutensor.h."""

    target = "tcgemm_tensor"

    @staticmethod
    def draw(rng, platform: Platform) -> Call:
        kind = one_of(rng, ["contract", "permute", "elementwise_binary", "reduce"])
        dtype = one_of(rng, (*FLOATS, "c64", "c128"))
        extents = [int(x) for x in rng.integers(1, 9, 4)]
        modes = {  # a, b, d; c has d's
            "contract": ([0, 1], [1, 2], [0, 2]),
            "permute": ([0, 1, 2], [], [2, 0, 1]),
            "elementwise_binary": ([1, 0], [], [0, 1]),
            "reduce": ([0, 1, 2], [], [1]),
        }[kind]
        extents = extents[: 1 + max(max(x, default=0) for x in modes)]
        has_c = kind == "elementwise_binary" or (kind != "permute" and flip(rng))
        a, b, d = modes
        known = CONTRACTION_COMPUTE if kind == "contract" else ELEMENTWISE_COMPUTE
        compute = known[np.dtype(NUMPY[dtype])][0]
        attributes = {"abi": platform.abi, "operation": kind, "dtype": dtype, "compute": compute}
        attributes |= {"algorithm": "default", "extents": extents, "a_modes": a, "b_modes": b}
        attributes |= {"c_modes": d if has_c else [], "d_modes": d, "has_c": has_c}
        attributes |= dict.fromkeys(("a_op", "b_op", "c_op"), "identity")
        attributes |= dict.fromkeys(("combine_ab", "combine"), "add")
        beta = 1.0 if kind == "contract" and has_c else 0.0
        beta = 1.0 if kind == "reduce" and has_c else beta
        attributes["scalars"] = [1.0, 0.0, beta, 0.0, 1.0, 0.0]
        attributes["workspace_bytes"] = int(one_of(rng, [0, 1 << 16]))

        def shape(names):
            return tuple(extents[mode] for mode in names)

        operands = [draw(rng, dtype, shape(x)) for x in ([a, b] if b else [a])]
        operands += [draw(rng, dtype, shape(d))] if has_c else []
        results = [Buffer(dtype, shape(d), shares=len(operands) - 1 if has_c else None)]
        if attributes["workspace_bytes"]:
            results.append(Buffer("u8", (attributes["workspace_bytes"] + 256,)))
        return Call("tcgemm_tensor", "", attributes, operands, results, at_end=False)

    @staticmethod
    def names(attributes) -> tuple[list[str], list[str]]:
        has_b = attributes["operation"] in ("contract", "elementwise_trinary")
        return ["a"] + ["b"] * has_b + ["c"] * attributes["has_c"], ["d"]

    @staticmethod
    def expected(call: Call) -> list:
        p = call.attributes
        usual = dict.fromkeys(("a_op", "b_op", "c_op"), "identity") | {"combine": "add"}
        usual |= {"combine_ab": "add"}
        scalars = p["scalars"]
        if p["operation"] == "elementwise_trinary" or any(
            p[name] != x for name, x in usual.items()
        ):
            return [anything(call.results[0])]
        alpha, beta, gamma = (complex(*scalars[2 * i : 2 * i + 2]) for i in range(3))
        arrays = {}
        for name, buffer in zip(Tensor.names(p)[0], call.operands, strict=True):
            shape = [p["extents"][mode] for mode in p[f"{name}_modes"]]
            arrays[name] = wide(buffer)[: int(np.prod(shape))].reshape(shape)
        subscripts = [p[f"{name}_modes"] for name in arrays if name != "c"]
        inputs = [x for name, x in arrays.items() if name != "c"]
        pairs = [item for pair in zip(inputs, subscripts, strict=True) for item in pair]
        values = alpha * np.einsum(*pairs, p["d_modes"])
        pairs[::2] = [np.abs(x) for x in inputs]
        magnitude = abs(alpha) * np.einsum(*pairs, p["d_modes"]) + 1
        if "c" in arrays:
            factor = gamma if p["operation"] == "elementwise_binary" else beta
            values = values + factor * arrays["c"]
            magnitude = magnitude + np.abs(factor * arrays["c"])
        finite = np.isfinite(magnitude) & (magnitude < 1e4)
        return [Expected(np.where(finite, values, np.nan), magnitude, ROUNDING[p["dtype"]])]


class Kernel:
    """tcgemm_kernel: csrc/ffi/kernel.h. What is loaded is never run."""

    target = "tcgemm_kernel"

    @staticmethod
    def draw(rng, platform: Platform) -> Call:
        name = one_of(rng, ["fuzzed", "fuzzed_too"])
        major, minor = divmod(platform.device["compute_capability"], 10)
        source = f"__global__ void {name}(float* x) {{ *x = 1; }}"
        instance = Instance("fuzz", (), name, f"sm_{major}{minor}", source)
        attributes = program.attributes(instance)
        if flip(rng, 0.3):
            attributes["cubin"] = _damaged(rng, attributes["cubin"])
        return Call("tcgemm_kernel", "kernel", attributes, [], [Buffer("pred", (1,))])

    @staticmethod
    def names(attributes) -> tuple[list[str], list[str]]:
        return [], ["kernel"]

    @staticmethod
    def expected(call: Call) -> list:
        return [None]


def _damaged(rng, text: str) -> str:
    """Another base64 text, as likely as not of a cubin."""
    data = bytearray(base64.b64decode(text))
    for _ in range(int(rng.integers(1, 4))):
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    return base64.b64encode(data[: int(rng.integers(len(data) // 2, len(data) + 1))]).decode()


def targets() -> tuple:
    """Every target of the GPU that is there."""
    found = (*HOST, Transpose, Reduce, Packed, Quantize, Split, FragmentProbe, FragmentMma, Kernel)
    return found if modules.cutensor_reason() else (*found, Tensor)


def platform() -> Platform:
    """The first GPU's implementations, with the vendor's libraries opened."""
    modules.cublaslt_reason()
    modules.cublas_reason()
    return Platform("cuda", modules.cuda, target_device("cuda").query())
