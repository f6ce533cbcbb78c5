"""Report of the implementation of each product in a JAX function, and the reason."""

import dataclasses
import functools
import io
import shutil
from collections.abc import Iterator, Sequence

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tcgemm import selection
from jax_tcgemm.device import blas as device_blas
from jax_tcgemm.device import grouped, request
from jax_tcgemm.device import tensor as device_tensor
from jax_tcgemm.device.dense import plan as dense_plan
from jax_tcgemm.device.dense import product as dense
from jax_tcgemm.device.fusion import fused
from jax_tcgemm.inspect.epilogue_operations import epilogue_operations
from jax_tcgemm.passes import rewriting
from jax_tcgemm.passes.transpositions import transposed_operands
from jax_tcgemm.primitives import (
    all_reduce,
    backward,
    blas,
    lowering,
    packed_weight,
    quantize,
    rows,
)
from jax_tcgemm.primitives import dot_general as primitive
from jax_tcgemm.primitives import epilogue_product as epilogue_primitive
from jax_tcgemm.primitives import ragged_dot as ragged_primitive
from jax_tcgemm.primitives.tensor import contract, elementwise, reduce
from jax_tcgemm.problem.all_reduce import AllReduceProblem
from jax_tcgemm.selection.roofline import peaks, roofline_seconds
from jax_tcgemm.sharding import partitioning
from jax_tcgemm.system.jax_internals import as_jaxpr, as_lowered, source_line

# For each primitive: its module, and the module that makes its plans.
_RULES = {
    primitive.dot_general_p: (primitive, dense_plan),
    epilogue_primitive.epilogue_product_p: (epilogue_primitive, fused),
    ragged_primitive.ragged_dot_p: (ragged_primitive, grouped),
    rows.rows_p: (rows, request),
    all_reduce.all_reduce_p: (all_reduce, request),
    packed_weight.packed_weight_p: (packed_weight, request),
    quantize.quantize_p: (quantize, request),
    contract.contract_p: (contract, device_tensor),
    elementwise.elementwise_p: (elementwise, device_tensor),
    reduce.reduce_p: (reduce, device_tensor),
    blas.blas_p: (blas, device_blas),
}
# Products whose sharded contracted dimensions are summed over devices.
_SUMMED = (
    primitive.dot_general_p,
    epilogue_primitive.epilogue_product_p,
    ragged_primitive.ragged_dot_p,
)
# Layouts of primitives that read transposed operands.
_READING = {
    primitive.dot_general_p: primitive.READING,
    epilogue_primitive.epilogue_product_p: epilogue_primitive.READING,
}
# The jaxpr that is lowered, for each of JAX's primitives that have further jaxprs for derivatives.
_LOWERED = {
    "custom_linear_solve": lambda params: params["jaxprs"].solve,
    "linear_call": lambda params: params["callee"],
}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of this library in a traced function.

    Attributes:
      implementation: name of the implementation that runs the call.
      config: config of the implementation.
      why: reason for the selection.
      problem: the product as the implementation sees it, or None where only XLA's own product is
        available.
      copies: arrays that XLA must copy for the call, in words; usually none.
      rejected: for every implementation that cannot run the call, the rule that was violated.
      workspace_bytes: scratch memory in bytes.
      bytes: minimum memory traffic of one execution, or None without a problem.
      flops: real operations of one execution, or None without a problem.
      roofline_us: lower bound of the time in microseconds, or None if the device's peak rates are
        unknown.
      times: number of executions in one call of the function, or None if the number depends on data
        (while).
      path: control flow around the call, outermost first, such as "scan[10]" or "cond[0]".
      source: file and line of the call, where JAX knows them.
      code: device code generated for the call, if requested and available.
      estimated_us: estimated time of the call in microseconds, or None without an estimate: on
        CPUs, for grouped and packed products, and on GPUs other than Hopper.
      xla_estimated_us: estimated time in microseconds of XLA's program for the call: XLA's product
        and, with an epilogue, XLA's loop. Copies of operands are not counted. None without an
        estimate.
      epilogue: names of the operations that follow the product, such as ("add", "relu"), without
        broadcasts and conversions. The kernel computes the operations, unless `why` says that only
        the product runs in the kernel.
    """

    implementation: str
    config: str
    why: str
    problem: selection.AnyProblem | None
    copies: tuple[str, ...]
    rejected: dict[str, str]
    workspace_bytes: int
    bytes: int | None
    flops: int | None
    roofline_us: float | None
    times: int | None
    path: tuple[str, ...]
    source: str
    code: str = ""
    estimated_us: float | None = None
    xla_estimated_us: float | None = None
    epilogue: tuple[str, ...] = ()

    def as_dict(self) -> dict:
        """Return the attributes as strings, numbers, lists and dictionaries, for JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        problem = None if self.problem is None else str(self.problem)
        lists = {name: list(getattr(self, name)) for name in ("copies", "path", "epilogue")}
        return fields | lists | {"problem": problem, "rejected": dict(self.rejected)}


