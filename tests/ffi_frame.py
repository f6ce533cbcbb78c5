"""Calls of the FFI handlers as XLA makes them, but without XLA: what a malformed program may say,
some thousand in a second, with every buffer in memory of its own.

A buffer of the host ends or begins at a page that cannot be touched, so that an access past it ends
the process at once; under AddressSanitizer the rest of its pages is poisoned too. That is why calls
are made in a process of their own: ffi_worker.py. The structures are those of xla/ffi/api/c_api.h,
whose layout may only grow.
"""

import concurrent.futures
import ctypes
import dataclasses
import itertools
import mmap

import ml_dtypes
import numpy as np

# Numbers of XLA_FFI_DataType: (number, bits of an element).
DTYPES = {
    "pred": (1, 8),
    "s8": (2, 8),
    "s16": (3, 16),
    "s32": (4, 32),
    "s64": (5, 64),
    "u8": (6, 8),
    "u16": (7, 16),
    "u32": (8, 32),
    "u64": (9, 64),
    "f16": (10, 16),
    "f32": (11, 32),
    "f64": (12, 64),
    "c64": (15, 64),
    "bf16": (16, 16),
    "token": (17, 0),
    "c128": (18, 128),
    "f8e5m2": (19, 8),
    "f8e4m3fn": (20, 8),
    "s4": (21, 4),
    "u4": (22, 4),
    "s2": (26, 2),
    "u2": (27, 2),
    "s1": (30, 1),
    "f4e2m1fn": (32, 4),
    "f8e8m0fnu": (33, 8),
    "unknown": (200, 8),
}
NUMPY = {
    "pred": np.bool_,
    "s8": np.int8,
    "s16": np.int16,
    "s32": np.int32,
    "s64": np.int64,
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
    "c64": np.complex64,
    "c128": np.complex128,
}
INVALID_ARGUMENT, INTERNAL = 3, 13
STAGES = {"instantiate": 0, "prepare": 1, "initialize": 2, "execute": 3}


