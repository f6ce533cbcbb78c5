"""The language model of the examples, trained on several devices as on one."""

import importlib.util
from pathlib import Path

import jax
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

# Two virtual devices: the same losses but for the order of float32 sums, and no exchange but the
# sums that each division needs.
CODE = """
import jax.numpy as jnp, numpy as np
import several_devices, train_gpt

size, text = train_gpt.SIZES["test"], train_gpt.read_text(100_000)

def training(mesh=None):
    mesh = mesh and several_devices.make_mesh(mesh)
    return train_gpt.Training("", train_gpt.OURS, size, jnp.float32, 10, mesh)

trainings = [training(mesh) for mesh in (None, "data=2", "model=2")]
for _, tokens in zip(range(5), train_gpt.batches(text, size)):
    for each in trainings:
        each.step(tokens)
one, *several = trainings
assert one.losses[-1] < 0.9 * one.losses[0], one.losses
for each in several:
    np.testing.assert_allclose(each.losses, one.losses, rtol=1e-4)
for each in trainings:
    found = several_devices.collectives(each.compiled)
    calls = each.compiled.as_text().count('custom_call_target="tcgemm_gemm"')
    print({name: entry["count"] for name, entry in found.items()}, calls)
block = several[1].params["blocks"][0]
weights = block["qkv"]["kernel"], block["out"], block["up"], block["down"]
print([w[...].addressable_shards[0].data.shape for w in weights])
"""


def test_losses_on_a_mesh_are_those_of_one_device(run_python):
    flags = "--xla_force_host_platform_device_count=2"
    one, data, model, shapes = run_python(CODE, first=EXAMPLES, XLA_FLAGS=flags).splitlines()
    num_calls = one.split()[-1]
    assert one == f"{{}} {num_calls}"
    # One for all gradients and the loss.
    assert data == f"{{'all-reduce': 1}} {num_calls}"
    # In each of the two layers, one for each row-parallel product, and one for the gradient of the
    # input of each column-parallel one.
    assert model == f"{{'all-reduce': 8}} {num_calls}"
    assert shapes == "[(32, 48), (16, 32), (32, 2, 48), (48, 32)]"


@pytest.fixture
def several_devices(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.find_spec("several_devices")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("two", "like data=2"),
        ("data=1,data=1", "each axis once"),
        ("rows=1", "axes must be of data, model"),
        ("data=0", "not empty"),
        (f"data={len(jax.devices()) + 1}", "must fit"),
    ],
)
def test_bad_meshes(several_devices, description, message):
    with pytest.raises(ValueError, match=message):
        several_devices.make_mesh(description)
