"""Instances of every kernel that ships, for the targets that it has."""

import dataclasses
import itertools
import re
from pathlib import Path

from jax_tcgemm import _build
from jax_tcgemm.kernels import Instance

INCLUDE = Path(_build.__file__).parent / "include"

WGMMA, MMA_SYNC = "tcgemm::wgmma_family", "tcgemm::mma"
TILE = "tcgemm::tile"
BF16, TF32 = "__nv_bfloat16", "tcgemm::ptx::TF32"
E4M3, E5M2 = "tcgemm::ptx::E4M3", "tcgemm::ptx::E5M2"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """What a kernel multiplies.

    Attributes:
      a, b: elements of the operands in memory.
      mma: types of the instruction: of A, of B, of sums.
      a_mn, b_mn: the Source of an operand that is not K-major; None: it has to be.
      k_major: the Source of one that is.
      promote_every: of how many elements of K the tensor core adds up products; 0: of all.
    """

    a: str
    b: str
    mma: tuple[str, str, str]
    a_mn: str | None = "kShared"
    b_mn: str | None = "kShared"
    k_major: str = "kShared"
    promote_every: int = 0

    @property
    def layouts(self) -> tuple[str, ...]:
        """Of A and B: "0" for K-major, "1" for M- or N-major."""
        majors = ("01" if source else "0" for source in (self.a_mn, self.b_mn))
        return tuple(map("".join, itertools.product(*majors)))

    @property
    def mma_type(self) -> str:
        return f"{TILE}::Mma<{', '.join(self.mma)}, {self.promote_every}>"

    def operands_type(self, layout: str, scaled_rows: tuple[int, int] = (0, 0)) -> str:
        both = (self.a, self.a_mn), (self.b, self.b_mn)
        types = [
            f"{TILE}::Operand<{element}, {TILE}::Major::{'kMN' if mn == '1' else 'kK'},"
            f" {TILE}::Source::{source if mn == '1' else self.k_major}"
            f"{f', {rows}' if rows else ''}>"
            for mn, (element, source), rows in zip(layout, both, scaled_rows, strict=True)
        ]
        return f"{TILE}::Operands<{', '.join(types)}>"


def _f8(a: str, b: str, promote_every: int = 128) -> Instruction:
    mn = {"a_mn": None, "b_mn": None}
    return Instruction(a, b, (a, b, "float"), **mn, promote_every=promote_every)


def _integers(a: str, b: str) -> Instruction:
    return Instruction(a, b, (a, b, "int32_t"), a_mn=None, b_mn=None)


# As in csrc/kernels/wgmma/instructions.h; names with a comma are those of A's and B's dtypes.
WGMMA_INSTRUCTIONS = {
    "bf16": Instruction(BF16, BF16, (BF16, BF16, "float")),
    "bf16 promoted": Instruction(BF16, BF16, (BF16, BF16, "float"), promote_every=64),
    "f16": Instruction("__half", "__half", ("__half", "__half", "float")),
    "tf32": Instruction("float", "float", (TF32, TF32, "float"), "kTransposed", None),
    "f8e4m3fn,f8e4m3fn": _f8(E4M3, E4M3),
    "f8e4m3fn,f8e5m2": _f8(E4M3, E5M2),
    "f8e5m2,f8e4m3fn": _f8(E5M2, E4M3),
    "f8e5m2,f8e5m2": _f8(E5M2, E5M2),
    "f8e4m3fn,f8e4m3fn fast_accum": _f8(E4M3, E4M3, 0),
    "f8e4m3fn,f8e5m2 fast_accum": _f8(E4M3, E5M2, 0),
    "s8,s8": _integers("int8_t", "int8_t"),
    "s8,u8": _integers("int8_t", "uint8_t"),
    "u8,s8": _integers("uint8_t", "int8_t"),
    "u8,u8": _integers("uint8_t", "uint8_t"),
}


def _mma_sync(element: str, mma: tuple[str, str, str], b: str | None = None) -> Instruction:
    return Instruction(element, b or element, mma, *3 * ("kRegisters",))


# As in csrc/kernels/mma_sync/instructions.h.
MMA_SYNC_INSTRUCTIONS = {
    "f16": _mma_sync("__half", ("__half", "__half", "float")),
    "bf16": _mma_sync(BF16, (BF16, BF16, "float")),
    "f16_f16": _mma_sync("__half", ("__half", "__half", "__half")),
    "tf32": _mma_sync("float", (TF32, TF32, "float")),
    "s8": _mma_sync("int8_t", ("int8_t", "int8_t", "int32_t")),
    "u8": _mma_sync("uint8_t", ("uint8_t", "uint8_t", "int32_t")),
    "s8_u8": _mma_sync("int8_t", ("int8_t", "uint8_t", "int32_t"), "uint8_t"),
    "u8_s8": _mma_sync("uint8_t", ("uint8_t", "int8_t", "int32_t"), "int8_t"),
}