@dataclasses.dataclass(frozen=True)
class Explanation(Sequence):
    """The result of `explain`: a sequence of `Call`s that prints as a table."""

    calls: tuple[Call, ...]
    platform: str
    device: selection.Device

    def __getitem__(self, index):
        return self.calls[index]

    def __len__(self) -> int:
        return len(self.calls)

    def as_dict(self) -> dict:
        """Return platform, device and calls as dictionaries, lists, strings and numbers."""
        return {
            "platform": self.platform,
            "device": dataclasses.asdict(self.device),
            "calls": [call.as_dict() for call in self.calls],
        }

    def __rich__(self):
        from rich import box
        from rich.console import Group
        from rich.table import Table

        if not self.calls:
            return "No product of jax_tcgemm in this function."
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for heading in ("#", "problem", "times", "implementation", "why"):
            table.add_column(heading, overflow="fold")
        for heading in ("GFLOP", "MB", "roofline us"):
            table.add_column(heading, justify="right")
        notes = []
        for i, call in enumerate(self.calls):
            where = " ".join(call.path)
            times = "?" if call.times is None else str(call.times)
            table.add_row(
                str(i),
                "-" if call.problem is None else str(call.problem),
                f"{times} {where}".rstrip(),
                f"{call.implementation}/{call.config}",
                call.why,
                _scaled(call.flops, 1e9),
                _scaled(call.bytes, 1e6),
                _scaled(call.roofline_us, 1),
            )
            notes += [f"{i}: copy: {copy}" for copy in call.copies]
            notes += [f"{i}: {name} cannot run this: {why}" for name, why in call.rejected.items()]
        codes = [f"\n{i}:\n{call.code.rstrip()}" for i, call in enumerate(self.calls) if call.code]
        return Group(f"Lowered for {self._target()}", table, *notes, *codes)

    def _target(self) -> str:
        if self.platform != "cuda":
            return self.platform
        known = peaks(self.device.compute_capability)
        major, minor = divmod(self.device.compute_capability, 10)
        rates = f"peak rates of {known.name}" if known else "peak rates not known"
        assumed = ", assumed" if self.device.assumed else ""
        return f"cuda, compute capability {major}.{minor}{assumed} ({rates})"

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        width = max(100, shutil.get_terminal_size((140, 24)).columns)
        Console(file=out, width=width, highlight=False).print(self.__rich__(), markup=False)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _scaled(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.4g}"


