"""Valid calls of every FFI target, drawn at random, and what any accepted call must give.

References work from attributes and buffers alone, by the equations at the head of csrc/core/*.h, so
that they also say what a mutated call must give when it is accepted. Numbers are small integers,
which most types hold exactly.
"""

import dataclasses

import numpy as np
from ffi_frame import NUMPY, Buffer
from host_call import CASES, SHORT

LONG = {long: short for short, long in SHORT.items()}
# dtypes of A, B and D and the accumulator.
TYPES = [(*(LONG[name] for name in case[:3]), case[3]) for case in CASES.values()]
FLOATS = ("f16", "bf16", "f32", "f64")


@dataclasses.dataclass
class Call:
    """A call of a target; `key` is the attribute that holds the others, "" when there is none."""

    target: str
    key: str
    attributes: dict
    operands: list[Buffer]
    results: list[Buffer]
    at_end: bool = True

    @property
    def encoded(self) -> dict:
        """The attributes as the program has them."""
        return {self.key: self.attributes} if self.key else self.attributes

    def __str__(self) -> str:
        def of(buffer):
            shared = "" if buffer.shares is None else f" in operand {buffer.shares}"
            return f"{buffer.dtype}{list(buffer.shape)}{shared}"

        operands, results = (", ".join(map(of, x)) for x in (self.operands, self.results))
        where = "end" if self.at_end else "begin"
        return (
            f"{self.target}({operands}) -> ({results}), which {where} at a page\n{self.attributes}"
        )


@dataclasses.dataclass(frozen=True)
class Expected:
    """A result as it must be.

    Attributes:
      values: in double precision; integers of an int32 result before they wrap.
      magnitude: what the rounding of each element is relative to.
      tolerance: the largest error relative to it.
    """

    values: np.ndarray
    magnitude: np.ndarray
    tolerance: float


ROUNDING = {
    "f16": 4e-3,
    "bf16": 3e-2,
    "f32": 1e-4,
    "f64": 1e-9,
    "c64": 1e-4,
    "c128": 1e-9,
    "s32": 0,
}


class Platform:
    """The implementations that calls are made for: those of the host, or of a GPU.

    Args:
      name: "host" or "cuda".
      module: the compiled module.
      device: as its queries take it.
    """

    def __init__(self, name: str, module, device: dict):
        self.name, self.module, self.device = name, module, device
        self.abi = module.abi_version

    def choose(self, rng, queries, query: dict) -> tuple[str, str, int]:
        """An implementation, a config that runs the problem if there is one, and its workspace."""
        every = queries.implementations()
        for name in map(str, rng.permutation(list(every))[:3]):
            for config in map(str, (*rng.choice(every[name], 6), every[name][0])):
                if not queries.reject(name, config, query, self.device):
                    return name, config, queries.workspace_bytes(name, config, query, self.device)
        return name, config, 0


def draw(rng, dtype: str, shape) -> Buffer:
    """Small integers."""
    return Buffer.of(numbers(rng, dtype, shape), dtype)


def numbers(rng, dtype: str, shape) -> np.ndarray:
    values = rng.integers(0 if dtype.startswith("u") else -2, 3, shape)
    if dtype in ("c64", "c128"):
        values = values + 1j * rng.integers(-2, 3, shape)
    return values.astype(NUMPY[dtype])


def wide(buffer: Buffer) -> np.ndarray:
    """The elements in double precision, in one dimension."""
    flat = buffer.array().ravel()
    return flat.astype(np.complex128 if flat.dtype.kind == "c" else np.float64)


def anything(result: Buffer) -> Expected:
    """Of a result that is written whole, whatever it is."""
    unknown = np.full(result.shape, np.nan)
    return Expected(unknown, unknown, 0)


def _is_extreme(*scalars: float) -> bool:
    """Whether one is no number, or none that every type has."""
    return not all(abs(x) < 1e30 and (x == 0 or abs(x) > 1e-30) for x in scalars)