def wgmma(
    config: str,
    epilogue: str = "Bare",
    instruction: str = "bf16",
    layout: str = "01",
    kernel: str = "kernel",
    scaled_rows: tuple[int, int] = (0, 0),
) -> Instance:
    """`config`: the arguments of its Config; `scaled_rows`: of Operand, of A and of B."""
    types = WGMMA_INSTRUCTIONS[instruction]
    arguments = (
        f"{WGMMA}::Config<{config}>",
        types.mma_type,
        types.operands_type(layout, scaled_rows),
        f"{WGMMA}::{epilogue}",
    )
    return Instance(
        "wgmma",
        (f"kernels/wgmma/{kernel}.cuh",),
        f"{WGMMA}::{kernel}<{', '.join(arguments)}>",
        "sm_90a",
    )


def wgmma_ragged(config: str, epilogue: str = "Bare", instruction: str = "bf16", **how) -> Instance:
    """The same for grouped products: tokens are K-major of form rows, whose configs are swapped."""
    is_rows = config.endswith("true")
    has_layouts = WGMMA_INSTRUCTIONS[instruction].a_mn is not None
    layout = "00" if not has_layouts else "10" if is_rows else "11"
    return wgmma(config, epilogue, instruction, layout, kernel="ragged_kernel", **how)


def second_kernel(function) -> Instance:
    """Of a function of sums that another kernel has left in the workspace."""
    name = f"tcgemm::epilogue::function_kernel<tcgemm::elementwise::{function.name}>"
    headers = ("epilogue/function_kernel.cuh",)
    return Instance("wgmma", headers, name, "sm_90", function.definitions)


def mma_sync(
    tile: str,
    epilogue: str | None = "Bare",
    instruction: str = "bf16",
    layout: str = "00",
    target: str = "sm_80",
) -> Instance:
    """`tile`: the arguments of its Config; without an epilogue: of grouped products."""
    types = MMA_SYNC_INSTRUCTIONS[instruction]
    arguments = [f"{MMA_SYNC}::Config<{tile}>", types.mma_type, types.operands_type(layout)]
    header, kernel = ("kernel", "gemm_kernel") if epilogue else ("ragged_kernel",) * 2
    if epilogue:
        arguments.append(f"{MMA_SYNC}::{epilogue}")
    return Instance(
        "mma_sync",
        (f"kernels/mma_sync/{header}.cuh",),
        f"{MMA_SYNC}::{kernel}<{', '.join(arguments)}>",
        target,
    )


def wmma_tiled(
    shape: str,
    tile: str,
    function: str,
    layout: str = "AnyLayout",
    types: tuple[str, str] = (BF16, "float"),
    target: str = "sm_90",
) -> Instance:
    """One that runs a function of its sums; `shape`, `tile`: the arguments of Shape and of Tile."""
    wmma = "tcgemm::wmma"
    config = (f"{wmma}::Shape<{shape}>", f"{wmma}::Tile<{tile}>", f"{wmma}::{layout}", "false")
    epilogue = f"tcgemm::epilogue::Function<tcgemm::elementwise::{function}>"
    arguments = f"{wmma}::TiledConfig<{', '.join(config)}>", *types, epilogue
    return Instance(
        "wmma",
        ("kernels/wmma/tiled_kernel.cuh",),
        f"{wmma}::tiled_kernel<{', '.join(arguments)}>",
        target,
    )


def portable(family: str, kernel: str, arguments: str, target: str) -> Instance:
    """One of simt or wmma."""
    return Instance(
        family,
        (f"kernels/{family}/{kernel}.cuh",),
        f"tcgemm::{family}::{kernel}<{arguments}>",
        target,
    )


