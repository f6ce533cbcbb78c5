"""Description of the device that a program will run on, as selection needs it."""

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
    """Properties of a device that selection uses; `assumed` when this host has no such device."""

    platform: str
    compute_capability: int = 0
    num_sms: int = 0
    shared_memory_bytes: int = 0
    assumed: bool = False
    name: str = ""

    @property
    def key(self) -> DeviceKey:
        """Key of the device in tables of measured choices."""
        return DeviceKey(self.platform, self.name, self.compute_capability, self.num_sms)

    @property
    def assumption(self) -> str:
        """Note for the reason of a choice made for an assumed device; "" for a present one."""
        return "; no GPU here, so an H200 is assumed" if self.assumed else ""

    def query(self) -> dict:
        """Return the device as the extension modules' reject() and workspace_bytes() take it."""
        return {
            "compute_capability": self.compute_capability,
            "num_sms": self.num_sms,
            "shared_memory_bytes": self.shared_memory_bytes,
            # An assumed GPU selects compiled kernels even if NVRTC is missing here.
            "compiles_kernels": self.platform == "cuda" and (self.assumed or not nvrtc.reason()),
        }


# Lowering for CUDA without a GPU targets an H200.
ASSUMED_GPU = Device("cuda", 90, 132, 232448, assumed=True, name="NVIDIA H200")


def target_device(platform: str) -> Device:
    """Return the first device of `platform`; for CUDA without a GPU, an assumed H200."""
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
    """Return the device of JAX's default backend."""
    platform = jax.default_backend()
    return target_device("cuda" if platform == "gpu" else platform)


@functools.cache
def _cpu_name() -> str:
    """Return the processor's name and the number of its threads that this process may use."""
    name = host_platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name} x {len(os.sched_getaffinity(0))}"