def explain(f, *args, platform: str | None = None, source: bool = False, **kwargs) -> Explanation:
    """Report the implementation of every call of this library in a JAX function.

    The function is traced and lowered, but does not run.

    Args:
      f: a function that JAX can trace, jitted or not.
      *args: arguments of f, or `jax.ShapeDtypeStruct`s.
      platform: "cuda" or "cpu", the platform to lower for. None selects JAX's default. For "cuda"
        on a machine without a GPU, an H200 is assumed.
      source: whether to include the generated device code of epilogues, as `Call.code` and after
        the table.
      **kwargs: keyword arguments of f.

    Returns:
      An `Explanation`, a sequence with one `Call` per call in the program that JAX lowers for
      `jax.jit(f)`, in program order, also inside jit, scan, while, cond, remat, custom derivatives
      and shard_map. The result prints as a table. JAX removes unused products before lowering, so
      such products are not listed: `jax.grad` of a sum of a product has no forward product, but
      `jax.value_and_grad` has one. A call in a loop is listed once, with the number of executions.
      For a `lax.platform_dependent`, only the branch of the platform is listed. Where explicit mesh
      axes or shard_map shard a product, the listed call is the call of each device. For automatic
      mesh axes, the sharding is unknown before XLA compiles, so the listed call is the whole
      product (`TCGEMM_PRINT_CHOICE=1` prints the selection for the shards).

    Raises:
      ValueError: if the platform is unknown, a `lax.platform_dependent` has no branch for the
        platform, or a call names an implementation or config that cannot run the call. Lowering the
        function raises the same error.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> x = jnp.ones((256, 128), jnp.bfloat16)
      >>> report = jax_tcgemm.explain(lambda x: jax_tcgemm.matmul(x, x.T), x, platform="cpu")
      >>> report[0].problem.m, report[0].problem.flops
      (256, 16777216)
    """
    if not callable(f):
        raise TypeError(
            f"explain: f must be a function, got f of type {type(f).__name__}; pass its arguments "
            "after it"
        )
    if platform is None:
        platform = jax.default_backend()
        platform = "cuda" if platform == "gpu" else platform
    if not isinstance(platform, str) or platform not in ("cuda", "cpu"):
        raise ValueError(
            f"explain: platform must be cuda or cpu, got {platform=}; None takes JAX's default"
        )
    if not isinstance(source, bool):
        raise TypeError(
            f"explain: source must be True or False, got source of type {type(source).__name__}; "
            "pass other arguments of f by position"
        )
    device = selection.target_device(platform)
    traced = jax.make_jaxpr(lambda args, kwargs: f(*args, **kwargs))(args, kwargs)
    found = _calls(as_lowered(traced), device, 1, ())
    if not source:
        found = [dataclasses.replace(call, code="") for call in found]
    return Explanation(tuple(found), platform, device)


def _calls(jaxpr, device, times, path) -> Iterator[Call]:
    notes = rewriting.notes(jaxpr.eqns, jaxpr.outvars)
    made_by = {x: eqn for eqn in jaxpr.eqns for x in eqn.outvars}
    for number, eqn in enumerate(jaxpr.eqns):
        if (reading := _READING.get(eqn.primitive)) is not None:
            eqn = transposed_operands(eqn, made_by, reading)
        for call in _calls_of(eqn, device, times, path):
            if number in notes and (eqn.primitive in _RULES or rewriting.loss_note(eqn)):
                call = dataclasses.replace(call, why=f"{call.why}; {notes[number]}")
            yield call
        yield from _sums_of(eqn, device, times, path)


def _sums_of(eqn, device, times, path) -> Iterator[Call]:
    """Yield the kernels that sum a product over devices of explicit mesh axes."""
    avals, outs = ([v.aval for v in values] for values in (eqn.invars, eqn.outvars))
    if eqn.primitive not in _SUMMED or not partitioning.has_explicit_axes(*avals):
        return
    rules, _ = _RULES[eqn.primitive]
    # The sum of an unfused product is found beside its bare product.
    is_unfused = rules is epilogue_primitive and not _plan(eqn, device).is_fused
    if is_unfused or lowering.obstacle_of(device.platform, *avals, *outs):
        return
    for inner in partitioning.sums_of(rules.division_of(*avals, eqn.params), avals, outs):
        plan = _plan(inner, device)
        if not plan.runs_by_xla:
            call = _explain_call(inner, plan, device, times, path)
            yield dataclasses.replace(call, source=source_line(eqn))


