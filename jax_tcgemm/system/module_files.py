"""Files of the compiled modules: marked when they are installed, checked before they are loaded.

Loading a damaged shared object can kill the process, and so can calling what is in one. So the
installation appends a checksum to each, which the loader of the system does not look at. A file
without one comes from a build folder, or was changed by a tool since: of that only the structure is
checked.

CMake runs this file, outside of the package, with the paths to mark.
"""

import re
import struct
import sys
import zlib

_MARK = re.compile(rb"\ntcgemm crc32 ([0-9a-f]{8})\n")
_MARK_BYTES = 23
_CHUNK_BYTES = 1 << 20
_SHT_STRTAB = 3


def mark(path: str) -> None:
    """Appends the checksum of a file to it."""
    with open(path, "r+b") as file:
        file.seek(0, 2)
        file.write(b"\ntcgemm crc32 %08x\n" % _checksum(file, file.tell()))


def check(path: str) -> None:
    """Raises ImportError for a file that is no shared object, cut short or damaged."""
    with open(path, "rb") as file:
        header = file.read(64)
        size = file.seek(0, 2)
        if len(header) < 64 or not header.startswith(b"\x7fELF"):
            raise ImportError(f"{path} is not a shared object")
        # The section headers come last: e_shoff, e_shentsize, e_shnum and e_shstrndx of ELF64.
        (offset,) = struct.unpack_from("<Q", header, 40)
        entry_bytes, num_entries, names = struct.unpack_from("<HHH", header, 58)
        if size < offset + entry_bytes * num_entries:
            raise ImportError(f"{path} is cut short: {size} bytes; install again")
        file.seek(offset + entry_bytes * names + 4)
        if offset == 0 or file.read(4) != struct.pack("<I", _SHT_STRTAB):
            raise ImportError(f"{path} is damaged: its section table is gone; install again")
        file.seek(size - _MARK_BYTES)
        found = _MARK.fullmatch(file.read())
        if found and _checksum(file, size - _MARK_BYTES) != int(found[1], 16):
            raise ImportError(f"{path} is damaged: it is not what was installed; install again")


def _checksum(file, num_bytes: int) -> int:
    """The CRC-32 of the first bytes of a file, which is left after them."""
    file.seek(0)
    checksum = 0
    while num_bytes:
        chunk = file.read(min(num_bytes, _CHUNK_BYTES))
        checksum = zlib.crc32(chunk, checksum)
        num_bytes -= len(chunk)
    return checksum


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        mark(argument)
