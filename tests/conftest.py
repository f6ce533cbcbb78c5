"""Tests run against the installed package, never against the folder beside them."""

import collections
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# `python -m pytest` puts the working directory on the path, where the sources, which hold no
# compiled module, would hide the installed package.
sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != REPOSITORY]

# Several test processes may share one GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# The CPU counts as eight devices, so that sharded programs can be tested anywhere.
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

# What is chosen must not depend on what was tuned on this machine.
os.environ["TCGEMM_CACHE_DIR"] = "off"
# What is printed wraps to the terminal, whose width must not decide what tests find in it.
os.environ["COLUMNS"] = "160"

# Most of a test is XLA's compilation, which takes one core: without LLVM's expensive passes, as in
# JAX's own tests, a sixth less. On a GPU kernels are compared with XLA's own at full optimization.
HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


def _is_editable() -> bool:
    direct_url = importlib.metadata.distribution("jax_tcgemm").read_text("direct_url.json")
    return bool(direct_url and json.loads(direct_url).get("dir_info", {}).get("editable"))


def pytest_configure(config):
    _share_compiled_programs(config)
    spec = importlib.util.find_spec("jax_tcgemm")
    if spec is None or spec.origin is None:
        pytest.exit("jax_tcgemm is not installed: pip install '.[test]'", returncode=4)
    if Path(spec.origin).resolve().is_relative_to(REPOSITORY / "jax_tcgemm") and not _is_editable():
        pytest.exit(
            f"jax_tcgemm resolves to the sources, {spec.origin}, not to the installed package",
            returncode=4,
        )


def _share_compiled_programs(config) -> None:
    """Let the processes of a test run share what one has compiled, unless the user says where."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = tempfile.TemporaryDirectory(prefix="tcgemm-tests-")
    config.add_cleanup(folder.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


# Processes that may share one GPU, each of which has a context in its memory.
_MOST_ON_A_GPU = 6


def pytest_xdist_auto_num_workers(config) -> int:
    """As many processes as cores, on a GPU at most six."""
    cores = len(os.sched_getaffinity(0))
    return min(cores, _MOST_ON_A_GPU) if HAS_GPU else cores


def _gpu_reason() -> str:
    """Why tests marked gpu cannot run; starts JAX's CUDA backend only where there is a GPU."""
    import jax

    from jax_tcgemm.system import modules

    if reason := modules.reason("gpu"):
        return reason
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"JAX does not use the GPU: {error}"
    return ""


def _sanitizer_reason(config) -> str:
    if "sanitizer" not in config.option.markexpr:
        return "slow: ask for it with -m sanitizer"
    if shutil.which("compute-sanitizer") is None:
        return "compute-sanitizer is not on the PATH"
    return ""


# What touches JAX where it may change: transformations, lowering, export, sharding, `patch`, what
# is not public, libraries on top. `-m surface` runs these, and so does CI with the oldest JAX
# supported, where each must be quick.
SURFACE = re.compile(
    r"tests/test_(transformations|blas_transformations|tensor_rules|lowering|tensor_lowering|export|patch"
    r"|patch_transformations|jax_internals|sharding\w*|out_sharding|libraries|accelerate)\.py::"
)


# By default a test runs one in so many of its cases; --all-cases runs all.
_ONE_IN = 25
_RUNS_ALL = "all_cases", "gpu", "sanitizer", "emulated_all", "compiled_all", "fuzz"


def pytest_addoption(parser):
    parser.addoption("--all-cases", action="store_true", help="run all cases of tests with many")


