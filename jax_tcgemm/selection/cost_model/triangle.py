"""Number of tiles that kernels compute of a symmetric D: squares on and below the diagonal."""

import numpy as np


def triangle_tiles(m: int, tile_m: np.ndarray, tile_n: np.ndarray) -> np.ndarray:
    """Return the number of tiles of a symmetric m x m D, as csrc/tile/triangle.cuh counts them.

    D is divided into squares with the longer side of a tile; the shorter side divides the longer.
    """
    square = np.maximum(tile_m, tile_n)
    side = np.ceil(m / square)
    return np.ceil(side / 2) * (side + 1 - side % 2) * (square / tile_m) * (square / tile_n)