def flip(rng, chance: float = 0.5) -> bool:
    return bool(rng.random() < chance)


def one_of(rng, values):
    return values[rng.integers(len(values))]


def extent(rng, least: int = 0) -> int:
    """Mostly small; sometimes over a tile."""
    return int(rng.integers(least, 10)) if flip(rng, 0.85) else int(rng.integers(10, 70))


# --- products -------------------------------------------------------------------------------------


class Gemm:
    """tcgemm_gemm: csrc/core/problem.h."""

    target, key = "tcgemm_gemm", "gemm"

    @staticmethod
    def draw(rng, platform: Platform) -> Call:
        a_type, b_type, out, compute = one_of(rng, TYPES)
        outer, inner = (int(x) for x in rng.integers(1, 3, 2))
        if flip(rng, 0.03):
            outer = 0
        m, n, k = (extent(rng) for _ in range(3))
        attributes = {"abi": platform.abi, "compute": compute, "batch": outer * inner}
        attributes |= {"batch_inner": inner, "m": m, "n": n, "k": k}
        attributes["alpha"] = float(one_of(rng, [1, 1, 2, -1]))
        attributes["beta"] = float(one_of(rng, [0, 0, 1, -1]))
        attributes["scales"] = []
        attributes |= {"symmetric": False} | _NO_EPILOGUE
        sizes = []
        for side, (rows, columns) in (("a", (m, k)), ("b", (k, n))):
            transposed = flip(rng)
            if transposed:
                rows, columns = columns, rows
            ld = columns + int(rng.integers(0, 4) * flip(rng, 0.3))
            matrix = rows * ld + int(rng.integers(0, 3) * flip(rng, 0.2))
            inner_stride = 0 if flip(rng, 0.2) else matrix
            outer_stride = 0 if flip(rng, 0.2) else max(inner_stride * inner, 0)
            attributes |= {f"{side}_transposed": transposed, f"{side}_ld": ld}
            attributes |= {f"{side}_outer_stride": outer_stride}
            attributes |= {f"{side}_inner_stride": inner_stride}
            sizes.append(max(outer * inner, 1) * matrix + ld)
        dtypes = {"a_dtype": a_type, "b_dtype": b_type, "out_dtype": out}
        name, config, workspace = platform.choose(rng, platform.module, attributes | dtypes)
        attributes |= {"implementation": name, "config": config}

        batch = outer * inner
        drawn = {
            "a": lambda: draw(rng, a_type, (sizes[0],)),
            "b": lambda: draw(rng, b_type, (sizes[1],)),
            "c": lambda: draw(rng, out, (batch, m, n)),
            "d": lambda: Buffer(out, (batch, m, n)),
        }
        operands, results = Gemm.names(attributes)
        call = Call("tcgemm_gemm", "gemm", attributes, [], [], flip(rng, 0.7))
        call.operands = [drawn[name]() for name in operands]
        call.results = [drawn[name]() for name in results]
        if flip(rng, 0.3) and "c" in operands:
            call.results[0].shares = operands.index("c")
        if workspace or flip(rng, 0.1):
            call.results.append(Buffer("u8", (workspace,)))
        return call

    @staticmethod
    def names(attributes) -> tuple[list[str], list[str]]:
        return ["a", "b", *["c"] * (attributes["beta"] != 0)], ["d"]

    @staticmethod
    def expected(call: Call) -> list:
        p = call.attributes
        operand_names, result_names = Gemm.names(p)
        if len(call.operands) > len(operand_names):  # C is there and is not read.
            operand_names.append("c")
        given = dict(zip(operand_names, call.operands, strict=True))
        types = {name: x.dtype for name, x in zip(result_names, call.results, strict=False)}
        batch, inner, m, n, k = (p[name] for name in ("batch", "batch_inner", "m", "n", "k"))
        if batch * m * n == 0:
            return [None] * len(call.results)
        scalars = p["alpha"], p["beta"]
        if _is_extreme(*scalars):
            return [anything(result) for result in call.results[: len(result_names)]]
        entries = np.arange(batch)

        def matrices(side: str, flat: np.ndarray, rows: int, columns: int) -> np.ndarray:
            start = entries // inner * p[f"{side}_outer_stride"]
            start = start + entries % inner * p[f"{side}_inner_stride"]
            i, j = np.arange(rows)[:, None], np.arange(columns)
            i, j = (j, i) if p[f"{side}_transposed"] else (i, j)
            return flat[start[:, None, None] + i * p[f"{side}_ld"] + j]

        a = matrices("a", wide(given["a"]), m, k)
        b = matrices("b", wide(given["b"]), k, n)
        d = p["alpha"] * (a @ b)
        magnitude = max(abs(p["alpha"]), 1) * (np.abs(a) @ np.abs(b))
        if p["beta"] != 0:
            c = wide(given["c"])[: d.size].reshape(d.shape)
            d, magnitude = d + p["beta"] * c, magnitude + np.abs(p["beta"] * c)
        tolerance = ROUNDING[types["d"]] + (2e-3 if p["compute"] in ("tf32", "f16") else 0)
        return [Expected(d, magnitude, tolerance)]


