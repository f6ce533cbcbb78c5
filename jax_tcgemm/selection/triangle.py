"""Tiles of a symmetric D that kernels compute: those of squares on and below the diagonal."""

import numpy as np


def triangle_tiles(m: int, tile_m: np.ndarray, tile_n: np.ndarray) -> np.ndarray:
    """Return how many tiles of a D of m rows and columns csrc/tile/triangle.cuh numbers.

    The shorter side of a tile divides the longer one, which is a square's.
    """
    square = np.maximum(tile_m, tile_n)
    side = np.ceil(m / square)
    return np.ceil(side / 2) * (side + 1 - side % 2) * (square / tile_m) * (square / tile_n)
