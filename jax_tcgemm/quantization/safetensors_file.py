"""Arrays of a safetensors file, which the package `safetensors` opens, by their names."""

import json
import os
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

_FLOAT8 = {
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
}


class SafetensorsFile(Mapping):
    """A safetensors file, of which only what is asked for is read."""

    def __init__(self, op: str, path):
        self._op, self._path = op, os.fspath(path)
        try:
            import safetensors
        except ImportError:
            raise ImportError(
                f"{op}: source must be a dictionary where safetensors is missing, got a path; "
                "pip install 'jax_tcgemm[checkpoints]'"
            ) from None
        try:
            self._file = safetensors.safe_open(os.fspath(path), framework="numpy")
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(
                f"{op}: source must be a safetensors file, got source={os.fspath(path)!r}: "
                f"{error}; see the package safetensors"
            ) from None
        self._names = tuple(self._file.keys())

    def __getitem__(self, name):
        if name not in self._names:
            raise KeyError(name)
        try:
            return self._file.get_tensor(name)
        except AttributeError:
            return self._float8(name)

    def _float8(self, name):
        """An array of 8-bit floats: the package looks dtypes up in NumPy, which has none.

        A file begins with the length of its header in 8 bytes and the header in JSON, which has the
        places of arrays after it.
        """
        dtype = self._file.get_slice(name).get_dtype()
        if dtype not in _FLOAT8:
            raise TypeError(
                f"{self._op}: {name} must be of a dtype of NumPy, bfloat16 or "
                f"{' or '.join(_FLOAT8)}, got {name}.dtype={dtype}; is it of another format?"
            )
        with open(self._path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            about = json.loads(file.read(length))[name]
            first, last = about["data_offsets"]
            file.seek(8 + length + first)
            data = file.read(last - first)
        return np.frombuffer(data, _FLOAT8[dtype]).reshape(about["shape"])

    def __iter__(self):
        return iter(self._names)

    def __len__(self):
        return len(self._names)