def _calls_of(eqn, device, times, path) -> Iterator[Call]:
    if eqn.primitive in _RULES:
        plan = _plan(eqn, device)
        if isinstance(plan, fused.Plan) and not plan.is_fused:
            # Of a function as epilogue the rest has no products, but those it calls itself.
            inner = _unfused(eqn, epilogue_primitive.bare_products, device)
            for call in _calls(inner, device, times, path):
                where = source_line(eqn)
                if isinstance(call.problem, AllReduceProblem):
                    yield dataclasses.replace(call, source=where)
                    continue
                why, code = f"{plan.choice.why}; its product: {call.why}", plan.code
                rejected = _rejected(plan.choice) | call.rejected
                rejected.pop(call.implementation, None)
                own = {"why": why, "source": where, "code": code, "rejected": rejected}
                call = dataclasses.replace(call, **own)
                if not _is_fused(call.problem):  # of nested functions the whole one
                    call = dataclasses.replace(call, epilogue=epilogue_operations(plan))
                yield call
            function = as_jaxpr(eqn.params["function"])
            yield from _calls(function, device, times, path)
        else:
            yield _explain_call(eqn, plan, device, times, path)
        return
    if eqn.primitive in backward.UNFUSED:
        inner = _unfused(eqn, backward.UNFUSED[eqn.primitive], device)
        for call in _calls(inner, device, times, path):
            yield dataclasses.replace(call, source=source_line(eqn))
        return
    for inner, inner_times, label in _inner_jaxprs(eqn, device.platform):
        count = None if times is None or inner_times is None else times * inner_times
        yield from _calls(inner, device, count, path + ((label,) if label else ()))


def _inner_jaxprs(eqn, platform: str) -> Iterator[tuple[core.Jaxpr, int | None, str]]:
    """Yield each jaxpr that is lowered for an eqn, its number of runs, and its label or ""."""
    name, params = eqn.primitive.name, eqn.params
    if name in _LOWERED:
        yield as_jaxpr(_LOWERED[name](params)), 1, ""
        return
    if (choices := params.get("branches_platforms")) is not None:
        yield _branch_of(platform, choices, params["branches"]), 1, ""
        return
    for key, value in params.items():
        jaxprs = [
            jaxpr
            for item in (value if isinstance(value, list | tuple) else (value,))
            if (jaxpr := as_jaxpr(item)) is not None
        ]
        for index, jaxpr in enumerate(jaxprs):
            if name == "scan":
                yield jaxpr, params["length"], f"scan[{params['length']}]"
            elif name == "while":
                yield jaxpr, None, f"while.{key.removesuffix('_jaxpr')}"
            elif name == "cond":
                yield jaxpr, None, f"cond[{index}]"
            else:
                yield jaxpr, 1, name if name == "shard_map" else ""


def _branch_of(platform: str, choices, branches) -> core.Jaxpr:
    """The branch of a `lax.platform_dependent` that is lowered for a platform."""
    for platforms, branch in zip(choices, branches, strict=True):
        if platforms is None or platform in platforms:
            return as_jaxpr(branch)
    known = ", ".join(name for platforms in choices for name in platforms)
    raise ValueError(
        f"explain: every platform_dependent in f must have a branch for {platform}, got branches "
        f"for {known}; give it a default, or explain another platform"
    )


