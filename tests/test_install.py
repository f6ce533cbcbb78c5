"""What an installation must be: quick to import, free of CUDA libraries, never broken by a part."""

import shutil
import subprocess
from pathlib import Path

import pytest

import jax_tcgemm
from jax_tcgemm import _build
from jax_tcgemm.system import module_files, modules

PACKAGE = Path(jax_tcgemm.__file__).parent
REPOSITORY = Path(__file__).resolve().parents[1]

PRINT_REASON = """
import jax_tcgemm
from jax_tcgemm.system import modules
print(modules.reason({name!r}))
assert modules.{name} is None
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
    for module in (modules.cpu, modules.cuda):
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
    """It brings nothing but itself, what is small, and parts of JAX that most programs import."""
    code = """
import sys
import jax
before = {*sys.modules}
import jax_tcgemm
found = {*sys.modules} - before
print(*{name.partition(".")[0] for name in found} - sys.stdlib_module_names)
print(*(name for name in found if name.startswith("jax.experimental.")))
"""
    packages, experimental = map(str.split, run_python(code).splitlines())
    assert set(packages) == {"jax", "jax_tcgemm"}
    heavy = ("jax.experimental.mosaic", "jax.experimental.pallas", "jax.experimental.sparse")
    assert not [name for name in experimental if name.startswith(heavy)]


def test_import_starts_no_backend(run_python):
    """Which settles the platform, so that it can still be set."""
    code = """
import jax
import jax_tcgemm
jax.config.update("jax_num_cpu_devices", 3)
print(jax.device_count("cpu"))
"""
    assert run_python(code, JAX_NUM_CPU_DEVICES="1").strip() == "3"


def _zeroed(content: bytes, first: int, last: int) -> bytes:
    return content[:first] + bytes(last - first) + content[last:]


# What may have become of a module's file, and the reason for which it is then not loaded.
DAMAGED = {
    "truncated": (lambda x: x[:4096], "cut short"),
    "not_a_library": (lambda x: b"not a library", "not a shared object"),
    "zeroed_middle": (lambda x: _zeroed(x, len(x) // 4, 3 * len(x) // 4), "not what was installed"),
    "zeroed_page": (
        lambda x: _zeroed(x, len(x) // 2, len(x) // 2 + 4096),
        "not what was installed",
    ),
    "zeroed_end": (lambda x: _zeroed(x, len(x) - 4096, len(x)), "its section table is gone"),
    "no_section_table": (lambda x: _zeroed(x, 40, 48), "its section table is gone"),
    "one_bit": (lambda x: x[:5000] + bytes([x[5000] ^ 1]) + x[5001:], "not what was installed"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_module_is_found_out(damage, tmp_path):
    file, (make, expected) = tmp_path / "module.so", DAMAGED[damage]
    content = Path(modules.cpu.__file__).read_bytes()
    file.write_bytes(content)
    module_files.check(str(file))
    file.write_bytes(make(content))
    with pytest.raises(ImportError, match=f"{file} is .*{expected}"):
        module_files.check(str(file))


@pytest.mark.parametrize("damage", ["missing", "truncated", "not_a_library", "zeroed_middle"])
@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_import_survives_module(name, damage, copied_package, run_python):
    file = module_file(copied_package, f"_{name}")
    if damage == "missing":
        file.unlink()
        expected = f"no jax_tcgemm._{name}"
    else:
        make, expected = DAMAGED[damage]
        file.write_bytes(make(file.read_bytes()))
    assert expected in run_python(PRINT_REASON.format(name=name), first=copied_package)


def test_a_module_from_a_build_folder_needs_no_checksum(tmp_path):
    """One that was linked anew and copied, as in the development of its sources, is loaded."""
    content = Path(modules.cpu.__file__).read_bytes()
    file = tmp_path / "module.so"
    file.write_bytes(content[: content.rindex(b"\ntcgemm crc32 ")])
    module_files.check(str(file))
    module_files.mark(str(file))
    assert file.read_bytes() == content


def test_product_without_cuda_module(copied_package, run_python):
    module_file(copied_package, "_cuda").unlink()
    out = run_python(MULTIPLY, first=copied_package, JAX_PLATFORMS="cpu")
    assert out.strip() == str([[5.0, 5.0]] * 3)


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_module_needs_no_cuda_library(name):
    module = getattr(modules, name)
    if module is None:
        pytest.skip(modules.reason(name))
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
        assert bool(modules.reason(name)) == (getattr(modules, name) is None)
    assert bool(modules.reason("gpu")) == (modules.cuda_device() is None)


def test_reason_refuses_unknown_name():
    with pytest.raises(ValueError, match="name must be cpu, .*, got name='tpu'"):
        modules.reason("tpu")


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
    device = modules.cuda_device()
    assert device["name"] == gpu.device_kind
    assert f"{device['compute_capability'] / 10:.1f}" == gpu.compute_capability