NO_FUNCTION = {
    **{"function": "", "function_library": "none"},
    **{"function_reads": [], "function_indices": [], "function_results": []},
}
_NO_EPILOGUE = {"gated": False, "up_offset": 0} | NO_FUNCTION


class Ragged:
    """tcgemm_ragged: csrc/core/ragged_problem.h."""

    target, key = "tcgemm_ragged", "ragged"

    @staticmethod
    def draw(rng, platform: Platform) -> Call:
        in_type, _, out, compute = one_of(rng, [t for t in TYPES if t[0] == t[1]])
        batch = int(rng.integers(1, 3)) if flip(rng, 0.97) else 0
        m, n, k = (extent(rng) for _ in range(3))
        groups = int(rng.integers(0, 5))
        num_sizes = groups + int(rng.integers(0, 3))
        rows = flip(rng)
        p = {"abi": platform.abi, "form": "rows" if rows else "contraction", "compute": compute}
        p |= {"batch": batch, "m": m, "n": n, "k": k, "groups": groups, "num_sizes": num_sizes}
        p |= {name: flip(rng) for name in ("a_batched", "b_batched", "sizes_batched", "gathered")}
        p |= {"gated": False, "b_transposed": rows and flip(rng), "tokens_last": False}
        p |= {"scales": []} | NO_FUNCTION
        p["a_rows"] = int(rng.integers(0, 9)) if p["gathered"] else 0
        query = p | {"in_dtype": in_type, "out_dtype": out}
        name, config, workspace = platform.choose(rng, platform.module.ragged, query)
        p |= {"implementation": name, "config": config}

        tokens, a_columns = (m, k) if rows else (k, m)

        def times(flag):
            return batch if p[flag] else 1

        a_rows = p["a_rows"] if p["gathered"] else tokens
        operands = [
            draw(rng, in_type, (times("a_batched") * a_rows * a_columns,)),
            draw(rng, in_type, (times("b_batched") * (groups if rows else 1) * k * n,)),
            Buffer.of(rng.integers(-1, 6, (times("sizes_batched"), num_sizes), np.int32), "s32"),
            Buffer.of(rng.integers(-1, 4, times("sizes_batched"), np.int32), "s32"),
        ]
        if p["gathered"]:
            gather = rng.integers(-1, p["a_rows"] + 1, (times("sizes_batched"), tokens), np.int32)
            operands.append(Buffer.of(gather, "s32"))
        results = [Buffer(out, (batch, *(() if rows else (groups,)), m, n))]
        if workspace or flip(rng, 0.1):
            results.append(Buffer("u8", (workspace,)))
        return Call("tcgemm_ragged", "ragged", p, operands, results, flip(rng, 0.7))

    @staticmethod
    def names(attributes) -> tuple[list[str], list[str]]:
        operands = ["a", "b", "group_sizes", "group_offset"]
        operands += ["gather"] * attributes["gathered"]
        return operands, ["d"]

    @staticmethod
    def expected(call: Call) -> list:
        p = call.attributes
        given = dict(zip(Ragged.names(p)[0], call.operands, strict=True))
        batch, m, n, k, groups = (p[name] for name in ("batch", "m", "n", "k", "groups"))
        rows = p["form"] == "rows"
        shape = (batch, m, n) if rows else (batch, groups, m, n)
        d, magnitude = np.zeros(shape, np.complex128), np.zeros(shape)
        if d.size == 0:
            return [None] * len(call.results)
        tokens, a_columns = (m, k) if rows else (k, m)
        a_rows = p["a_rows"] if p["gathered"] else tokens

        def of_entry(name, entry, flag, elements):
            flat = given[name].array().ravel() if name.startswith("g") else wide(given[name])
            return flat[(entry if p[flag] else 0) * elements :][:elements]

        for entry in range(batch):
            a = of_entry("a", entry, "a_batched", a_rows * a_columns).reshape(a_rows, a_columns)
            if p["gathered"]:
                gather = of_entry("gather", entry, "sizes_batched", tokens)
                inside = (gather >= 0) & (gather < a_rows)
                a = np.concatenate([a, np.zeros((1, a_columns))])[np.where(inside, gather, a_rows)]
            b_elements = (groups if rows else 1) * k * n
            b = of_entry("b", entry, "b_batched", b_elements)
            sizes = of_entry("group_sizes", entry, "sizes_batched", p["num_sizes"]).astype(np.int64)
            offset = int(of_entry("group_offset", entry, "sizes_batched", 1)[0])
            ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), tokens)
            ends = np.concatenate([[0], ends, np.full(groups + 1, ends[-1] if len(ends) else 0)])
            first = min(max(offset, 0), p["num_sizes"])
            for g in range(groups):
                own = slice(int(ends[first + g]), int(ends[first + g + 1]))
                if not rows:
                    right = b.reshape(k, n)[own]
                    d[entry, g] = a[own].T @ right
                    magnitude[entry, g] = np.abs(a[own].T) @ np.abs(right)
                    continue
                matrix = b.reshape(groups, -1)[g]
                matrix = matrix.reshape(n, k).T if p["b_transposed"] else matrix.reshape(k, n)
                z = a[own] @ matrix
                size = np.abs(a[own]) @ np.abs(matrix)
                d[entry, own], magnitude[entry, own] = z, 1 + size
        tolerance = ROUNDING[call.results[0].dtype] + (
            2e-3 if p["compute"] in ("tf32", "f16") else 0
        )
        if call.results[0].dtype not in ("c64", "c128"):
            d = d.real
        return [Expected(d, magnitude, tolerance)]