def _unasked(config, items) -> list:
    """Return the cases to leave out of tests that have many.

    A hash of their names decides which: -m surface runs others, so that the oldest JAX and the
    newest share what touches JAX.
    """
    if config.option.all_cases or any("::" in argument for argument in config.args):
        return []
    cases = collections.defaultdict(list)
    for item in items:
        if not any(map(item.get_closest_marker, _RUNS_ALL)):
            cases[item.nodeid.partition("[")[0]].append(item)
    unasked, is_surface = [], "surface" in config.option.markexpr
    for same in cases.values():
        count = math.ceil(len(same) / _ONE_IN)
        same.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        unasked += same[:-count] if is_surface else same[count:]
    return unasked


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if SURFACE.match(item.nodeid):
            item.add_marker("surface")
    if unasked := _unasked(config, items):
        config.hook.pytest_deselected(items=unasked)
        kept = {id(item) for item in items} - {id(item) for item in unasked}
        items[:] = [item for item in items if id(item) in kept]
    for slow in ("emulated_all", "compiled_all", "fuzz"):
        if slow not in config.option.markexpr:
            skipped = pytest.mark.skip(reason=f"slow: ask for it with -m {slow}")
            for item in items:
                if item.get_closest_marker(slow):
                    item.add_marker(skipped)

    def is_marked(item):
        return item.get_closest_marker("gpu") or item.get_closest_marker("sanitizer")

    marked = [item for item in items if is_marked(item)]
    gpu_reason = _gpu_reason() if marked else ""
    for item in marked:
        reason = gpu_reason
        if not reason and item.get_closest_marker("sanitizer"):
            reason = _sanitizer_reason(config)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def host_rules():
    """On a CPU `host` runs every product that it can, unless another implementation is asked for.

    The products of tests are small, and those the rules leave to XLA: by them, tests that name no
    implementation would test XLA's own product and none of our calls. What the rules themselves
    give, tests see by the fixture `cpu_rule`. Yields them.
    """
    from jax_tcgemm.selection import rules

    gains_on_host = rules._gains_on_host
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "_gains_on_host", lambda problem: True)
        yield gains_on_host


@contextlib.contextmanager
def _choosing_as_outside(host_rules):
    """Choose on a CPU as outside of these tests.

    What is chosen is part of what JAX has traced, in functions of the library too, so its caches
    are cleared before and after.
    """
    import jax

    from jax_tcgemm import selection
    from jax_tcgemm.selection import rules

    def forget():
        selection.forget()
        jax.clear_caches()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "_gains_on_host", host_rules)
        forget()
        yield
    forget()


@pytest.fixture
def cpu_rule(host_rules):
    """What runs on a CPU is chosen as outside of these tests."""
    with _choosing_as_outside(host_rules):
        yield


@pytest.fixture(scope="module")
def cpu_rule_of_module(host_rules):
    """As `cpu_rule`, for all tests of a module, which share what JAX has traced and compiled."""
    with _choosing_as_outside(host_rules):
        yield


@pytest.fixture(scope="session")
def gpu():
    """The first GPU; for tests marked gpu."""
    import jax

    return jax.devices("cuda")[0]


