"""What an example needs to run on several devices: a mesh, where arrays live, what is exchanged."""

import math
import re
from collections.abc import Mapping

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "model")
_COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def make_mesh(description: str) -> Mesh:
    """The mesh of a description such as "data=2" or "data=2,model=4", over the first devices.

    Raises:
      ValueError: when it cannot be read, or needs more devices than there are.
    """
    sizes = dict(re.findall(r"(\w+)=(\d+)", description))
    if not sizes or ",".join(f"{k}={v}" for k, v in sizes.items()) != description:
        raise ValueError(
            f"mesh: it must be like data=2 or data=2,model=2, got {description!r}; "
            "name each axis once"
        )
    if not set(sizes) <= set(AXES) or "0" in sizes.values():
        raise ValueError(
            f"mesh: axes must be of {', '.join(AXES)} and not empty, got {description!r}; "
            "rename them"
        )
    shape = tuple(int(size) for size in sizes.values())
    needed, devices = math.prod(shape), jax.devices()
    if needed > len(devices):
        raise ValueError(
            f"mesh: it must fit the {len(devices)} devices here, got {description!r}; use fewer"
        )
    automatic = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, tuple(sizes), axis_types=automatic, devices=devices[:needed])


def place(tree, mesh: Mesh, model_dimensions: Mapping[str, int]):
    """The arrays of a tree on a mesh.

    Args:
      tree: any tree of arrays, such as parameters or an optimizer's state.
      mesh: a mesh of `make_mesh`.
      model_dimensions: for each name in a path, the dimension that the axis "model" divides. All
        other arrays are on every device.
    """

    def sharding(path, leaf):
        names = re.findall(r"\w+", jax.tree_util.keystr(path))
        divided = [model_dimensions[name] for name in names if name in model_dimensions]
        spec = [None] * leaf.ndim
        if divided and "model" in mesh.axis_names:
            spec[divided[-1]] = "model"
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.device_put(tree, jax.tree_util.tree_map_with_path(sharding, tree))


def place_batch(batch, mesh: Mesh) -> jax.Array:
    """A batch on a mesh, its first dimension divided by the axis "data"."""
    spec = PartitionSpec("data" if "data" in mesh.axis_names else None)
    return jax.device_put(batch, NamedSharding(mesh, spec))


def collectives(compiled: jax.stages.Compiled) -> dict[str, dict]:
    """The exchanges between devices in a compiled program: how many, and megabytes of results."""
    found: dict[str, dict] = {}
    # An asynchronous one is a pair, of which the second has the result.
    for result, name in re.findall(rf"= (.+?) ({_COLLECTIVES})(?:-done)?\(", compiled.as_text()):
        entry = found.setdefault(name, {"count": 0, "megabytes": 0.0})
        entry["count"] += 1
        for dtype, extents in re.findall(r"(\w+)\[([\d,]*)\]", result):
            bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
            entry["megabytes"] += bits / 8e6 * math.prod(int(x) for x in extents.split(",") if x)
    return found
