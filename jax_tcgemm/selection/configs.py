"""Names of configs: their fields, parsing and printing.

Users, programs and tuned tables identify a config by its name. The kernels' own lists of names are
in csrc/kernels (`config.h`, `packed.cc`), where names are only printed.

    wgmma        128x256x64_c2x1x1_co[_t][_split4]
    mma_sync     64x64x64_w32x32_s4[_k2]
    wmma_*       m16n16k16[_128x128x32][_satf]
    packed       128x2_c4, w128x64_c2, w128x64_m2, d128x256_m2
    simt_*       128x64x16, 8x32; 128x128 of mma_sync's grouped products

Other names ("default", cuBLASLt's "heuristic3", the host's "avx512") have no fields.
"""

import dataclasses
import enum
import functools
import re
from typing import ClassVar, Self, get_args


class Schedule(enum.Enum):
    """Whether the consumer warpgroups of a CTA take turns or share a tile, as names spell it."""

    PINGPONG = "pp"
    COOPERATIVE = "co"


class _Named:
    """A config whose name has fields: `pattern` matches the name, `form` describes it to users."""

    form: ClassVar[str]
    pattern: ClassVar[re.Pattern]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the config with this name.

        Raises:
          ValueError: for any other name.
        """
        config = parse_or_none(text)
        if not isinstance(config, cls):
            raise ValueError(
                f"config must have the form {cls.form}, got config={text!r}; see jax_tcgemm.info()"
            )
        return config

    @classmethod
    def _of(cls, match: re.Match) -> Self:
        return cls(**_numbers(match))


@dataclasses.dataclass(frozen=True)
class WgmmaConfig(_Named):
    """A config of wgmma.

    Attributes:
      tile_m: rows of the CTA tile; with `swap_ab` columns of D.
      tile_n: columns of the CTA tile; with `swap_ab` rows of D.
      cluster_m: CTAs along M of a cluster, which share B by multicast.
      cluster_n: CTAs along N of a cluster, which share A by multicast.
      cluster_k: CTAs of a cluster that split K and add up through distributed shared memory.
      schedule: cooperative or ping-pong.
      swap_ab: whether the kernel computes D^T = B^T A^T.
      num_splits: number of splits of K, added up through the workspace; 1 for none.
      tile_k: depth of a k-tile, counted in 16-bit elements whatever the dtype: 128 bytes.
    """

    form = "128x256x64_c2x1x1_co, _pp for _co, then _t and _split4 if any"
    pattern = re.compile(
        r"(?P<tile_m>\d+)x(?P<tile_n>\d+)x64"
        r"_c(?P<cluster_m>\d+)x(?P<cluster_n>\d+)x(?P<cluster_k>\d+)"
        r"_(?P<schedule>pp|co)(?P<swap_ab>_t)?(?:_split(?P<num_splits>\d+))?"
    )

    tile_m: int
    tile_n: int
    cluster_m: int
    cluster_n: int
    cluster_k: int
    schedule: Schedule
    swap_ab: bool = False
    num_splits: int = 1
    tile_k: ClassVar[int] = 64

    @classmethod
    def _of(cls, match: re.Match) -> Self:
        # By position, in two thirds of the time: there are over a thousand configs.
        *numbers, schedule, swap_ab, num_splits = match.groups()
        splits = int(num_splits or 1)
        return cls(*map(int, numbers), Schedule(schedule), swap_ab is not None, splits)

    @property
    def unsplit(self) -> str:
        """Name of the config that has the same kernel and no split-K."""
        tile = f"{self.tile_m}x{self.tile_n}x{self.tile_k}"
        cluster = f"c{self.cluster_m}x{self.cluster_n}x{self.cluster_k}"
        return f"{tile}_{cluster}_{self.schedule.value}{'_t' if self.swap_ab else ''}"

    def __str__(self) -> str:
        return f"{self.unsplit}_split{self.num_splits}" if self.num_splits > 1 else self.unsplit


@dataclasses.dataclass(frozen=True)
class MmaSyncConfig(_Named):
    """A config of mma_sync for GEMMs.

    Attributes:
      tile_m: rows of the CTA tile.
      tile_n: columns of the CTA tile.
      tile_k: depth of a k-tile, in elements of what the instruction multiplies.
      warp_m: rows of the warp tile.
      warp_n: columns of the warp tile.
      stages: k-tiles in shared memory.
      num_splits: number of splits of K; 1 for none.
    """

    form = "64x64x64_w32x32_s4, then _k2 if any"
    pattern = re.compile(
        r"(?P<tile_m>\d+)x(?P<tile_n>\d+)x(?P<tile_k>\d+)"
        r"_w(?P<warp_m>\d+)x(?P<warp_n>\d+)_s(?P<stages>\d+)(?:_k(?P<num_splits>\d+))?"
    )

    tile_m: int
    tile_n: int
    tile_k: int
    warp_m: int
    warp_n: int
    stages: int
    num_splits: int = 1

    @property
    def unsplit(self) -> str:
        """Name of the config that has the same kernel and no split-K."""
        tile = f"{self.tile_m}x{self.tile_n}x{self.tile_k}"
        return f"{tile}_w{self.warp_m}x{self.warp_n}_s{self.stages}"

    def __str__(self) -> str:
        return f"{self.unsplit}_k{self.num_splits}" if self.num_splits > 1 else self.unsplit


@dataclasses.dataclass(frozen=True)
class WmmaConfig(_Named):
    """A config of wmma_naive or wmma_tiled.

    Attributes:
      mma_m: rows of the MMA shape.
      mma_n: columns of the MMA shape.
      mma_k: depth of the MMA shape.
      tile_m: rows of the CTA tile; None for wmma_naive, whose tile is the MMA shape.
      tile_n: columns of the CTA tile, or None.
      tile_k: depth of a k-tile, or None.
      saturates: whether accumulators stay finite after every step.
    """

    form = "m16n16k16, then _128x128x32 and _satf if any"
    pattern = re.compile(
        r"m(?P<mma_m>\d+)n(?P<mma_n>\d+)k(?P<mma_k>\d+)"
        r"(?:_(?P<tile_m>\d+)x(?P<tile_n>\d+)x(?P<tile_k>\d+))?(?P<saturates>_satf)?"
    )

    mma_m: int
    mma_n: int
    mma_k: int
    tile_m: int | None = None
    tile_n: int | None = None
    tile_k: int | None = None
    saturates: bool = False

    @classmethod
    def _of(cls, match: re.Match) -> Self:
        return cls(**_numbers(match), saturates=match["saturates"] is not None)

    def __str__(self) -> str:
        tile = "" if self.tile_m is None else f"_{self.tile_m}x{self.tile_n}x{self.tile_k}"
        saturates = "_satf" if self.saturates else ""
        return f"m{self.mma_m}n{self.mma_n}k{self.mma_k}{tile}{saturates}"


@dataclasses.dataclass(frozen=True)
class PackedConfig(_Named):
    """A config of packed that multiplies by mma.sync.

    Attributes:
      tile_n: columns of the weight in a CTA tile.
      warps_k: warps of a CTA that split a stage's K.
      cluster_k: CTAs of a cluster that split K.
    """

    form = "128x2_c4"
    pattern = re.compile(r"(?P<tile_n>\d+)x(?P<warps_k>\d+)_c(?P<cluster_k>\d+)")

    tile_n: int
    warps_k: int
    cluster_k: int

    def __str__(self) -> str:
        return f"{self.tile_n}x{self.warps_k}_c{self.cluster_k}"


@dataclasses.dataclass(frozen=True)
class WidePackedConfig(_Named):
    """A config of packed that multiplies by wgmma. Its cluster splits K or shares rows of x.

    Named "d", a warpgroup dequantizes the weight in shared memory; named "w", the warps that
    multiply convert it in registers.

    Attributes:
      tile_n: columns of the weight in a CTA tile.
      tile_m: rows of x in a CTA tile.
      cluster_k: CTAs of a cluster that split K.
      multicast_size: CTAs of a cluster that receive the same rows of x.
      dequantizes: whether the weight is dequantized in shared memory.
    """

    form = "w128x64_c2, w128x64_m2 or d128x256_c1"
    pattern = re.compile(
        r"(?:w|(?P<dequantizes>d))(?P<tile_n>\d+)x(?P<tile_m>\d+)_(?:c(?P<cluster_k>\d+)|m(?P<multicast_size>\d+))"
    )

    tile_n: int
    tile_m: int
    cluster_k: int = 1
    multicast_size: int = 1
    dequantizes: bool = False

    @classmethod
    def _of(cls, match: re.Match) -> Self:
        return cls(**_numbers(match), dequantizes=match["dequantizes"] is not None)

    def __str__(self) -> str:
        is_shared = self.multicast_size > 1
        cluster = f"m{self.multicast_size}" if is_shared else f"c{self.cluster_k}"
        family = "d" if self.dequantizes else "w"
        return f"{family}{self.tile_n}x{self.tile_m}_{cluster}"


@dataclasses.dataclass(frozen=True)
class TileConfig(_Named):
    """A config named by its CTA tile alone: of simt, and of mma_sync's grouped products.

    Attributes:
      tile_m: rows of the CTA tile.
      tile_n: columns of the CTA tile.
      tile_k: depth of a k-tile; None where the name does not say it.
    """

    form = "128x64x16 or 128x128"
    pattern = re.compile(r"(?P<tile_m>\d+)x(?P<tile_n>\d+)(?:x(?P<tile_k>\d+))?")

    tile_m: int
    tile_n: int
    tile_k: int | None = None

    def __str__(self) -> str:
        tile_k = "" if self.tile_k is None else f"x{self.tile_k}"
        return f"{self.tile_m}x{self.tile_n}{tile_k}"


Config = WgmmaConfig | MmaSyncConfig | WmmaConfig | PackedConfig | WidePackedConfig | TileConfig


def _numbers(match: re.Match) -> dict[str, int]:
    """Return the fields that are numbers; those that the name leaves out keep their default."""
    return {name: int(text) for name, text in match.groupdict().items() if text and text.isdigit()}


@functools.lru_cache(maxsize=4096)
def parse_or_none(text: str) -> Config | None:
    """Return the config with this name; None for a name without fields.

    A name matches at most one class. Names that print differently after parsing ("064x64x16",
    "_split1") are refused.
    """
    for cls in get_args(Config):
        if match := cls.pattern.fullmatch(text):
            config = cls._of(match)
            return config if str(config) == text else None
    return None


# --- accumulation order of wgmma's configs ------------------------------------------------------

# (cluster_k, num_splits) with the accumulation order of another pair: two slices of K, and four.
_SAME_ORDER = {(1, 2): (2, 1), (2, 2): (4, 1)}


def order_of_sums(config: str, reduces: bool = False) -> tuple:
    """Return a key that is equal for configs of wgmma with the same accumulation order.

    Args:
      config: the name of a config of wgmma.
      reduces: whether the epilogue also reduces over columns or rows; the order of that reduction
        depends on the layout of threads in a tile.
    """
    parsed = WgmmaConfig.parse(config)
    order = parsed.cluster_k, parsed.num_splits
    order = _SAME_ORDER.get(order, order)
    return (*order, parsed.swap_ab, parsed.num_splits) if reduces else order
