"""From a jaxpr to the device code that computes one element of its results."""

import functools
import math
import re
import textwrap
from collections.abc import Sequence

import jax
import numpy as np
from jax.extend import core

from jax_tcgemm.epilogues.code import expressions, places, values
from jax_tcgemm.epilogues.code.expressions import STORED, Types, computed, is_narrow
from jax_tcgemm.epilogues.code.places import Place, Places
from jax_tcgemm.epilogues.code.reader import Reader
from jax_tcgemm.epilogues.code.source import (
    EpilogueSource,
    InexpressibleError,
    Read,
    Reduction,
    Result,
)
from jax_tcgemm.epilogues.code.values import Value, View


def emit(
    jaxpr: core.ClosedJaxpr, num_accumulators: int = 1
) -> tuple[EpilogueSource, tuple[jax.Array, ...]]:
    """Emit the device code of an elementwise function.

    With ``at`` the indices of an element of the accumulators, the code computes each result's
    element from the accumulators' and from one element of each operand, wherever that lies: arrays
    that are broadcast, transposed, sliced, reversed or reshaped are read where they are.

    Results are arrays of the accumulators' shape, of any dtypes, or their sums, maxima or minima
    along some dimensions, which may be converted afterwards.

    Results of less than 32 bits are returned in float32; the kernel rounds them when storing.

    Numerics: each primitive rounds to its dtype, as JAX means it, except that a compiler may
    contract a product and a sum of float32 or float64 into one operation, as XLA's do. Conversions
    to integers are towards zero and saturate, NaN becomes 0. The payload of a NaN is not kept.

    Args:
      jaxpr: function of the accumulators, all of one shape, and of operands.
      num_accumulators: number of arguments that are accumulators.

    Returns:
      The code, and the arrays that the function closes over, which are operands after those of the
      jaxpr. For operands that are random keys, the code reads `jax.random.key_data`.

    Raises:
      InexpressibleError: if an equation has no device code; the message names the first one.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> acc, bias = jax.ShapeDtypeStruct((8, 16), jnp.float32), jnp.zeros(16, jnp.bfloat16)
      >>> source, _ = emit(jax.make_jaxpr(lambda acc, bias: jnp.tanh(acc + bias))(acc, bias))
      >>> print(source.struct)
      struct Epilogue {
        template <typename Index>
        static __device__ __forceinline__ void apply(
            const float acc0, const __nv_bfloat16 x0, const Index&, float& y0) {
          const float v0 = wide(x0);
          const float v1 = acc0 + v0;
          const float v2 = tanhf(v1);
          y0 = v2;
        }
      };
      <BLANKLINE>
      >>> source.reads[0].dimensions
      (1,)
    """
    shapes = {var.aval.shape for var in jaxpr.jaxpr.invars[:num_accumulators]}
    if len(shapes) != 1:
        raise ValueError(f"epilogue: accumulators must be of one shape, got {sorted(shapes)}")
    results = Reader(num_accumulators).read(jaxpr)
    emitter = _Emitter(*shapes, len(jaxpr.jaxpr.invars) - num_accumulators)
    stored = tuple(emitter.store(number, value) for number, value in enumerate(results))
    dtypes = tuple(var.aval.dtype for var in jaxpr.jaxpr.invars[:num_accumulators])
    source = EpilogueSource(
        emitter.struct(dtypes, stored),
        dtypes,
        tuple(emitter.reads),
        stored,
        tuple(sorted(emitter.index_dimensions)),
    )
    return source, tuple(emitter.constants)


_F64 = np.dtype(np.float64)

# A value's element, by where it lies.
_Element = tuple[Value, Places]


