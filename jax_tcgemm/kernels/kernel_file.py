"""The files that kernels are kept in: a digest of the rest, a line of JSON and the cubin.

This file and instance.py import nothing else of the package: the build writes such files, too.
"""

import hashlib
import json

from .instance import Kernel

SUFFIX = ".kernel"


def encode(kernel: Kernel, described: str) -> bytes:
    """The content of a file; `described`: the instance, for those who look at it."""
    fields = {"name": kernel.name, "faults": kernel.faults, "instance": described}
    content = json.dumps(fields).encode() + b"\n" + kernel.cubin
    return hashlib.sha256(content).digest() + content


def decode(content: bytes) -> Kernel | None:
    """The kernel; None where the file is damaged."""
    digest, content = content[:32], content[32:]
    if hashlib.sha256(content).digest() != digest:
        return None
    header, _, cubin = content.partition(b"\n")
    fields = json.loads(header)
    return Kernel(fields["name"], cubin, tuple(fields["faults"]))


def prebuilt_name(kernel: str, target: str, headers_hash: str) -> str:
    """The name of the file of a kernel that the build compiled from headers of that hash."""
    return hashlib.sha256(f"{target} {headers_hash} {kernel}".encode()).hexdigest()[:32] + SUFFIX
