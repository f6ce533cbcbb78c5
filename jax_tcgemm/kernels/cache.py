"""Compiled kernels on disk, in the folder `kernels` beside the user's tuned choices.

A file is named by a hash of all that a kernel is compiled from, so that it is never out of date.
Any number of processes may read and
write: files are replaced as a whole. One that is damaged is compiled again, and a folder that
cannot be read or written costs time only; both are warned about.
"""

import contextlib
import hashlib
import os
import tempfile
import time
import warnings
from pathlib import Path

from jax_tcgemm.kernels import kernel_file, nvrtc
from jax_tcgemm.kernels.instance import Instance, Kernel
from jax_tcgemm.system.switches import cache_folder

FORMAT = 1
# Of all files together; a kernel takes 20 to 300 KB.
LIMIT_BYTES = 512 * 2**20
# A file under way is left behind where a process was killed.
_ABANDONED_S = 3600.0

_warned: set[str] = set()


def path(instance: Instance) -> Path | None:
    """The instance's file, which need not exist; None when the cache is off."""
    folder = cache_folder()
    if folder is None:
        return None
    parts = (FORMAT, nvrtc.digest(), instance.target, instance.kernel, instance.source)
    return (
        folder / "kernels" / (hashlib.sha256(repr(parts).encode()).hexdigest() + kernel_file.SUFFIX)
    )


def read(instance: Instance) -> Kernel | None:
    """The kernel, when its file is there and whole."""
    file = path(instance)
    if file is None:
        return None
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _warn_once("kernels are compiled anew in each process", str(error))
        return None
    kernel = kernel_file.decode(content)
    if kernel is None:
        warnings.warn(
            f"jax_tcgemm: a cached kernel is damaged and compiled again: {file}", stacklevel=2
        )
        return None
    with contextlib.suppress(OSError):
        os.utime(file)  # used just now
    return kernel


def write(instance: Instance, kernel: Kernel) -> None:
    """Keeps a kernel."""
    file = path(instance)
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(suffix=".tmp", dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as target:
                target.write(kernel_file.encode(kernel, str(instance)))
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        _warn_once("kernels are compiled anew in each process", str(error))


def trim() -> None:
    """Removes what was used least recently while there is more than `LIMIT_BYTES`."""
    folder = cache_folder()
    if folder is None:
        return
    files = []
    with contextlib.suppress(OSError), os.scandir(folder / "kernels") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process removed it
                status = entry.stat()
                is_kernel = entry.name.endswith(kernel_file.SUFFIX)
                if is_kernel or status.st_mtime < time.time() - _ABANDONED_S:
                    files.append((is_kernel, status.st_mtime, status.st_size, entry.path))
    total = sum(size for _, _, size, _ in files)
    for is_kernel, _, size, name in sorted(files):
        if is_kernel and total <= LIMIT_BYTES:
            break
        with contextlib.suppress(OSError):
            os.unlink(name)
        total -= size


def _warn_once(what: str, why: str) -> None:
    if what not in _warned:
        _warned.add(what)
        warnings.warn(f"jax_tcgemm: {what}: {why}", stacklevel=3)