@dataclasses.dataclass
class Buffer:
    """An operand or a result: what the program says of it, and the bytes it then has.

    `shares` is the position of
    the operand in whose memory a result lies.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None
    shares: int | None = None

    @classmethod
    def of(cls, array, dtype: str) -> "Buffer":
        return cls(dtype, array.shape, np.ascontiguousarray(array).tobytes())

    @property
    def num_bytes(self) -> int:
        """As XLA has them in memory: elements of less than a byte are packed."""
        return -(-int(np.prod(self.shape, dtype=object)) * DTYPES[self.dtype][1] // 8)

    @property
    def alignment(self) -> int:
        """That of its elements; of bytes, which workspaces are, what XLA promises."""
        width = DTYPES[self.dtype][1] // 8
        return width if width > 1 else 128

    def array(self) -> np.ndarray:
        """Its elements."""
        return np.frombuffer(self.data, NUMPY[self.dtype]).reshape(self.shape)


@dataclasses.dataclass
class Outcome:
    """What became of a call: the code of an error, 0 for none, and its message."""

    code: int
    message: str = ""


# --- structures -----------------------------------------------------------------------------------


def _struct(name: str, *fields) -> type:
    """A structure of the API: all begin with their size and a list of extensions."""
    base = [("struct_size", ctypes.c_size_t), ("extension_start", ctypes.c_void_p)]
    return type(name, (ctypes.Structure,), {"_fields_": [*base, *fields]})


def _plain(name: str, *fields) -> type:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


P = ctypes.c_void_p
_Buffer = _struct(
    "Buffer", ("dtype", ctypes.c_int), ("data", P), ("rank", ctypes.c_int64), ("dims", P)
)
_ByteSpan = _plain("ByteSpan", ("ptr", ctypes.c_char_p), ("len", ctypes.c_size_t))
_Scalar = _plain("Scalar", ("dtype", ctypes.c_int), ("value", P))
_Array = _plain("Array", ("dtype", ctypes.c_int), ("size", ctypes.c_size_t), ("data", P))
_Values = _struct("Values", ("size", ctypes.c_int64), ("types", P), ("values", P))
_Attrs = _struct("Attrs", ("size", ctypes.c_int64), ("types", P), ("names", P), ("attrs", P))
_CallFrame = _struct(
    "CallFrame",
    ("api", P),
    ("ctx", P),
    ("stage", ctypes.c_int),
    ("args", _Values),
    ("rets", _Values),
    ("attrs", _Attrs),
    ("future", P),
)
_Callback = ctypes.CFUNCTYPE(P, P)
_FUNCTIONS = (
    *("Error_Create", "Error_GetDetails", "Error_Destroy", "Handler_Register", "Stream_Get"),
    *("Type_Register", "InvokeContext_Get", "State_Set", "State_Get", "DeviceMemory_Allocate"),
    *("DeviceMemory_Free", "ThreadPool_Schedule", "ThreadPool_NumThreads", "Future_Create"),
    *("Future_SetAvailable", "Future_SetError", "RunId_Get", "DeviceOrdinal_Get"),
    *("InvokeContext_FindExtension", "CustomOptions_Get"),
)
_Version = _struct("Version", ("major_version", ctypes.c_int), ("minor_version", ctypes.c_int))
_Api = _struct(
    "Api",
    ("api_version", _Version),
    ("internal_api", P),
    *((name, _Callback) for name in _FUNCTIONS),
)
_ErrorCreate = _struct("ErrorCreate", ("message", ctypes.c_char_p), ("errc", ctypes.c_int))
_StreamGet = _struct("StreamGet", ("ctx", P), ("stream", P))
_State = _struct("State", ("ctx", P), ("stage", ctypes.c_int), ("type_id", P), ("state", P))
_Schedule = _struct("Schedule", ("ctx", P), ("task", P), ("data", P))
_NumThreads = _struct("NumThreads", ("ctx", P), ("num_threads", ctypes.POINTER(ctypes.c_int64)))
_Task = ctypes.CFUNCTYPE(None, P)


def _sized(cls, **values):
    made = cls(**values)
    made.struct_size = ctypes.sizeof(cls)
    return made


def _array(kind, values):
    return (kind * max(len(values), 1))(*values)


def _address(thing) -> int:
    return ctypes.addressof(thing)


# --- the API as XLA gives it to a handler ---------------------------------------------------------


class Api:
    """The functions that handlers call, over a thread pool and a state of our own."""

    def __init__(self, num_threads: int = 1, stream: int = 0):
        self._errors: dict[int, tuple[int, str]] = {}
        self._names = itertools.count(1)
        self._num_threads = num_threads
        self._stream = stream
        self._pool = concurrent.futures.ThreadPoolExecutor(max(num_threads - 1, 1))
        self.state = None
        own = {
            "Error_Create": self._error_create,
            "Stream_Get": self._stream_get,
            "State_Set": self._state_set,
            "State_Get": self._state_get,
            "ThreadPool_Schedule": self._schedule,
            "ThreadPool_NumThreads": self._num,
        }
        self._functions = {name: _Callback(own.get(name, self._missing)) for name in _FUNCTIONS}
        version = _sized(_Version, major_version=0, minor_version=3)
        self.table = _sized(_Api, api_version=version, **self._functions)

    def _error_create(self, args):
        created = _ErrorCreate.from_address(args)
        name = next(self._names)
        message = created.message.decode("utf-8", "replace")
        self._errors[name] = created.errc, message
        return name

    def take(self, error: int | None) -> Outcome:
        """What a handler returned."""
        return Outcome(0) if not error else Outcome(*self._errors.pop(error))

    def _refuse(self, message: str) -> int:
        name = next(self._names)
        self._errors[name] = INTERNAL, message
        return name

    def _missing(self, _):
        return self._refuse("the test's API has no such function")

    def _stream_get(self, args):
        _StreamGet.from_address(args).stream = self._stream
        return None

    def _state_set(self, args):
        self.state = _State.from_address(args).state
        return None

    def _state_get(self, args):
        if self.state is None:
            return self._refuse("there is no state")
        _State.from_address(args).state = self.state
        return None

    def _num(self, args):
        _NumThreads.from_address(args).num_threads[0] = self._num_threads
        return None

    def _schedule(self, args):
        scheduled = _Schedule.from_address(args)
        self._pool.submit(_Task(scheduled.task), scheduled.data)
        return None


# --- attributes -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Typed:
    """An attribute of a type that is not its usual one."""

    dtype: str
    value: object


def _encoded(value, keep: list) -> tuple[int, int]:
    """Number of the attribute's type, and its address; adds to `keep` what must stay in memory."""
    if isinstance(value, dict):
        made, kind = _attributes(value, keep), 2
    elif isinstance(value, str):
        data = value.encode()
        made, kind = _ByteSpan(data, len(data)), 4
    elif isinstance(value, list | np.ndarray):
        elements = np.asarray(
            value, np.float64 if any(isinstance(x, float) for x in value) else np.int64
        )
        keep.append(elements)
        dtype = "f64" if elements.dtype == np.float64 else "s64"
        made, kind = _Array(DTYPES[dtype][0], len(value), elements.ctypes.data), 1
    else:
        if not isinstance(value, Typed):
            names = {bool: "pred", int: "s64", float: "f64"}
            value = Typed(names[type(value)], value)
        scalar = np.asarray(value.value, NUMPY[value.dtype])
        keep.append(scalar)
        made, kind = _Scalar(DTYPES[value.dtype][0], scalar.ctypes.data), 3
    keep.append(made)
    return kind, _address(made)


