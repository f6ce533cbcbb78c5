"""The names of configs: parsed, printed back, and what their fields say."""

import json
import re
from pathlib import Path

import pytest

from jax_tcgemm.selection import implementations, tables
from jax_tcgemm.selection.configs import (
    MmaSyncConfig,
    PackedConfig,
    Schedule,
    TileConfig,
    WgmmaConfig,
    WidePackedConfig,
    WmmaConfig,
    order_of_sums,
    parse_or_none,
)
from jax_tcgemm.system import modules

CSRC = Path(__file__).resolve().parents[1] / "csrc"

CLASSES = {
    ("wgmma", "gemm"): WgmmaConfig,
    ("wgmma", "ragged"): WgmmaConfig,
    ("mma_sync", "gemm"): MmaSyncConfig,
    ("mma_sync", "ragged"): TileConfig,
    ("wmma_tiled", "gemm"): WmmaConfig,
    ("wmma_naive", "gemm"): WmmaConfig,
    ("simt_tiled", "gemm"): TileConfig,
    ("simt_naive", "gemm"): TileConfig,
    ("packed", "packed"): PackedConfig | WidePackedConfig,
}
# The names of their configs have no fields.
WITHOUT_FIELDS = ("cublaslt", "cublas", "simt", "simt_batched", "quantize", "split", "host", "xla")


def source_of(path: str) -> str:
    return (CSRC / "kernels" / path).read_text("utf-8")


def built() -> list[tuple[str, str]]:
    """Each implementation with each kind of problem that it knows, but those of tensors."""
    return [
        (name, kind)
        for kind, names in implementations.IMPLEMENTATIONS_OF.items()
        for name in names
        if name in (*implementations.PLATFORM_OF, "xla") and kind != "contract"
    ]


@pytest.mark.parametrize(("name", "kind"), built())
def test_every_name_is_printed_back(name, kind):
    names = implementations.configs_of(name, kind)
    if not names:
        reason = modules.reason(implementations.PLATFORM_OF[name])
        pytest.skip(reason or f"{name} is not part of this build")
    found = [parse_or_none(each) for each in names]
    if name in WITHOUT_FIELDS:
        assert set(found) == {None}
        return
    assert all(isinstance(each, CLASSES[name, kind]) for each in found)
    assert tuple(map(str, found)) == names
    assert len(set(found)) == len(names)


def test_fields_of_wgmma_are_those_that_kernels_are_compiled_for():
    text = source_of("wgmma/config.h")
    rows = re.findall(r'X\("([^"]+)", ([^)]*)\)', text)
    assert len(rows) > 50
    for name, arguments in rows:
        *numbers, ping_pong, swap_ab = arguments.split(", ")
        schedule = Schedule.PINGPONG if ping_pong == "true" else Schedule.COOPERATIVE
        expected = WgmmaConfig(*map(int, numbers), schedule, swap_ab == "true")
        assert WgmmaConfig.parse(name) == expected
        assert str(expected) == expected.unsplit == name


def test_fields_of_packed_are_those_of_its_kernels():
    text = source_of("packed/packed.cc")
    rows = re.findall(r'ConfigEntry\{"([^"]+)", ([^}]*)\}', text)
    assert len(rows) > 20
    for name, arguments in rows:
        *numbers, last = arguments.split(", ")
        dequantizes = last == "true"
        columns, warps_k, cluster, *wide = map(int, numbers if dequantizes else [*numbers, last])
        if wide:
            rows, multicast_size = (*wide, 1)[:2]
            expected = WidePackedConfig(columns, rows, cluster, multicast_size, dequantizes)
        else:
            expected = PackedConfig(columns, warps_k, cluster)
        assert parse_or_none(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "128x256x64_c2x1x1_co",
            WgmmaConfig(128, 256, 2, 1, 1, Schedule.COOPERATIVE),
        ),
        (
            "64x16x64_c1x1x2_pp_t_split128",
            WgmmaConfig(64, 16, 1, 1, 2, Schedule.PINGPONG, swap_ab=True, num_splits=128),
        ),
        (
            "64x128x64_c4x2x1_pp_split3",
            WgmmaConfig(64, 128, 4, 2, 1, Schedule.PINGPONG, num_splits=3),
        ),
        ("128x256x64_w64x32_s3", MmaSyncConfig(128, 256, 64, 64, 32, stages=3)),
        ("64x64x128_w32x32_s4_k16", MmaSyncConfig(64, 64, 128, 32, 32, 4, num_splits=16)),
        ("m32n8k16", WmmaConfig(32, 8, 16)),
        ("m8n8k4_64x128x16", WmmaConfig(8, 8, 4, 64, 128, 16)),
        ("m16n16k16_128x128x32_satf", WmmaConfig(16, 16, 16, 128, 128, 32, saturates=True)),
        ("256x2_c8", PackedConfig(tile_n=256, warps_k=2, cluster_k=8)),
        ("w128x96_c2", WidePackedConfig(tile_n=128, tile_m=96, cluster_k=2)),
        ("w128x96_m2", WidePackedConfig(tile_n=128, tile_m=96, multicast_size=2)),
        ("d128x256_c1", WidePackedConfig(tile_n=128, tile_m=256, dequantizes=True)),
        ("128x64x16", TileConfig(128, 64, 16)),
        ("8x32", TileConfig(8, 32)),
    ],
)
def test_fields(name, expected):
    assert parse_or_none(name) == type(expected).parse(name) == expected
    assert str(expected) == name


