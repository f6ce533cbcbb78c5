"""info(): fields and printed form."""

import dataclasses
import importlib.metadata

import jax
import pytest

import jax_tcgemm
from jax_tcgemm.inspect.info import _implementations
from jax_tcgemm.system import modules


@pytest.fixture(scope="module")
def info():
    return jax_tcgemm.info()


def test_versions(info):
    assert info.versions["jax"] == jax.__version__
    assert info.versions["jax_tcgemm"] == importlib.metadata.version("jax_tcgemm")
    assert {"jaxlib", "Python", "CUDA of this build", "NVIDIA driver"} <= set(info.versions)


def test_is_frozen(info):
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.gpus = ()


def test_every_implementation_runs_or_says_why_not(info):
    names = [entry.name for entry in info.implementations]
    assert names[-2:] == ["host", "xla"]
    assert len(set(names)) == len(names)
    for entry in info.implementations:
        assert entry.available == (entry.reason == "")
        assert entry.configs or not entry.available


def test_known_names_are_those_of_the_module(info):
    from jax_tcgemm.inspect.info import CUDA_IMPLEMENTATIONS

    if modules.cuda is None:
        pytest.skip(modules.reason("cuda"))
    assert tuple(modules.cuda.implementations()) == CUDA_IMPLEMENTATIONS


def test_prints_every_implementation_and_reason(info):
    text = str(info)
    for entry in info.implementations:
        assert entry.name in text
    assert jax.__version__ in text
    if info.gpu_reason:
        assert info.gpu_reason.split()[0] in text
        assert "No GPU" in text


def test_reports_a_refusal_of_the_device(monkeypatch):
    """A GPU that an implementation refuses is a reason, not an absence of one."""

    class Cuda:
        def implementations(self):
            return {"wgmma": ["first", "second"], "mma_sync": ["only"]}

        def reject(self, name, config, problem, device):
            if name == "wgmma":
                return f"it needs compute capability 9.0, got {device['compute_capability']}"
            return "" if problem["a_dtype"] == "f64" else "its operands must be f64"

    monkeypatch.setattr(modules, "cuda", Cuda())
    a100 = {"compute_capability": 80, "num_sms": 108, "shared_memory_bytes": 166912, "name": "A100"}
    monkeypatch.setattr(modules, "cuda_device", lambda: a100)
    wgmma, mma_sync = list(_implementations(""))[:2]
    assert (wgmma.available, wgmma.reason) == (False, "it needs compute capability 9.0, got 80")
    assert (mma_sync.available, mma_sync.configs) == (True, ("only",))


@pytest.mark.gpu
def test_gpu_is_listed_and_every_implementation_runs(info, gpu):
    assert info.gpu_reason == ""
    assert info.gpus[0].name == gpu.device_kind
    for entry in info.implementations:
        is_missing = entry.name == "cutensor" and "pip install" in entry.reason
        assert entry.available or is_missing, str(info)