class Rows:
    """tcgemm_rows: csrc/core/rows_problem.h."""

    target, key = "tcgemm_rows", "rows"

    @staticmethod
    def draw(rng, platform: Platform) -> Call:
        dtype = one_of(rng, FLOATS)
        accumulator = "f64" if dtype == "f64" else "f32"
        sums = flip(rng)
        p = {
            "abi": platform.abi,
            "form": "sums" if sums else "dots",
            "weighted": sums and flip(rng),
        }
        p |= {name: int(rng.integers(0, 9)) for name in ("a_rows", "b_rows", "targets", "pairs")}
        p["n"] = extent(rng)
        query = p | {"in_dtype": dtype}
        p["implementation"], p["config"], _ = platform.choose(rng, platform.module.rows, query)

        def indices(rows):
            return Buffer.of(rng.integers(-1, rows + 1, p["pairs"], np.int32), "s32")

        operands = [draw(rng, dtype, (p["a_rows"], p["n"]))]
        if sums:
            starts = np.sort(rng.integers(-1, p["pairs"] + 2, p["targets"] + 1, np.int32))
            operands += [indices(p["a_rows"]), Buffer.of(starts, "s32")]
            operands += [draw(rng, accumulator, (p["pairs"],))] if p["weighted"] else []
            results = [Buffer(dtype, (p["targets"], p["n"]))]
        else:
            operands += [draw(rng, dtype, (p["b_rows"], p["n"]))]
            operands += [indices(p["a_rows"]), indices(p["b_rows"])]
            results = [Buffer(accumulator, (p["pairs"],))]
        return Call("tcgemm_rows", "rows", p, operands, results, flip(rng, 0.7))

    @staticmethod
    def names(attributes) -> tuple[list[str], list[str]]:
        if attributes["form"] == "dots":
            return ["a", "b", "indices", "b_indices"], ["d"]
        return ["a", "indices", "starts"] + ["weights"] * attributes["weighted"], ["d"]

    @staticmethod
    def expected(call: Call) -> list:
        p = call.attributes
        given = dict(zip(Rows.names(p)[0], call.operands, strict=True))
        n, pairs = p["n"], p["pairs"]
        if (p["targets"] * n if p["form"] == "sums" else pairs) == 0:
            return [None]

        def rows_at(name, indices):
            rows = p[f"{name}_rows"]
            if rows == 0:  # Of which n may be anything.
                return np.zeros((pairs, 1)), np.zeros(pairs, bool)
            matrix = np.zeros((rows + 1, n))
            matrix[:rows] = wide(given[name])[: rows * n].reshape(rows, n)
            index = given[indices].array().ravel()[:pairs]
            inside = (index >= 0) & (index < rows)
            return matrix[np.where(inside, index, rows)], inside

        a, inside = rows_at("a", "indices")
        if p["form"] == "dots":
            b, inside_b = rows_at("b", "b_indices")
            both = np.where((inside & inside_b)[:, None], a * b, 0)
            d, magnitude = both.sum(-1), np.abs(both).sum(-1)
        else:
            if p["weighted"]:
                a = a * np.where(inside, wide(given["weights"])[:pairs], 0)[:, None]
            starts = np.clip(given["starts"].array().ravel().astype(np.int64), 0, pairs)
            d, magnitude = np.zeros((2, p["targets"], n))
            for t in range(p["targets"]):
                own = slice(starts[t], max(starts[t + 1], starts[t]))
                d[t], magnitude[t] = a[own].sum(0), np.abs(a[own]).sum(0)
        return [Expected(d, magnitude + 1, ROUNDING[call.results[0].dtype])]