def test_the_config_without_splits():
    assert WgmmaConfig.parse("64x64x64_c1x1x4_pp_t_split4").unsplit == "64x64x64_c1x1x4_pp_t"
    assert WgmmaConfig.parse("64x64x64_c1x1x4_pp").unsplit == "64x64x64_c1x1x4_pp"
    assert MmaSyncConfig.parse("64x64x64_w32x32_s4_k8").unsplit == "64x64x64_w32x32_s4"
    assert WgmmaConfig.parse("64x64x64_c1x1x4_pp").tile_k == 64


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (WgmmaConfig, ""),
        (WgmmaConfig, "128x256x64"),
        (WgmmaConfig, "128x256x64_c2x1_co"),
        (WgmmaConfig, "128x256x32_c2x1x1_co"),
        (WgmmaConfig, "128x256x64_c2x1x1_xx"),
        (WgmmaConfig, "128x256x64_c2x1x1_co_split4_t"),
        (WgmmaConfig, "128x256x64_c2x1x1_co_split"),
        (WgmmaConfig, "128x256x64_c2x1x1_co_split1"),
        (WgmmaConfig, "0128x256x64_c2x1x1_co"),
        (WgmmaConfig, " 128x256x64_c2x1x1_co"),
        (WgmmaConfig, "128x256x64_c2x1x1_co\n"),
        (WgmmaConfig, "\u0661\u0662x256x64_c2x1x1_co"),  # Arabic digits
        (WgmmaConfig, "64x64x64_w32x32_s4"),
        (MmaSyncConfig, "128x256x64_c2x1x1_co"),
        (MmaSyncConfig, "64x64x64_w32x32"),
        (MmaSyncConfig, "64x64x64_w32x32_s4_split2"),
        (WmmaConfig, "m16n16_128x128x32"),
        (WmmaConfig, "m16n16k16_128x128"),
        (PackedConfig, "w128x64_c1"),
        (PackedConfig, "128x2_m2"),
        (WidePackedConfig, "128x64_c1"),
        (WidePackedConfig, "w128x64_m1"),
        (TileConfig, "128"),
        (TileConfig, "default"),
    ],
)
def test_malformed_names_are_refused(cls, text):
    expected = f"config must have the form {cls.form}, got config={text!r}; see jax_tcgemm.info()"
    with pytest.raises(ValueError, match=re.escape(expected)):
        cls.parse(text)


def test_forms_begin_with_a_name():
    for cls in (WgmmaConfig, MmaSyncConfig, WmmaConfig, PackedConfig, WidePackedConfig, TileConfig):
        example = re.split(r"[ ,]", cls.form)[0]
        assert isinstance(parse_or_none(example), cls)


def test_orders_of_sums():
    """Two parts of K by a cluster or by split-K, and two pairs of them, are one order."""
    assert order_of_sums("128x256x64_c2x1x1_co") == order_of_sums("64x16x64_c1x1x1_pp_t") == (1, 1)
    assert order_of_sums("64x64x64_c1x1x2_pp") == (2, 1)
    assert order_of_sums("64x64x64_c1x1x1_pp_split2") == (2, 1)
    assert order_of_sums("64x64x64_c1x1x4_pp") == (4, 1)
    assert order_of_sums("64x64x64_c1x1x2_pp_split2") == (4, 1)
    assert order_of_sums("64x64x64_c1x1x1_pp_split4") == (1, 4)
    with pytest.raises(ValueError, match="got config='default'"):
        order_of_sums("default")


def test_reductions_have_an_order_of_their_own():
    """A reduction runs along the threads of a tile, of D or D^T, or in a second kernel."""
    names = (
        "64x64x64_c1x1x2_pp",
        "64x64x64_c1x1x2_pp_t",
        "64x64x64_c1x1x1_pp_split2",
        "64x64x64_c1x1x1_pp_t_split2",
    )
    assert len({order_of_sums(name) for name in names}) == 1
    assert len({order_of_sums(name, reduces=True) for name in names}) == 4
    tiles = ("128x256x64_c2x1x1_co", "64x64x64_c1x1x1_pp")
    assert len({order_of_sums(name, reduces=True) for name in tiles}) == 1


def test_configs_of_shipped_tables_are_known():
    found = {
        (entry["implementation"], entry["config"])
        for path in tables.SHIPPED.glob("*.json")
        for entry in json.loads(path.read_text("utf-8"))["entries"].values()
    }
    of_wgmma = [config for name, config in found if name == "wgmma"]
    assert of_wgmma
    assert [str(WgmmaConfig.parse(config)) for config in of_wgmma] == of_wgmma