def instances() -> dict[str, Instance]:
    """One of each kernel, quick to compile; the portable ones for either target in turns."""
    bare = "tcgemm::FloatOutputs<tcgemm::epilogue::Identity, float>"
    simt, wmma = "tcgemm::simt", "tcgemm::wmma"
    small = "64, 64, 128, 32, 32, 4, 3"
    tile = f"{wmma}::M16N16K16, {wmma}::Tile64x64x32, {wmma}::OneLayout<false, true>"
    exact = "tcgemm::Output<double, tcgemm::epilogue::AlphaBetaC<double, double>>"
    return {
        "simt_naive": portable("simt", "naive_kernel", f"float, float, {bare}", "sm_80"),
        "simt_tiled": portable(
            *("simt", "tiled_kernel"),
            f"{simt}::TiledConfig<{simt}::Tile64x64x8Wide, false, true>, double, {exact}",
            "sm_90a",
        ),
        "simt_batched": Instance(
            "simt_batched",
            ("kernels/batched/kernel.cuh",),
            "tcgemm::batched::kernel<tcgemm::batched::Config<float, float, 11, 11, 11, false, "
            "true, 1, 12, 4, 1, 4, 1, 0, 0, 0, 7>>",
            "sm_80",
        ),
        "wmma_naive": portable(
            *("wmma", "naive_kernel"),
            f"{wmma}::NaiveConfig<{wmma}::M16N16K16>, __half, float, {bare}",
            "sm_90a",
        ),
        "wmma_tiled": portable(
            *("wmma", "tiled_kernel"),
            f"{wmma}::TiledConfig<{tile}>, __nv_bfloat16, float, {bare}",
            "sm_80",
        ),
        "mma_sync_sm80": mma_sync(small),
        "mma_sync_sm90": mma_sync(small, target="sm_90"),
        "mma_sync_symmetric": mma_sync(small, f"Symmetric<{MMA_SYNC}::Bare>"),
        "mma_sync_ragged": mma_sync("128, 128, 64, 64, 64, 4, 2", None),
        "wgmma": wgmma("128, 256, 2, 1, 1, false, false"),
        "wgmma_ragged": wgmma_ragged("128, 64, 1, 1, 1, false, true"),
        "wgmma_ragged_shared": wgmma_ragged("256, 128, 1, 2, 1, false, true"),
    }


def _text(file: str) -> str:
    return (INCLUDE / "kernels" / file).read_text(encoding="utf-8")


def _table(file: str, macro: str) -> str:
    """The rows of a list of configs that ships: #define macro(X) X(...) ..."""
    return re.search(rf"#define {macro}\(X\)((?:.*\\\n)*.*\n)", _text(file))[1]


def all_mma_sync() -> dict[str, Instance]:
    """Every tile of config.h, each for all instructions and layouts in turns, on both targets."""
    found = {}
    tiles = re.findall(r"X\(([^)]*)\)", _table("mma_sync/config.h", "TCGEMM_MMA_SYNC_TILES"))
    everything = itertools.product(tiles, MMA_SYNC_INSTRUCTIONS.items(), ("sm_80", "sm_90"))
    for i, (row, (name, types), target) in enumerate(everything):
        *tile, of_every_type = row.split(", ")
        if of_every_type == "false" and name not in ("f16", "bf16"):
            continue
        epilogue = "Scaled" if types.mma[2] == "int32_t" else "Bare"
        layout = types.layouts[(i + i // 4) % 4]
        instance = mma_sync(", ".join(tile), epilogue, name, layout, target)
        found["-".join((*tile[:2], name, layout, epilogue, target))] = instance
        if layout in ("00", "11"):  # Those of an array and its own transpose.
            mirrored = f"Symmetric<{MMA_SYNC}::{epilogue}>"
            instance = mma_sync(", ".join(tile), mirrored, name, layout, target)
            found["-".join((*tile[:2], name, layout, "Symmetric", target))] = instance
    ragged = ", ".join(re.findall(r"kRaggedTile\{([^}]*)\}", _text("mma_sync/config.h")))
    for i, name in enumerate(("f16", "bf16", "tf32")):
        layout, target = ("00", "01", "11")[i], ("sm_80", "sm_90")[i % 2]
        found[f"ragged-{name}-{layout}-{target}"] = mma_sync(ragged, None, name, layout, target)
    return found


def all_wgmma() -> dict[str, Instance]:
    """Every config of config.h, in bfloat16."""

    def entries(macro: str) -> list[tuple[str, str]]:
        return re.findall(r'X\("([^"]+)", ([^)]*)\)', _table("wgmma/config.h", macro))

    found = {name: wgmma(config) for name, config in entries("TCGEMM_WGMMA_CONFIGS")}
    ragged = entries("TCGEMM_WGMMA_RAGGED_CONFIGS")
    return found | {f"{name}_ragged": wgmma_ragged(config) for name, config in ragged}