def _attributes(values: dict, keep: list):
    names, kinds, addresses = [], [], []
    for name in sorted(values):
        data = name.encode()
        span = _ByteSpan(data, len(data))
        keep += [data, span]
        kind, address = _encoded(values[name], keep)
        names.append(_address(span))
        kinds.append(kind)
        addresses.append(address)
    arrays = _array(ctypes.c_int, kinds), _array(P, names), _array(P, addresses)
    keep += arrays
    types, spans, attrs = map(_address, arrays)
    return _sized(_Attrs, size=len(names), types=types, names=spans, attrs=attrs)


# --- memory ---------------------------------------------------------------------------------------


class HostMemory:
    """Places for buffers, each between pages that cannot be touched.

    Attributes:
      at_end: whether buffers end at such a page; else they begin at one.
    """

    SIZE, GUARD = 1 << 22, 1 << 28

    def __init__(self):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = P
        self._libc.mmap.argtypes = [P, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.mprotect.argtypes = [P, ctypes.c_size_t, ctypes.c_int]
        self._places: list[int] = []
        self.at_end = True
        # There only under AddressSanitizer; as strings, for a class changes such names.
        self._poison = getattr(self._libc, "__asan_poison_memory_region", None)
        self._unpoison = getattr(self._libc, "__asan_unpoison_memory_region", None)
        for function in (self._poison, self._unpoison):
            if function is not None:
                function.argtypes, function.restype = [P, ctypes.c_size_t], None

    def _place(self, index: int) -> int:
        while len(self._places) <= index:
            no_reserve, none = 0x4000, 0
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
            address = self._libc.mmap(None, 2 * self.GUARD + self.SIZE, none, flags, -1, 0)
            if address in (None, 2**64 - 1):
                raise MemoryError("mmap")
            inner = address + self.GUARD
            if self._libc.mprotect(inner, self.SIZE, mmap.PROT_READ | mmap.PROT_WRITE):
                raise MemoryError("mprotect")
            self._places.append(inner)
        return self._places[index]

    def put(self, index: int, data: bytes, alignment: int) -> int:
        """Writes a buffer to a place; its address, a multiple of the alignment."""
        if len(data) > self.SIZE:
            raise ValueError(f"a buffer must have at most {self.SIZE} bytes, got {len(data)}")
        place = self._place(index)
        if self._unpoison:
            self._unpoison(place, self.SIZE)
        address = place + self.SIZE - len(data) if self.at_end else place
        address -= address % alignment
        ctypes.memmove(address, data, len(data))
        if self._poison:
            self._poison(place, address - place)
            self._poison(address + len(data), place + self.SIZE - address - len(data))
        return address

    def get(self, address: int, num_bytes: int) -> bytes:
        """The bytes at an address."""
        return ctypes.string_at(address, num_bytes)

    def finish(self) -> None:
        """Waits for what a call has begun."""


class DeviceMemory:
    """The same of the first GPU: every buffer is an allocation of its own, of no byte more.

    Attributes:
      at_end: whether buffers are aligned to their elements only; else as allocations are.
    """

    def __init__(self):
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._held: dict[int, ctypes.c_uint64] = {}
        self.at_end = True
        device, context = ctypes.c_int(), P()
        self._do("cuInit", ctypes.c_uint(0))
        self._do("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._do("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._do("cuCtxSetCurrent", context)

    def _do(self, function: str, *arguments) -> None:
        if error := getattr(self._driver, function)(*arguments):
            raise RuntimeError(f"{function} failed: CUDA error {error}")

    def put(self, index: int, data: bytes, alignment: int) -> int:
        """Writes a buffer to an allocation; its address, a multiple of the alignment."""
        if index in self._held:
            self._do("cuMemFree_v2", self._held.pop(index))
        offset = alignment if self.at_end else 0
        held = ctypes.c_uint64()
        self._do("cuMemAlloc_v2", ctypes.byref(held), ctypes.c_size_t(max(len(data), 1) + offset))
        self._held[index] = held
        address = held.value + offset
        if data:
            self._do("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))
        return address

    def get(self, address: int, num_bytes: int) -> bytes:
        """The bytes at an address."""
        data = ctypes.create_string_buffer(num_bytes)
        if num_bytes:
            self._do("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))
        return data.raw

    def finish(self) -> None:
        """Waits for what a call has begun."""
        self._do("cuCtxSynchronize")


# --- calls ----------------------------------------------------------------------------------------

POISON = bytes.fromhex("a7e3b5d9") * 4  # A large negative number of most types.


def poison(size: int) -> bytes:
    """What a result holds that nobody has written."""
    return (POISON * (size // 16 + 1))[:size]


def handler_of(capsule) -> int:
    """The address of a handler that a module registers."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = P, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, None)


def call(handler, attributes, operands, results, *, api, memory, stage="execute") -> Outcome:
    """One call of a handler; fills in the results' data.

    Raises:
      AssertionError: when the call has written to an operand.
    """
    keep: list = []
    places, originals = [], []
    for i, operand in enumerate(operands):
        data = operand.data if operand.data is not None else b"\0" * operand.num_bytes
        originals.append(data)
        places.append(memory.put(i, data, operand.alignment))
    addresses = []
    for i, result in enumerate(results):
        if result.shares is not None:
            addresses.append(places[result.shares])
        else:
            size = result.num_bytes
            place = memory.put(len(operands) + i, poison(size), result.alignment)
            addresses.append(place)

    def values(buffers, where):
        made = []
        for buffer, address in zip(buffers, where, strict=True):
            dims = _array(ctypes.c_int64, buffer.shape)
            own = _sized(
                _Buffer,
                dtype=DTYPES[buffer.dtype][0],
                data=address if buffer.num_bytes else None,
                rank=len(buffer.shape),
                dims=_address(dims),
            )
            keep.extend((dims, own))
            made.append(_address(own))
        arrays = _array(ctypes.c_int, [1] * len(made)), _array(P, made)
        keep.extend(arrays)
        return _sized(
            _Values, size=len(made), types=_address(arrays[0]), values=_address(arrays[1])
        )

    frame = _sized(
        _CallFrame,
        api=_address(api.table),
        ctx=None,
        stage=STAGES[stage],
        args=values(operands, places),
        rets=values(results, addresses),
        attrs=_attributes(attributes, keep),
    )
    frame.struct_size = _CallFrame.future.offset  # What came later is not counted.
    outcome = api.take(_Callback(handler)(_address(frame)))
    memory.finish()
    shared = {result.shares for result in results}
    for i, (operand, data, place) in enumerate(zip(operands, originals, places, strict=True)):
        if i not in shared and memory.get(place, operand.num_bytes) != data:
            raise AssertionError(f"operand {i} was written to")
    for result, address in zip(results, addresses, strict=True):
        result.data = memory.get(address, result.num_bytes)
    return outcome
