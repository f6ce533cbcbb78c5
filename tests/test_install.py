"""What an installation must be: quick to import, free of CUDA libraries, never broken by a part."""

import shutil
import subprocess
from pathlib import Path

import pytest

import jax_tcgemm
from jax_tcgemm import _build, _modules

PACKAGE = Path(jax_tcgemm.__file__).parent
REPOSITORY = Path(__file__).resolve().parents[1]

PRINT_REASON = """
import jax_tcgemm
from jax_tcgemm import _modules
print(_modules.reason({name!r}))
assert _modules.{name} is None
assert str(jax_tcgemm.info())
"""
MULTIPLY = """
import jax, jax.numpy as jnp, jax_tcgemm
print(jax.jit(jax_tcgemm.matmul)(jnp.ones((3, 5)), jnp.ones((5, 2))).tolist())
"""


@pytest.fixture
def copied_package(tmp_path):
    """A folder with a copy of the installed package, to damage."""
    root = tmp_path / "copy"
    shutil.copytree(PACKAGE, root / "jax_tcgemm")
    for module in (_modules.cpu, _modules.cuda):
        # In an editable installation the modules lie apart from the Python files.
        if module is not None and Path(module.__file__).parent != PACKAGE:
            shutil.copy(module.__file__, root / "jax_tcgemm")
    if not (root / "jax_tcgemm" / "_build.py").exists():
        shutil.copy(_build.__file__, root / "jax_tcgemm")
    return root


def module_file(root, name):
    found = list((root / "jax_tcgemm").glob(f"{name}.*.so"))
    if not found:
        pytest.skip(f"this build has no {name}")
    return found[0]


def test_import_is_quick(run_python):
    code = """
import time
times = [time.process_time()]
import jax
times.append(time.process_time())
import jax_tcgemm
times.append(time.process_time())
print((times[2] - times[1]) / (times[1] - times[0]))
"""
    # The processor's time beside what JAX itself takes, and the least of three: the machine may be
    # slow, and busy with something else.
    assert min(float(run_python(code)) for _ in range(3)) < 0.4


def test_import_starts_no_backend(run_python):
    code = """
import jax_tcgemm
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
"""
    assert run_python(code).strip() == "False"


@pytest.mark.parametrize("damage", ["missing", "truncated", "not_a_library"])
@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_import_survives_module(name, damage, copied_package, run_python):
    file = module_file(copied_package, f"_{name}")
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:4096])
    else:
        file.write_bytes(b"not a library")
    reason = run_python(PRINT_REASON.format(name=name), first=copied_package)
    expected = {
        "missing": f"no jax_tcgemm._{name}",
        "truncated": "cut short",
        "not_a_library": "not a shared object",
    }
    assert expected[damage] in reason


def test_product_without_cuda_module(copied_package, run_python):
    module_file(copied_package, "_cuda").unlink()
    out = run_python(MULTIPLY, first=copied_package, JAX_PLATFORMS="cpu")
    assert out.strip() == str([[5.0, 5.0]] * 3)


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_module_needs_no_cuda_library(name):
    module = getattr(_modules, name)
    if module is None:
        pytest.skip(_modules.reason(name))
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not on the PATH")
    out = subprocess.run(
        ["readelf", "-d", module.__file__], capture_output=True, text=True, check=True
    ).stdout
    needed = [line for line in out.splitlines() if "(NEEDED)" in line]
    assert needed
    assert not [line for line in needed if "libcu" in line or "nvidia" in line]


def test_reasons_agree_with_modules():
    for name in ("cpu", "cuda"):
        assert bool(_modules.reason(name)) == (getattr(_modules, name) is None)
    assert bool(_modules.reason("gpu")) == (_modules.cuda_device() is None)


def test_reason_refuses_unknown_name():
    with pytest.raises(ValueError, match="name must be cpu, .*, got name='tpu'"):
        _modules.reason("tpu")


def test_data_files_are_installed():
    sources = REPOSITORY / "jax_tcgemm"
    expected = {
        path.relative_to(sources)
        for path in sources.rglob("*")
        if path.is_file() and path.suffix in (".json", ".toml", ".py", ".typed")
    }
    assert not [path for path in expected if not (PACKAGE / path).is_file()]


@pytest.mark.gpu
def test_device_is_the_one_of_jax(gpu):
    device = _modules.cuda_device()
    assert device["name"] == gpu.device_kind
    assert f"{device['compute_capability'] / 10:.1f}" == gpu.compute_capability