# --- BLAS -----------------------------------------------------------------------------------------

ROUTINES = (
    *("iamax", "iamin", "asum", "nrm2", "dot", "scal", "axpy", "swap", "gemv", "gbmv"),
    *("trsv", "trsm", "gemm"),
)
_HAS_C = ROUTINES[5:]
_HAS_BETA = ("gemv", "gbmv", "gemm")
_SOLVES = ("trsv", "trsm")


def _blas_shapes(p: dict) -> dict[str, tuple[int, int]]:
    """Rows and columns of the arrays of a routine; a vector is a column."""
    m, n, k, routine = p["m"], p["n"], p["k"], p["routine"]
    x, y = (n, m) if p["op_a"] == "N" else (m, n)
    return {
        "gemv": {"a": (m, n), "b": (x, 1), "c": (y, 1)},
        "gbmv": {"a": (m, p["kl"] + p["ku"] + 1), "b": (x, 1), "c": (y, 1)},
        "trsv": {"a": (m, m), "c": (m, 1)},
        "trsm": {"a": (n, n) if p["right"] else (m, m), "c": (m, n)},
        "gemm": {
            "a": (m, k) if p["op_a"] == "N" else (k, m),
            "b": (k, n) if p["op_b"] == "N" else (n, k),
            "c": (m, n),
        },
        "scal": {"c": (n, 1)},
        "swap": {"c": (n, 1), "b": (n, 1)},
        "axpy": {"a": (n, 1), "c": (n, 1)},
        "dot": {"a": (n, 1), "b": (n, 1)},
    }.get(routine, {"a": (n, 1)})