class _Emitter:
    """Code of one function.

    Args:
      shape: shape of the accumulators.
      num_operands: number of operands before the arrays that the function closes over.
    """

    def __init__(self, shape: tuple[int, ...], num_operands: int):
        self._shape, self._num_operands = shape, num_operands
        self._everywhere = places.everywhere(shape)
        self._texts: dict[_Element, str] = {}
        # For each line, the variable that it defines, and its text.
        self._lines: list[tuple[str, str]] = []
        # For each rounded variable, the expression before rounding.
        self._unrounded: dict[str, str] = {}
        self.reads: list[Read] = []
        self.constants: list[jax.Array] = []
        self.index_dimensions: set[int] = set()

    def struct(self, accumulators: Sequence[np.dtype], results: Sequence[Result]) -> str:
        """Return the C++ text."""
        parameters = [f"const {computed(x)} acc{i}" for i, x in enumerate(accumulators)]
        parameters += [f"const {STORED[x.dtype]} x{i}" for i, x in enumerate(self.reads)]
        parameters += ["const Index& at" if self.index_dimensions else "const Index&"]
        parameters += [f"{computed(x.dtype)}& y{i}" for i, x in enumerate(results)]
        lines = [
            "struct Epilogue {",
            "  template <typename Index>",
            "  static __device__ __forceinline__ void apply(",
            *textwrap.wrap(
                ", ".join(parameters).replace(" ", _BOUND).replace(f",{_BOUND}", ", ") + ") {",
                **{"width": 100, "initial_indent": " " * 6, "subsequent_indent": " " * 6},
            ),
            *(f"    {line}" for line in self._used_lines()),
            "  }",
            "};",
        ]
        return "\n".join(lines).replace(_BOUND, " ") + "\n"

    def store(self, number: int, value: Value) -> Result:
        """Add a result."""
        reduced, element, dtype = _reduced(value), value, value.dtype
        if reduced is not None:
            element, dtype = reduced.of, reduced.dtype
        while element.shape != self._shape and isinstance(element, View) and element.keeps_order:
            element = element.of
        if element.shape != self._shape:
            name = str(getattr(element, "equation", f"result {number}"))
            raise InexpressibleError(
                f"{name}, which result {number} is,",
                f"be of shape {self._shape}, or be a sum, maximum or minimum of such an array over "
                f"some dimensions, got shape {element.shape}",
            )
        text = self._element(element, self._everywhere)
        if is_narrow(element.dtype):
            # The kernel rounds it when storing.
            text = self._unrounded.get(text, text)
        self._lines.append((f"y{number}", f"y{number} = {text};"))
        if reduced is None:
            return Result(dtype)
        return Result(dtype, Reduction(reduced.kind, reduced.dimensions))

    def _used_lines(self) -> list[str]:
        """Return the lines that results need, with variables renumbered in order."""
        used, texts = set(), []
        for name, text in reversed(self._lines):
            if name.startswith("y") or name in used:
                texts.append(text)
                used.update(_NAME.findall(text))
        names = {}
        for name, _ in self._lines:
            if name in used:
                names[name] = f"v{len(names)}"
        return [_NAME.sub(lambda match: names[match[0]], text) for text in reversed(texts)]

    def _element(self, value: Value, at: Places) -> str:
        """Return the expression of an element, a name or a literal; add the lines that it needs."""
        # Functions can have more equations than Python has frames.
        wanted = self._moved(value, at)
        stack = [wanted]
        while stack:
            element = stack[-1]
            missing = [x for x in self._operands(*element) if x not in self._texts]
            if missing:
                stack += reversed(missing)
            else:
                stack.pop()
                if element not in self._texts:
                    self._texts[element] = self._text(*element)
        return self._texts[wanted]

    def _moved(self, value: Value, at: Places) -> _Element:
        """Return the element of the value behind views."""
        while isinstance(value, View):
            try:
                value, at = value.of, value.move(at, self._shape)
            except places.NoPlaceError:
                raise InexpressibleError(
                    f"a reshape from {value.of.shape} to {value.shape}",
                    "leave elements that follow each other at equal distances",
                ) from None
        return value, at

    def _operands(self, value: Value, at: Places) -> list[_Element]:
        if isinstance(value, values.Member):
            return [(value.of, at)]
        if not isinstance(value, values.Apply):
            return []
        found = []
        for operand in value.operands:
            # Of extent 1 it broadcasts, and of rank 0.
            zero = places.first(len(self._shape))
            pairs = zip(at, operand.shape, strict=False)
            operand_at = tuple(zero if extent == 1 else place for place, extent in pairs)
            found.append(self._moved(operand, operand_at))
        return found

    @functools.singledispatchmethod
    def _text(self, value: Value, at: Places) -> str:
        """Return the expression of an element whose operands already have expressions."""
        raise NotImplementedError(type(value))

    @_text.register
    def _(self, value: values.Accumulator, at: Places) -> str:
        if at != self._everywhere:
            raise InexpressibleError(
                f"accumulator {value.number}",
                "be used at the element that is computed, and nowhere else",
            )
        return f"acc{value.number}"

    @_text.register
    def _(self, value: values.Operand, at: Places) -> str:
        number = value.number
        if not isinstance(number, int):
            known = [i for i, array in enumerate(self.constants) if array is number]
            if not known:
                self.constants.append(number)
            number = self._num_operands + (known[0] if known else len(self.constants) - 1)
        _check_dtypes(f"operand {number}", value.dtype)
        name = f"x{len(self.reads)}"
        self.reads.append(Read(number, value.dtype, at))
        return self._line(value.dtype, f"wide({name})") if is_narrow(value.dtype) else name

    @_text.register
    def _(self, value: values.Constant, at: Places) -> str:
        _check_dtypes("a constant", value.dtype)
        return expressions.literal(value.number)

    @_text.register
    def _(self, value: values.Index, at: Places) -> str:
        _check_dtypes("iota", value.dtype)
        shape = [value.shape[dim] for dim in value.dimensions]
        along = tuple(at[dim] for dim in value.dimensions)
        place = places.linear(along, places.row_major(shape), len(self._shape))
        if math.prod(shape) <= 2**value.shift:
            place = places.first(len(self._shape))
        place_dimensions = place.dimensions
        if not place_dimensions:
            number = np.int64(place.offset >> value.shift).astype(value.dtype)
            return expressions.literal(value.dtype.type(number))
        self.index_dimensions.update(place_dimensions)
        is_long = math.prod(shape) > 2**31
        text = _place_text(place, "int64_t" if is_long else "")
        if value.shift:
            text = f"({text}) >> {value.shift}"
        index_dtype = np.dtype(np.int64 if is_long else np.int32)
        if value.dtype != index_dtype:
            text = expressions.convert(index_dtype, value.dtype, text)
        return self._line(value.dtype, text)

    @_text.register
    def _(self, value: values.Apply, at: Places) -> str:
        _check_dtypes(value.equation, value.dtype, *(x.dtype for x in value.operands))
        types = Types(tuple(x.dtype for x in value.operands), value.dtype, value.params)
        operands = [self._texts[x] for x in self._operands(value, at)]
        try:
            text = expressions.EXPRESSIONS[value.primitive](types, *operands)
        except expressions.NoExpressionError as error:
            raise InexpressibleError(str(value.equation), str(error)) from None
        if text in operands:
            return text
        if value.primitive == "threefry2x32":
            return self._line(None, text)
        name = self._line(value.dtype, text, value.expanded)
        prefix = f"rounded<{STORED[value.dtype]}>("
        # A float64 is rounded to 8 bits at once.
        if text.startswith(prefix) and (value.dtype.itemsize > 1 or _F64 not in types.operands):
            self._unrounded[name] = text[len(prefix) : -1]
        return name

    @_text.register
    def _(self, value: values.Member, at: Places) -> str:
        return f"{self._texts[value.of, at]}.{('first', 'second')[value.number]}"

    @_text.register
    def _(self, value: values.Reduced, at: Places) -> str:
        raise InexpressibleError(str(value.equation), "be a result, with nothing computed from it")

    @_text.register
    def _(self, value: values.Opaque, at: Places) -> str:
        raise InexpressibleError(str(value.equation), value.rule)

    @_text.register
    def _(self, value: values.Keys, at: Places) -> str:
        raise InexpressibleError("random keys", "be used by functions of jax.random only")

    def _line(self, dtype: np.dtype | None, text: str, comment: str = "") -> str:
        """Add a line; return the name of the variable that it defines."""
        name = f"v{len(self._lines)}"
        kind = "Words" if dtype is None else computed(dtype)
        note = f"  // {comment}" if comment else ""
        self._lines.append((name, f"const {kind} {name} = {text};{note}"))
        return name


_NAME = re.compile(r"\bv\d+\b")
# Stands for a space at which no line ends.
_BOUND = "\0"


def _reduced(value: Value) -> values.Reduced | None:
    """Return the reduction behind reshapes and at most one conversion of a result, or None."""
    is_converted = False
    while not isinstance(value, values.Reduced):
        is_conversion = (
            isinstance(value, values.Apply) and value.primitive == "convert_element_type"
        )
        if isinstance(value, View) and value.keeps_order:
            value = value.of
        elif is_conversion and not is_converted:
            (value,), is_converted = value.operands, True
        else:
            return None
    return value


def _check_dtypes(what, *dtypes) -> None:
    for dtype in dtypes:
        if dtype not in STORED:
            raise InexpressibleError(str(what), f"be of dtypes that kernels have, got {dtype}")


def _place_text(place: Place, cast: str) -> str:
    terms = []
    for dim in place.dimensions:
        index = f"{cast}{{at[{dim}]}}" if cast else f"at[{dim}]"
        factor = place.factors[dim]
        terms.append(index if factor == 1 else f"{index} * {factor}")
    if place.offset:
        terms.append(str(place.offset))
    return " + ".join(terms)