@pytest.fixture
def chunk_bytes(request, monkeypatch):
    """The argument of losses with logits in chunks; None with stored ones where it is "stored"."""
    from jax_tcgemm.losses import softmax as sm

    is_stored = request.param == "stored"
    monkeypatch.setattr(sm, "_FEW_LOGITS", 1 << 40 if is_stored else 0)
    return None if is_stored else request.param


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory) -> Path:
    """A folder that the processes of one test run have in common."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def cases_of(request):
    """Of a test the parameters of its cases that run: what only others need is not built."""

    def cases_of(test) -> list[dict]:
        items = request.session.items
        return [item.callspec.params for item in items if getattr(item, "function", None) is test]

    return cases_of


@pytest.fixture(scope="session")
def emulator(request, run_folder):
    """The kernels that tests run on the CPU by default; see emulated.py."""
    from emulated import (
        Emulator,
        mma_sync_ragged_table,
        mma_sync_table,
        wgmma_ragged_table,
        wgmma_table,
    )
    from emulated_checks import CASE, Types, kernels_of
    from gpu.gemm_call import make_inputs

    # As test_kernels_emulated.py calls it.
    simt = make_inputs(Types("f32", "bf16", "f32"), "TN", CASE["alpha_beta_odd_batch"]).problem
    tables = {
        ("bf16", "01"): ("64x64x64_c1x1x1_pp", "128x128x64_c2x1x1_pp"),
        ("bf16", "11"): (
            *("192x176x64_c1x2x1_co_t", "64x64x64_c1x4x1_pp", "64x16x64_c1x1x2_pp_t"),
            *("128x64x64_c1x1x2_co", "128x16x64_c1x1x4_co_t"),
        ),
        ("tf32", "10"): ("128x128x64_c1x1x1_co",),
    }
    # Those that tests name, and those of the parameters of tests that run.
    asked = {"64x64x64_c1x1x1_pp", "128x16x64_c1x1x4_co_t"}
    for item in request.session.items:
        if "emulator" in getattr(item, "fixturenames", ()) and hasattr(item, "callspec"):
            asked.add(item.callspec.params.get("config", "").partition("_split")[0])
    chosen = {table: asked.intersection(configs) for table, configs in tables.items()}
    return Emulator(
        run_folder / "emulator",
        *(wgmma_table(*table, *sorted(own)) for table, own in chosen.items() if own),
        wgmma_ragged_table("bf16", "10"),
        wgmma_ragged_table("bf16", "11"),
        mma_sync_table("bf16", "64x64"),
        mma_sync_table("s8_u8", "64x64"),
        mma_sync_ragged_table("bf16"),
        *kernels_of("simt_tiled", "128x64x16", simt),
        families=("wgmma", "mma_sync", "simt", "rows"),
    )


@pytest.fixture
def x64():
    """64-bit types for the length of one test."""
    import jax

    with jax.enable_x64(True):
        yield


@pytest.fixture
def run_python(tmp_path):
    """Runs code in a fresh interpreter, away from the repository; returns its standard output.

    `first` is a folder to put first on the path.
    """

    def run(code: str, *, first: Path | None = None, **environment: str) -> str:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
        if first is not None:
            env["PYTHONPATH"] = str(first)
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def fake_cuda(monkeypatch):
    """A _cuda module that rejects what it is told to, and no GPU; so that tests of what is chosen
    and lowered depend neither on the build nor on the kernels' rules.

    `rejects` maps an implementation to the reason it gives for everything.
    """
    import types

    from jax_tcgemm import selection
    from jax_tcgemm.kernels import nvrtc
    from jax_tcgemm.system import modules

    rejects = {}
    names = ("simt_naive", "simt_tiled", "simt_batched")
    names += ("wmma_naive", "wmma_tiled", "mma_sync", "wgmma")
    module = types.SimpleNamespace(
        abi_version=1,
        rejects=rejects,
        implementations=lambda: {name: ["small", "large"] for name in (*names, "cublaslt")},
        reject=lambda name, config, problem, device: rejects.get(name, ""),
        workspace_bytes=lambda name, config, problem, device: 4096 if name == "mma_sync" else 0,
        kernels=lambda *_: (),
        blas=types.SimpleNamespace(
            implementations=lambda: {"cublas": ["default"]},
            reject=lambda name, config, problem, device: rejects.get(name, ""),
            workspace_bytes=lambda name, config, problem, device: 256,
            kernels=lambda *_: (),
        ),
    )
    module.rejections = lambda name, problem, device: [
        module.reject(name, config, problem, device) for config in module.implementations()[name]
    ]
    # Its implementations bring no kernels.
    monkeypatch.setattr(nvrtc, "reason", lambda: "")
    monkeypatch.setattr(modules, "cuda", module)
    monkeypatch.delitem(modules._reasons, "cuda", raising=False)
    monkeypatch.setattr(modules, "cuda_device", lambda: None)
    monkeypatch.setattr(modules, "cublaslt_reason", lambda: rejects.get("cublaslt", ""))
    monkeypatch.setattr(modules, "cublas_reason", lambda: rejects.get("cublas", ""))
    selection.forget()
    yield module
    selection.forget()