class Blas:
    """tcgemm_blas: csrc/core/blas.h."""

    target, key = "tcgemm_blas", "blas"

    @staticmethod
    def draw(rng, platform: Platform) -> Call:
        routine = one_of(rng, ROUTINES)
        dtype = one_of(rng, (*FLOATS, "c64", "c128"))
        is_complex = dtype.startswith("c")
        batch = int(rng.integers(1, 4)) if flip(rng) else 1
        items = {"swap": 2, "gemm": int(rng.integers(1, 4))}.get(routine, 1)
        p = {"abi": platform.abi, "routine": routine, "math": "default", "batch": batch}
        p |= {"items": items, "m": 1, "n": 1, "k": 1, "kl": 0, "ku": 0}
        ops = ["N", "T", "C"]
        p |= {"op_a": "N", "op_b": "N", "upper": False, "right": False, "unit": False}
        p |= {"atomics": False, "scalar_args": False, "has_c": routine in _HAS_C}
        for name, used in (
            ("m", routine in ROUTINES[8:]),
            ("n", routine != "trsv"),
            ("k", routine == "gemm"),
        ):
            p[name] = extent(rng, 1) if used else 1
        if routine == "gbmv":
            p |= {"kl": int(rng.integers(0, 4)), "ku": int(rng.integers(0, 4))}
            p["op_a"] = one_of(rng, ops[:2] if is_complex else ops)
        elif routine in ("dot", "gemv", "trsv", "trsm", "gemm"):
            p["op_a"] = one_of(rng, ops)
        if routine == "gemm":
            p["op_b"] = one_of(rng, ops)
        if routine in _SOLVES:
            p |= {"upper": flip(rng), "unit": flip(rng), "right": routine == "trsm" and flip(rng)}

        def scalar(used, unused):
            values = [one_of(rng, [0, 1, 2, -1]), int(rng.integers(-1, 2)) * is_complex]
            return [float(x) for x in (values if used else (unused, 0))]

        alpha = scalar(routine in ("scal", "axpy", "gemv", "gbmv", "trsm", "gemm"), 1)
        beta = scalar(routine in _HAS_BETA, 0)
        if routine in _HAS_BETA and flip(rng, 0.3):
            p["has_c"], beta = False, [0.0, 0.0]
        shapes = _blas_shapes(p)
        p |= {f"{name}_ld": 1 for name in "abc"} | {f"{name}_stride": 0 for name in "abc"}
        sizes = {}
        for name, (rows, columns) in shapes.items():
            written = name == "c" or routine == "swap"
            free = (not written or p["has_c"]) and not (name == "c" and routine == "gemm")
            ld = columns + (int(rng.integers(0, 3)) if free else 0)
            size = (rows - 1) * ld + columns
            stride = size + (int(rng.integers(0, 3)) if free else 0)
            p[f"{name}_ld"] = ld
            if batch > 1:
                p[f"{name}_stride"] = stride if written or flip(rng, 0.7) else 0
            sizes[name] = (batch - 1) * p[f"{name}_stride"] + size
            sizes[name] += int(rng.integers(0, 4)) if free and flip(rng, 0.3) else 0
        query = p | {"alpha_re": alpha[0], "alpha_im": alpha[1], "beta_re": beta[0]}
        query |= {"beta_im": beta[1], "dtype": dtype, "implementation": "", "config": ""}
        name, config, workspace = platform.choose(rng, platform.module.blas, query)
        p |= {"implementation": name, "config": config}
        p |= {"alpha_re": alpha[0], "alpha_im": alpha[1], "beta_re": beta[0], "beta_im": beta[1]}
        operands = []
        for name in ("a", "b") if routine != "swap" else ():
            operands += [draw(rng, dtype, (sizes[name],)) for _ in range(items) if name in sizes]
        if routine in _SOLVES:
            operands[0] = _with_diagonal(rng, operands[0], p)
        first_c = len(operands)
        in_place = (
            [sizes.get("c"), sizes.get("b")] if routine == "swap" else [sizes.get("c")] * items
        )
        if p["has_c"]:
            operands += [draw(rng, dtype, (size,)) for size in in_place]
        if routine in ("scal", "axpy", "gemv", "gbmv", "trsm", "gemm") and flip(rng, 0.2):
            p["scalar_args"] = True
            scale = dtype if dtype not in ("f16", "bf16") else "f32"
            for re, im in (alpha, beta):
                value = np.asarray(re + 1j * im if is_complex else re).astype(NUMPY[scale])
                operands.append(Buffer.of(value, scale))
        if p["has_c"] or routine in _HAS_C:
            results = [Buffer(dtype, (size,)) for size in in_place]
        else:
            results = [Buffer(_result_type(routine, dtype), (batch,))]
        if p["has_c"] and flip(rng):
            for i, result in enumerate(results):
                result.shares = first_c + i
        if workspace or flip(rng, 0.1):
            results.append(Buffer("u8", (workspace + (1 << 16 if workspace else 0),)))
        return Call("tcgemm_blas", "blas", p, operands, results, flip(rng, 0.7))

    @staticmethod
    def names(attributes) -> tuple[list[str], list[str]]:
        routine, items = attributes["routine"], attributes["items"]
        shapes = _blas_shapes(attributes)
        items = items if 0 <= items < 100 else 0
        operands = [x for x in "ab" if x in shapes and routine != "swap" for _ in range(items)]
        operands += ["c"] * (items * attributes["has_c"])
        operands += ["alpha", "beta"] * attributes["scalar_args"]
        return operands, ["the result"] * items

    @staticmethod
    def expected(call: Call) -> list:
        p = call.attributes
        operand_names, _ = Blas.names(p)
        if _is_extreme(p["alpha_re"], p["alpha_im"], p["beta_re"], p["beta_im"]):
            return [anything(result) for result in call.results[: p["items"]]]
        given = {}
        for name, buffer in zip(operand_names, call.operands, strict=True):
            given.setdefault(name, []).append(wide(buffer))
        return [_blas_item(p, given, item, call.results[item]) for item in range(p["items"])]