def _unfused(eqn, f, device: selection.Device) -> core.Jaxpr:
    """Jaxpr of the unfused products that an eqn runs as."""
    params = eqn.params
    if "xla_dtype" in params and device.platform != "cuda":
        params = params | {"xla_dtype": None}  # which GPUs alone compute in
    f = functools.partial(f, **params)
    avals = [v.aval for v in eqn.invars]
    if len(avals) > 1 and eqn.invars[0] is eqn.invars[1]:
        # As `partitioning.lower_on_device` has it.
        f, avals = partitioning.of_one_array(f), avals[1:]
    mesh = avals[0].sharding.mesh
    manual = {
        axis
        for axis, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if axis_type == AxisType.Manual
    }
    if not manual:
        return as_jaxpr(jax.make_jaxpr(f)(*avals))
    # f may have collectives, which can only be traced inside a shard_map over their axes.
    types = tuple(
        AxisType.Auto if axis in manual else axis_type
        for axis, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True)
    )
    outside = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
    specs = {"in_specs": P(), "out_specs": P(), "axis_names": manual}
    f = jax.shard_map(f, mesh=outside, **specs, check_vma=False)
    args = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(outside, a.sharding.spec))
        for a in avals
    ]
    (shard_map,) = as_jaxpr(jax.make_jaxpr(f)(*args)).eqns
    return as_jaxpr(shard_map.params["jaxpr"])


def _plan(eqn, device):
    """Plan of the call that an eqn would run as on a device."""
    rules, planner = _RULES[eqn.primitive]
    avals = [v.aval for v in eqn.invars]
    outs = [v.aval for v in eqn.outvars]
    obstacle = lowering.obstacle_of(device.platform, *avals, *outs)
    one_device, params = [*avals, *outs], eqn.params
    if not obstacle and partitioning.has_explicit_axes(*avals):
        if rules is blas:
            obstacle = blas.DIVIDED
        elif rules is quantize and eqn.params["options"].is_unconstrained:
            obstacle = quantize.obstacle_to_division(*avals, eqn.params)
        elif rules is epilogue_primitive:
            whole = rules.product_of(*avals, eqn.params)
            obstacle = rules.obstacle_to_division(avals, whole, eqn.params, device)
        if not obstacle:
            division = rules.division_of(*avals, eqn.params)
            one_device = partitioning.shards(division, avals, outs)
            if rules is epilogue_primitive:
                params = params | {"encoding": params["encoding"].unsharded()}
            if rules is epilogue_primitive and partitioning.waits_for_sum(division, avals, outs):
                obstacle = "what follows the product waits for its sum over devices"
    num_types = len(avals) + (rules is not epilogue_primitive)
    product = rules.product_of(*one_device[:num_types], params)
    is_whole = one_device[: len(avals)] == avals
    of_values = dense.Product | fused.FusibleProduct | device_tensor.Request
    if is_whole and isinstance(product, of_values):
        product = product.of_values(eqn.invars)
    return planner.make_plan(product, device, obstacle)


def _explain_call(eqn, plan, device, times, path) -> Call:
    problem, choice = plan.problem, plan.choice
    seconds = problem and roofline_seconds(problem, device.compute_capability)
    return Call(
        implementation=choice.implementation,
        config=choice.config,
        why=choice.why,
        problem=problem,
        copies=plan.copies,
        rejected=_rejected(choice),
        workspace_bytes=choice.workspace_bytes,
        bytes=problem.bytes if problem else None,
        flops=problem.flops if problem else None,
        roofline_us=seconds * 1e6 if seconds is not None else None,
        times=times,
        path=path,
        source=source_line(eqn),
        code=plan.code,
        estimated_us=selection.estimated_us(problem, device, choice.implementation, choice.config),
        xla_estimated_us=plan.xla_us(device),
        epilogue=epilogue_operations(plan),
    )


def _rejected(choice: selection.Choice) -> dict[str, str]:
    """For every implementation none of whose configs can run a call, the rule of the first."""
    can_run = {c.implementation for c in choice.candidates if not c.reason}
    rejected = {
        c.implementation: c.reason
        for c in reversed(choice.candidates)
        if c.reason and c.implementation not in can_run
    }
    return dict(reversed(rejected.items()))


def _is_fused(problem) -> bool:
    """Whether a problem has a function as its epilogue."""
    return getattr(getattr(problem, "epilogue", None), "function", None) is not None
