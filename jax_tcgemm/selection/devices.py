"""The device that a program will run on, as far as a choice may depend on it."""

import contextlib
import dataclasses
import functools
import os
import platform as host_platform

import jax

from jax_tcgemm.kernels import nvrtc
from jax_tcgemm.selection.tables import DeviceKey
from jax_tcgemm.system import modules


@dataclasses.dataclass(frozen=True)
class Device:
    """What a choice may depend on. `assumed` when no such device is present here."""

    platform: str
    compute_capability: int = 0
    num_sms: int = 0
    shared_memory_bytes: int = 0
    assumed: bool = False
    name: str = ""

    @property
    def key(self) -> DeviceKey:
        """What tables of measured choices know it by."""
        return DeviceKey(self.platform, self.name, self.compute_capability, self.num_sms)

    @property
    def assumption(self) -> str:
        """What is to be said of a choice that was made for it."""
        return "; no GPU here, so an H200 is assumed" if self.assumed else ""

    def query(self) -> dict:
        """What the modules' reject() and workspace_bytes() take."""
        return {
            "compute_capability": self.compute_capability,
            "num_sms": self.num_sms,
            "shared_memory_bytes": self.shared_memory_bytes,
            # What a GPU would run is known without a compiler.
            "compiles_kernels": self.platform == "cuda" and (self.assumed or not nvrtc.reason()),
        }


# Lowering for CUDA where there is no GPU aims at an H200.
ASSUMED_GPU = Device("cuda", 90, 132, 232448, assumed=True, name="NVIDIA H200")


def target_device(platform: str) -> Device:
    """The device that a program lowered for `platform` will run on: the first or an assumed one."""
    if platform == "cpu":
        return Device(platform, name=_cpu_name())
    if platform != "cuda":
        return Device(platform)
    properties = modules.cuda_device()
    if properties is None:
        return ASSUMED_GPU
    fields = ("compute_capability", "num_sms", "shared_memory_bytes")
    return Device("cuda", *(properties[field] for field in fields), name=properties["name"])


def default_device() -> Device:
    """The device that JAX uses unless it is told otherwise."""
    platform = jax.default_backend()
    return target_device("cuda" if platform == "gpu" else platform)


@functools.cache
def _cpu_name() -> str:
    """The processor and how many of its threads this process may use."""
    name = host_platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name} x {len(os.sched_getaffinity(0))}"