def _result_type(routine: str, dtype: str) -> str:
    if routine in ("iamax", "iamin"):
        return "s32"
    return {"c64": "f32", "c128": "f64"}.get(dtype, dtype) if routine in ("asum", "nrm2") else dtype


def _with_diagonal(rng, buffer: Buffer, p: dict) -> Buffer:
    """Triangles whose diagonal outweighs the rest, so that solving is harmless."""
    array = buffer.array().copy()
    order = _blas_shapes(p)["a"][0]
    for entry in range(p["batch"]):
        i = np.arange(order)
        array[entry * p["a_stride"] + i * (p["a_ld"] + 1)] = 8 * one_of(rng, [1, -1])
        if p["unit"]:  # Then what is beside it must be small.
            for row in range(order):
                start = entry * p["a_stride"] + row * p["a_ld"]
                array[start : start + order] = 0
                array[start + row] = 3
    return Buffer.of(array, buffer.dtype)


def _at(flat: np.ndarray, p: dict, name: str, entry: int, shape) -> np.ndarray:
    """One entry of an array, (rows, columns)."""
    rows, columns = np.arange(shape[0])[:, None], np.arange(shape[1])
    return flat[entry * p[f"{name}_stride"] + rows * p[f"{name}_ld"] + columns]


def _op(op: str, x: np.ndarray) -> np.ndarray:
    return {"N": lambda: x, "T": lambda: x.T, "C": lambda: x.conj().T}[op]()


