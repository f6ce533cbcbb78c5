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
OUTPUTS = ("epilogue/output.cuh", "epilogue/epilogue.cuh")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """What a kernel multiplies.

    Attributes:
      a, b: elements of the operands in memory.
      mma: types of the instruction: of A, of B, of sums.
      a_mn, b_mn: the Source of an operand that is not K-major; None: it has to be.
    """

    a: str
    b: str
    mma: tuple[str, str, str]
    a_mn: str | None = "kShared"
    b_mn: str | None = "kShared"

    @property
    def layouts(self) -> tuple[str, ...]:
        """Of A and B: "0" for K-major, "1" for M- or N-major."""
        majors = ("01" if source else "0" for source in (self.a_mn, self.b_mn))
        return tuple(map("".join, itertools.product(*majors)))

    @property
    def mma_type(self) -> str:
        return f"{TILE}::Mma<{', '.join(self.mma)}, 0>"

    def operands_type(self, layout: str) -> str:
        both = (self.a, self.a_mn), (self.b, self.b_mn)
        types = [
            f"{TILE}::Operand<{element}, {TILE}::Major::{'kMN' if mn == '1' else 'kK'},"
            f" {TILE}::Source::{source if mn == '1' else 'kShared'}>"
            for mn, (element, source) in zip(layout, both, strict=True)
        ]
        return f"{TILE}::Operands<{', '.join(types)}>"


# As in csrc/kernels/wgmma/instructions.h.
WGMMA_INSTRUCTIONS = {
    "bf16": Instruction(BF16, BF16, (BF16, BF16, "float")),
    "f16": Instruction("__half", "__half", ("__half", "__half", "float")),
    "tf32": Instruction("float", "float", (TF32, TF32, "float"), "kTransposed", None),
}


def wgmma(
    config: str,
    epilogue: str = "Bare",
    instruction: str = "bf16",
    layout: str = "01",
    kernel: str = "kernel",
) -> Instance:
    """`config`: the arguments of its Config."""
    types = WGMMA_INSTRUCTIONS[instruction]
    arguments = (
        f"{WGMMA}::Config<{config}>",
        types.mma_type,
        types.operands_type(layout),
        f"{WGMMA}::{epilogue}",
    )
    return Instance(
        "wgmma",
        (f"kernels/wgmma/{kernel}.cuh",),
        f"{WGMMA}::{kernel}<{', '.join(arguments)}>",
        "sm_90a",
    )


def wgmma_ragged(config: str, epilogue: str = "Bare") -> Instance:
    """The same for grouped products: tokens are K-major of form rows, whose configs are swapped."""
    layout = "10" if config.endswith("true") else "11"
    return wgmma(config, epilogue, layout=layout, kernel="ragged_kernel")


def mma_sync(kernel: str, *arguments: str, target: str) -> Instance:
    """`arguments` of the kernel, after the config."""
    config = f"{MMA_SYNC}::Config<{MMA_SYNC}::Tile64Stages4, false, true>"
    header = "kernel" if kernel == "gemm_kernel" else kernel
    return Instance(
        "mma_sync",
        (f"kernels/mma_sync/{header}.cuh",),
        f"{MMA_SYNC}::{kernel}<{', '.join((config, *arguments))}>",
        target,
    )


def portable(family: str, kernel: str, arguments: str, target: str) -> Instance:
    """One of simt or wmma."""
    return Instance(
        family,
        (f"kernels/{family}/{kernel}.cuh", f"kernels/{family}/config.h", *OUTPUTS),
        f"tcgemm::{family}::{kernel}<{arguments}>",
        target,
    )


def instances() -> dict[str, Instance]:
    """One of each kernel, quick to compile; the portable ones for either target in turns."""
    bare = "tcgemm::FloatOutputs<tcgemm::epilogue::Identity, float>"
    simt, wmma = "tcgemm::simt", "tcgemm::wmma"
    mma = f"{MMA_SYNC}::BF16F32"
    tile = f"{wmma}::M16N16K16, {wmma}::Tile64x64x32, {wmma}::OneLayout<false, true>"
    exact = "tcgemm::Output<double, tcgemm::epilogue::AlphaBetaC<double, double>>"
    return {
        "simt_naive": portable("simt", "naive_kernel", f"float, float, {bare}", "sm_80"),
        "simt_tiled": portable(
            *("simt", "tiled_kernel"),
            f"{simt}::TiledConfig<{simt}::Tile64x64x8Wide, false, true>, double, {exact}",
            "sm_90a",
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
        "mma_sync_sm80": mma_sync(
            "gemm_kernel", mma, "tcgemm::epilogue::Identity<float, void>", target="sm_80"
        ),
        "mma_sync_sm90": mma_sync(
            "gemm_kernel", mma, "tcgemm::epilogue::Identity<float, void>", target="sm_90a"
        ),
        "mma_sync_ragged": mma_sync("ragged_kernel", mma, target="sm_80"),
        "wgmma": wgmma("128, 256, 2, 1, 1, false, false"),
        "wgmma_fused": wgmma("64, 64, 1, 1, 1, true, false", "Fused"),
        "wgmma_ragged": wgmma_ragged("128, 64, 1, 1, 1, false, true"),
    }


def all_wgmma() -> dict[str, Instance]:
    """Every config of config.h and ragged_config.h that the build compiles, in bfloat16."""

    def entries(file: str, macro: str) -> list[tuple[str, str]]:
        text = (INCLUDE / "kernels/wgmma" / file).read_text(encoding="utf-8")
        table = re.search(rf"#define {macro}\(X\)((?:.*\\\n)*.*\n)", text)[1]
        return re.findall(r'X\("([^"]+)", ([^)]*)\)', table)

    found = {}
    for name, arguments in entries("config.h", "TCGEMM_WGMMA_CONFIGS"):
        *config, has_epilogue = arguments.split(", ")
        found[name] = wgmma(", ".join(config))
        if has_epilogue == "true":
            found[f"{name}_fused"] = wgmma(", ".join(config), "Fused")
    for name, arguments in entries("ragged_config.h", "TCGEMM_WGMMA_RAGGED_CONFIGS"):
        *tile, swapped, is_fused = arguments.split(", ")
        config = ", ".join((*tile, "1", "false", swapped))
        epilogue = "RaggedFused" if is_fused == "true" else "Bare"
        found[f"{name}_ragged_{epilogue}"] = wgmma_ragged(config, epilogue)
    return found
