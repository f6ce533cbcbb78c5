"""Configs of wgmma as arrays, for estimates of all configs at once."""

import dataclasses
import functools

import numpy as np

from jax_tcgemm.selection.configs import Schedule, WgmmaConfig, parse_or_none


@dataclasses.dataclass(frozen=True)
class Configs:
    """Configs as a table: a row for each config without split-K, a column for each split count.

    Values that depend on the row or the column alone are computed once and broadcast by NumPy.
    """

    tile_m: np.ndarray
    tile_n: np.ndarray
    cluster_m: np.ndarray
    cluster_n: np.ndarray
    cluster_k: np.ndarray
    ping_pong: np.ndarray
    swapped: np.ndarray
    splits: np.ndarray
    places: tuple[np.ndarray, np.ndarray]  # row and column of each config


@functools.cache
def _parse_one(name: str) -> tuple[str, float] | None:
    """Return a config's name without split-K, and its split count; None if not wgmma's."""
    config = parse_or_none(name)
    if not isinstance(config, WgmmaConfig):
        return None
    return config.unsplit, float(config.num_splits)


@functools.lru_cache(maxsize=64)
def parse(names: tuple[str, ...]) -> Configs | None:
    """Return configs as a table; None if any is not wgmma's."""
    found = [_parse_one(name) for name in names]
    if not found or None in found:
        return None
    bases, rows = np.unique([base for base, _ in found], return_inverse=True)
    splits, columns = np.unique([splits for _, splits in found], return_inverse=True)
    configs = [WgmmaConfig.parse(base) for base in bases.tolist()]

    def of_rows(values) -> np.ndarray:
        return np.array(list(values))[:, None]

    return Configs(
        tile_m=of_rows(float(x.tile_m) for x in configs),
        tile_n=of_rows(float(x.tile_n) for x in configs),
        cluster_m=of_rows(float(x.cluster_m) for x in configs),
        cluster_n=of_rows(float(x.cluster_n) for x in configs),
        cluster_k=of_rows(float(x.cluster_k) for x in configs),
        ping_pong=of_rows(x.schedule is Schedule.PINGPONG for x in configs),
        swapped=of_rows(x.swap_ab for x in configs),
        splits=splits,
        places=(rows, columns),
    )


def num_warpgroups(x: Configs) -> np.ndarray:
    """Return the number of warpgroups that multiply one tile."""
    return np.where(x.ping_pong, 1, np.where(x.tile_m == 192, 3, 2))