def _blas_item(p: dict, given: dict, item: int, result: Buffer) -> Expected:
    """Result `item` of a call, all of the batch."""
    routine, shapes = p["routine"], _blas_shapes(p)
    alpha, beta = p["alpha_re"] + 1j * p["alpha_im"], p["beta_re"] + 1j * p["beta_im"]
    if p["scalar_args"]:
        alpha, beta = given["alpha"][0][0], given["beta"][0][0]
    if routine not in _HAS_C:
        values = np.array([_reduced(p, given, shapes, entry) for entry in range(p["batch"])])
        return Expected(
            values, np.abs(values) + 10, 0 if result.dtype == "s32" else ROUNDING[result.dtype]
        )
    size = int(np.prod(result.shape))
    d = np.zeros(size, np.complex128)
    magnitude = np.ones(size)
    if p["has_c"]:
        d[:] = given["c"][item]
        magnitude = np.abs(d) + 1
    for entry in range(p["batch"]):
        arrays = {
            name: _at(given[name][item], p, name, entry, shapes[name])
            for name in "ab"
            if name in shapes and name in given
        }
        own = "b" if routine == "swap" and item == 1 else "c"
        rows, columns = np.arange(shapes[own][0])[:, None], np.arange(shapes[own][1])
        where = entry * p[f"{own}_stride"] + rows * p[f"{own}_ld"] + columns
        c = d[where]
        if routine == "swap":
            other = "c" if item == 1 else "b"
            new = _at(given["c"][1 - item], p, other, entry, shapes[other])
        else:
            new = _updated(p, arrays, c, alpha, beta)
        d[where] = new
        spread = [np.abs(x).max(initial=0) for x in (*arrays.values(), c, new)]
        magnitude[where] = 1 + max(abs(alpha), 1) * np.prod([1 + x for x in spread]) * max(
            1, *map(int, shapes[own])
        )
    return Expected(d, magnitude, ROUNDING[result.dtype])


def _updated(p: dict, arrays: dict, c, alpha, beta) -> np.ndarray:
    """What one entry of c becomes."""
    routine, a, b = p["routine"], arrays.get("a"), arrays.get("b")
    scaled = beta * c if p["has_c"] and beta != 0 else 0
    match routine:
        case "scal":
            return alpha * c
        case "axpy":
            return alpha * a + c
        case "gemv":
            return alpha * (_op(p["op_a"], a) @ b) + scaled
        case "gemm":
            return alpha * (_op(p["op_a"], a) @ _op(p["op_b"], b)) + scaled
        case "gbmv":
            full = np.zeros((p["m"], p["n"]), np.complex128)
            for i in range(p["m"]):
                for j in range(max(0, i - p["kl"]), min(p["n"], i + p["ku"] + 1)):
                    full[i, j] = a[i, p["kl"] + j - i]
            return alpha * (_op(p["op_a"], full) @ b) + scaled
    triangle = np.triu(a) if p["upper"] else np.tril(a)
    if p["unit"]:
        np.fill_diagonal(triangle, 1)
    triangle = _op(p["op_a"], triangle)
    alpha = 1 if routine == "trsv" else alpha
    if not np.isfinite(triangle).all() or not np.linalg.cond(triangle) < 1e3:
        return np.full(c.shape, np.nan)  # What comes out is not for comparison.
    if p["right"]:
        return np.linalg.solve(triangle.T, alpha * c.T).T
    return np.linalg.solve(triangle, alpha * c)


def _reduced(p: dict, given: dict, shapes: dict, entry: int):
    """What one entry of a reduction gives."""
    x = _at(given["a"][0], p, "a", entry, shapes["a"])[:, 0]
    parts = np.abs(x.real) + np.abs(x.imag)
    match p["routine"]:
        case "asum":
            return parts.sum()
        case "nrm2":
            return np.sqrt((np.abs(x) ** 2).sum())
        case "dot":
            y = _at(given["b"][0], p, "b", entry, shapes["b"])[:, 0]
            return ((x.conj() if p["op_a"] == "C" else x) * y).sum()
    if np.isnan(parts).any():
        return np.nan
    return 1 + (np.argmax(parts) if p["routine"] == "iamax" else np.argmin(parts))


HOST = (Gemm, Ragged, Rows, Blas)
