"""Rewrite pass for losses, which are then computed without storing their logits.

A product is the logits of a loss if all values that the program computes from it have the forms of
`values`. A call of `losses/rows.py` then replaces the product and computes the log-sum-exp and the
loss of each token. A second call replaces the products that multiply the gradient of the logits. If
the per-token factors of that gradient depend on neither log-sum-exps nor losses, one call of
`losses/sums.py` computes losses and gradients together. What the program computes from log-sum-exps
and losses does not change.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jax_tcgemm.epilogues.membership import is_written_call
from jax_tcgemm.losses.how import How
from jax_tcgemm.passes.losses import values as lv
from jax_tcgemm.passes.losses.calls import Calls, Product, Sums, loss_note
from jax_tcgemm.passes.losses.elementwise import Elementwise
from jax_tcgemm.passes.losses.exponentials import exponentiated
from jax_tcgemm.passes.losses.heads import SHAPING, VARYING, Head, as_rows, head_of
from jax_tcgemm.passes.losses.labels import Labels, keeps_order
from jax_tcgemm.passes.losses.values import Full, NotALossError, Row, Slope
from jax_tcgemm.passes.losses.writing import Writer
from jax_tcgemm.passes.programs import in_order, is_manual, traced, without_unused, written_out
from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.problem.call_options import CallOptions, LossKeepsLogits
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.problem.precision import is_split
from jax_tcgemm.system.jax_internals import (
    as_jaxpr,
    has_plain_context,
    new_variable,
    varying_axes,
)

# Least bytes of logits in float32 for which the pass is used: smaller logits stay in a GPU's cache.
# Gradients that recompute the logits take longer than stored logits and only save memory, so their
# limit is higher.
_LEAST_BYTES = 1 << 26
_LEAST_BYTES_AGAIN = 1 << 30
_LEAST_VOCABULARY = 1024
_DTYPES = tuple(map(np.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))
# Primitives that keep elements and their order if they keep the number of elements.
_KEEPING = SHAPING | {"reduce_sum", "reduce_max"}


def with_losses(
    equations: Sequence[core.JaxprEqn], results: Sequence, *, wide: bool, losses: bool | None
):
    """Replace losses by calls that do not store logits; return equations and results.

    A product that looks like logits but is not replaced gets the reason as a diagnostic.

    Args:
      equations: a program whose products are this library's.
      results: the program's results.
      wide: whether to leave out roundings of the logits.
      losses: whether to replace losses; None replaces them unless there are several devices and
        the program is outside of `shard_map`, where XLA may shard the tokens.
    """
    equations, results = list(equations), list(results)
    if losses is False:
        return equations, results
    candidates = [eqn for eqn in equations if _may_be_logits(eqn)]
    wanted = exponentiated(equations, [eqn.outvars[0] for eqn in candidates])
    for eqn in [eqn for eqn in candidates if eqn.outvars[0] in wanted]:
        if not any(other is eqn for other in equations):
            continue  # a product of another loss, which was replaced
        loss = _Loss(equations, results, eqn, wide=wide)
        try:
            found = loss.rewritten()
            is_divided = jax.device_count() > 1 and eqn.outvars[0].aval.sharding.mesh.empty
            if losses is None and is_divided:
                raise NotALossError(
                    "XLA must not shard it over the devices, of which there are several; pass "
                    "losses=True to accelerate if XLA does not"
                )
            equations, results = found
        except NotALossError as reason:
            if loss.looks_like_one:
                options = eqn.params["options"].reporting(LossKeepsLogits(str(reason)))
                place = next(i for i, other in enumerate(equations) if other is eqn)
                equations[place] = eqn.replace(params=eqn.params | {"options": options})
    return equations, results


def _may_be_logits(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive is not plain.dot_general_p or not has_plain_context(eqn):
        return False
    params, (out,), (x, w) = eqn.params, eqn.outvars, eqn.invars
    if not params["options"].is_unconstrained or params["out_sharding"] is not None:
        return False
    precision = params["precision"]
    is_preset = isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset)
    if is_preset and not is_split(precision):
        return False
    if x.aval.dtype != w.aval.dtype or x.aval.dtype not in _DTYPES:
        return False
    if not is_manual(out.aval.sharding.mesh) or out.aval.dtype not in _DTYPES:
        return False
    shape = out.aval.shape
    if len(shape) < 2 or not all(isinstance(extent, int) for extent in shape):
        return False
    wide = wide_dtype(x.aval.dtype).itemsize
    return shape[-1] >= _LEAST_VOCABULARY and math.prod(shape) * wide >= _LEAST_BYTES


class _Loss:
    """Program in which one product may be the logits of a loss.

    `_known` has the symbolic value of each variable, whose token dimensions may be reshaped.
    `_gone` has the variables that depend on logits, which are not in the new program.
    """

    def __init__(self, equations, results, eqn: core.JaxprEqn, *, wide: bool):
        self._equations, self._results, self._eqn = equations, results, eqn
        (logits,) = eqn.outvars
        self._shape, self._dtype = logits.aval.shape, wide_dtype(eqn.invars[0].aval.dtype)
        self._tokens, self._mesh = self._shape[:-1], logits.aval.sharding.mesh
        self._varies = any(varying_axes(x.aval) for eqn in equations for x in eqn.outvars)
        self._rounded_to = None if wide or logits.aval.dtype == self._dtype else logits.aval.dtype
        self._head: Head | None = None
        self._known: dict[core.Var, Full | Row | Slope | bool] = {}
        self._gone: set[core.Var] = set()
        self._writer = Writer(self._tokens, self._dtype, self._mesh, varies=self._varies)
        self._labels = Labels(self._shape, self._writer)
        self._made_here: tuple[core.Var, core.Var] | None = None
        self._products: list[Product | Sums] = []
        self._gradient: Full | None = None
        self._largest: list[core.JaxprEqn] = []
        self._rows = lv.Rows(self._writer.emit, self._lse_and_losses)
        self._fulls = lv.Fulls(self._rows)
        self._elementwise = Elementwise(self._rows, self._fulls)
        self.looks_like_one = False

    def rewritten(self):
        """Return the equations and results without the logits.

        Raises:
          NotALossError: if the program needs the logits.
        """
        equations, results = written_out(self._equations, self._results, self._is_of_logits)
        equations = without_unused(equations, results)
        self._head = head_of(equations, results, self._eqn.outvars[0])
        self.looks_like_one = any(
            eqn.primitive.name == "exp" and self._is_full(eqn.outvars[0].aval.shape)
            for eqn in equations
        )
        for eqn in equations:
            self._take(eqn)
        results = [x if isinstance(x, core.Literal) else self._value_of(x) for x in results]
        self._write_losses()
        return without_unused(in_order(self._writer.written), results), results

    def _is_of_logits(self, eqn: core.JaxprEqn) -> bool:
        """Return whether an equation calls a function that a loss may contain, to be inlined."""
        if not is_written_call(eqn) or loss_note(eqn):
            return False
        shapes = [x.aval.shape for x in (*eqn.invars, *eqn.outvars)]
        return any(self._is_full(s) or self._writer.is_row(s) for s in shapes)

    # --- equations --------------------------------------------------------------------------------

    def _take(self, eqn: core.JaxprEqn) -> None:
        if steps := self._head.made.intersection(eqn.outvars):
            self._take_step(*steps)
            return
        variables = (x for x in eqn.invars if not isinstance(x, core.Literal))
        is_of_logits = not self._gone.isdisjoint(variables)
        if not is_of_logits:
            self._writer.keep(eqn)
        elif eqn.primitive is plain.dot_general_p:
            self._take_product(eqn)
            return
        elif self._is_sum_of_gradients(eqn):
            self._take_gradient(self._known[eqn.invars[0]])
            self._products.append(Sums(eqn))
            return
        elif self._is_of_largest(eqn):
            self._largest.append(eqn)
            return
        made = None
        if len(eqn.outvars) == 1 and not eqn.effects and has_plain_context(eqn):
            try:
                made = self._made(eqn)
            except NotALossError:
                if is_of_logits:
                    raise
        if made is not None:
            self._know(eqn.outvars[0], made, is_gone=is_of_logits)
        elif is_of_logits:
            self._keep_of_rows(eqn)

    def _take_step(self, out: core.Var) -> None:
        """Add the result of a step of the head; only the next step reads intermediate results."""
        if out is self._head.logits:
            self._know(out, lv.LOGITS, is_gone=True)
        elif out is self._head.tanh:
            self._know(out, lv.TANH, is_gone=True)
        else:
            self._gone.add(out)

    def _know(self, var, value, *, is_gone: bool) -> None:
        self._known[var] = value
        if is_gone:
            self._gone.add(var)

    def _keep_of_rows(self, eqn: core.JaxprEqn) -> None:
        """Keep an equation, and compute the rows that it reads."""
        invars = [x if isinstance(x, core.Literal) else self._value_of(x, eqn) for x in eqn.invars]
        self._writer.keep(eqn.replace(invars=invars))

    def _value_of(self, x: core.Var, eqn: core.JaxprEqn | None = None) -> core.Var:
        """Return a variable of the new program for `x`, with the same type."""
        if x not in self._gone:
            return x
        value = self._known[x]
        if not isinstance(value, Row):
            if x.aval.dtype != self._dtype and value == lv.LOGITS:
                raise NotALossError(f"its logits must be {self._dtype} before all else")
            by = "among the results" if eqn is None else f"read by {eqn.primitive.name}"
            raise NotALossError(f"an array of the size of its logits must not be {by}")
        row = self._writer.of_shape(self._rows.value(value), x.aval.shape)
        return self._writer.varying_as(x, row)

    # --- what equations make ----------------------------------------------------------------------

    def _made(self, eqn: core.JaxprEqn) -> Full | Row | Slope | bool | None:
        """Return an equation's result as a symbolic value of logits; None without one."""
        (out,), name = eqn.outvars, eqn.primitive.name
        is_full = self._is_full(out.aval.shape)
        if out.aval.shape == () and name in (*VARYING, "convert_element_type"):
            known = self._operand(eqn.invars[0])
            is_number = isinstance(known, Row) and known.number is not None
            return lv.number(np.asarray(known.number).astype(out.aval.dtype)) if is_number else None
        if not is_full and not self._writer.is_row(out.aval.shape):
            return None
        is_any_known = any(x in self._known for x in eqn.invars if not isinstance(x, core.Literal))
        if name in _KEEPING and is_any_known and eqn.invars[0].aval.size == out.aval.size:
            return self._known[eqn.invars[0]]
        if name == "broadcast_in_dim":
            return self._repeated(eqn, is_full)
        if name == "eq" and is_full:
            return self._one_hot(eqn)
        if not is_any_known:
            return None
        if name == "gather":
            return self._gathered(eqn)
        if name == "scatter-add":
            return self._scattered(eqn)
        operands = [self._operand(x) for x in eqn.invars]
        if any(x is None for x in operands):
            return None
        if name == "convert_element_type":
            return self._converted(eqn, operands[0])
        dtypes = {x.aval.dtype for x in (*eqn.invars, out)}
        is_wide = dtypes <= {self._dtype, np.dtype(bool)}
        if not is_wide and not (is_full and _are_of_gradients(operands)):
            return None
        if name in VARYING:
            return operands[0]
        if name in ("reduce_sum", "reduce_max"):
            return self._reduced(eqn, operands[0])
        if is_full:
            return self._elementwise.of_fulls(name, operands)
        if any(isinstance(x, Full | Slope) for x in operands):
            return None
        return self._elementwise.of_rows(name, operands)

    def _is_full(self, shape: tuple[int, ...]) -> bool:
        return as_rows(shape) == as_rows(self._shape)

    def _operand(self, x) -> Full | Row | Slope | bool | None:
        if isinstance(x, core.Literal):
            return lv.number(x.val) if np.ndim(x.val) == 0 else None
        if x in self._known:
            return self._known[x]
        if x.aval.dtype == self._dtype and self._writer.is_row(x.aval.shape):
            return lv.variable(self._writer.of_shape(x, self._tokens))
        return None

    def _repeated(self, eqn: core.JaxprEqn, is_full: bool) -> Full | Row | None:
        (x,), (out,) = eqn.invars, eqn.outvars
        if out.aval.dtype != self._dtype:
            return None
        if x.aval.shape == ():
            row = lv.number(x.val) if isinstance(x, core.Literal) else self._known.get(x)
            return Full(gamma=row) if is_full and row is not None else row
        if not keeps_order(eqn) or not self._writer.is_row(x.aval.shape):
            return None
        row = self._operand(x)
        if not isinstance(row, Row):
            return None
        if is_full:
            return Full(gamma=row)
        return row if x in self._known else None

    def _converted(self, eqn: core.JaxprEqn, x) -> Full | Row | None:
        before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        if before == after:
            return x
        if not isinstance(x, Full):
            return None
        if after == self._dtype and (x == lv.LOGITS or before == np.bool_):
            return x
        # A gradient of logits may be rounded to a narrower dtype before its products.
        return x if before == self._dtype and after in _DTYPES and x.zeta == 0 else None

    def _reduced(self, eqn: core.JaxprEqn, x) -> Row | None:
        if not isinstance(x, Full) or tuple(eqn.params["axes"]) != (eqn.invars[0].aval.ndim - 1,):
            return None
        if eqn.primitive.name == "reduce_max":
            return self._rows.add(lv.LARGEST, x.gamma) if x.is_logits else None
        return self._fulls.sum(x, self._shape[-1], self._where_labelled)

    # --- labels -----------------------------------------------------------------------------------

    def _one_hot(self, eqn: core.JaxprEqn) -> Full | None:
        return Full(beta=lv.number(1)) if self._labels.one_hot(eqn) else None

    def _gathered(self, eqn: core.JaxprEqn) -> Row | None:
        x, value = eqn.invars[0], self._known.get(eqn.invars[0])
        is_of_logits = isinstance(value, Full) and x.aval.dtype == self._dtype and value.zeta
        is_known = is_of_logits and self._labels.are_gathered(eqn)
        return self._fulls.at_labels(value) if is_known else None

    def _scattered(self, eqn: core.JaxprEqn) -> Full | None:
        x, _, updates = eqn.invars
        row = self._operand(updates)
        is_row = self._known.get(x) == Full() and isinstance(row, Row)
        return Full(beta=row) if is_row and self._labels.are_scattered(eqn) else None

    def _where_labelled(self, row: Row) -> Row:
        """Return a row that is 0 where the label is out of range."""
        label = self._writer.of_shape(self._labels.variable, self._tokens)
        value, size = self._rows.value(row), self._shape[-1]
        found = self._writer.emit(
            lambda x, label: jnp.where((label >= 0) & (label < size), x, 0), value, label
        )
        return lv.variable(found)

    def _is_of_largest(self, eqn: core.JaxprEqn) -> bool:
        """Return whether an equation is the argmax of each token's logits."""
        return (
            eqn.primitive.name == "argmax"
            and tuple(eqn.params["axes"]) == (eqn.invars[0].aval.ndim - 1,)
            and self._known.get(eqn.invars[0]) == lv.LOGITS
            and has_plain_context(eqn)
        )

    # --- products with the gradient of the logits -------------------------------------------------

    def _take_product(self, eqn: core.JaxprEqn) -> None:
        side = 0 if eqn.invars[0] in self._gone else 1
        gradient, other = self._known.get(eqn.invars[side]), eqn.invars[1 - side]
        is_known = self._is_gradient(gradient) and eqn.invars[side].aval.shape == self._shape
        if not is_known or other not in (self._head.x, self._head.w):
            raise NotALossError(
                "logits must be an operand of no other product, and their gradient only of "
                "products with features or weights"
            )
        self._take_gradient(gradient)
        if eqn.outvars[0].aval.dtype != other.aval.dtype:
            raise NotALossError("gradients must have the dtype of features and weights")
        self._products.append(Product(eqn, side, is_of_w=other is self._head.w))

    def _is_sum_of_gradients(self, eqn: core.JaxprEqn) -> bool:
        return (
            self._head.bias is not None
            and eqn.primitive.name == "reduce_sum"
            and tuple(eqn.params["axes"]) == tuple(range(eqn.invars[0].aval.ndim - 1))
            and self._is_gradient(self._known.get(eqn.invars[0]))
        )

    def _is_gradient(self, x) -> bool:
        """Return whether a value has the form of a gradient of the head's product."""
        if not isinstance(x, Full) or not x.is_gradient:
            return False
        is_capped = self._head.soft_cap is not None
        return x.slope.as_derivative is not None if is_capped else x.slope == lv.NO_SLOPE

    def _take_gradient(self, gradient: Full) -> None:
        if self._gradient not in (None, gradient):
            raise NotALossError("its logits must have one gradient")
        self._gradient = gradient

    # --- what is made -----------------------------------------------------------------------------

    def _lse_and_losses(self) -> tuple[core.Var, core.Var]:
        if self._made_here is None:
            logits = self._eqn.outvars[0].aval
            # Traced for the type of an array with a value for each token.
            row = traced(
                lambda z: jnp.sum(z.astype(self._dtype), -1),
                *([logits], self._mesh),
                varies=self._varies,
            )
            like, (aval,) = as_jaxpr(row).outvars[0], row.out_avals
            self._made_here = new_variable(like, aval), new_variable(like, aval)
        return self._made_here

    def _write_losses(self) -> None:
        if self._labels.variable is None:
            raise NotALossError("it must take the logits of labels")
        lse, losses = self._lse_and_losses()
        rows = []
        if self._gradient is not None:
            by = 1.0 if self._head.soft_cap is None else self._gradient.slope.as_derivative
            scaled = self._fulls.scale(self._gradient, lv.number(by))
            rows = [self._rows.value(row) for row in (scaled.alpha, scaled.beta)]
        after = self._writer.computed_from(lse, losses)
        if self._labels.variable in after:
            raise NotALossError("its labels must be known before it")
        is_known = after.isdisjoint(rows)
        size = math.prod(self._shape) * self._dtype.itemsize
        if not is_known and size < _LEAST_BYTES_AGAIN:
            raise NotALossError(
                "its logits must have at least 1 GiB to be recomputed for gradients, whose factors "
                "depend on the loss"
            )
        if self._largest and size < _LEAST_BYTES_AGAIN:
            raise NotALossError(
                "its logits must have at least 1 GiB to be recomputed for their argmax"
            )
        head, places = self._head, [eqn.outvars[0] for eqn in self._largest]
        bias = [] if head.bias is None else [self._writer.of_shape(head.bias, self._shape[-1:])]
        calls = Calls(
            self._how(),
            self._shape,
            has_bias=bool(bias),
            products=tuple(self._products),
            places=tuple((x.aval.shape, x.aval.dtype) for x in places),
            size=size,
        )
        if places:
            self._writer.emitted(calls.named("largest"), head.x, head.w, *bias, results=places)
        operands = head.x, head.w, *bias, self._labels.variable
        outs = [product.eqn.outvars[0] for product in self._products]
        if outs and is_known:
            f = calls.named("values_and_gradients")
            self._writer.emitted(f, *operands, *rows, results=(lse, losses, *outs))
            return
        self._writer.emitted(calls.named("values"), *operands, results=(lse, losses))
        if outs:
            self._writer.emitted(calls.named("gradients"), *operands, lse, *rows, results=outs)

    def _how(self) -> How:
        return How(
            CallOptions("linear_cross_entropy"),
            soft_cap=self._head.soft_cap,
            label_smoothing=0.0,
            z_loss=0.0,
            axis_name=None,
            chunk_bytes=None,
            precision=self._eqn.params["precision"],
            vocabulary_axis=self._head.vocabulary_axis,
            rounded_to=self._rounded_to,
            last_rounded=self._head.last_of(self._eqn.outvars[0].aval.dtype),
        )


def _are_of_gradients(operands) -> bool:
    """Return whether operands are gradients of logits or their slopes, of any dtype."""
    return any(isinstance(x, Full | Slope) for x in operands) and not any(
        isinstance(x, Full) and not x.is_gradient for x in operands
    )
