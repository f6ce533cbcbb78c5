"""Runs calls of FFI handlers in a process of its own, so that one that crashes is a failed call.

As a program, it executes the calls that come as pickles on its standard input, one after another; a
`Worker` starts it and speaks with it.
"""

import importlib.machinery
import importlib.util
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile

from ffi_frame import STAGES, Api, DeviceMemory, HostMemory, Outcome, call, handler_of, poison

# What one call may allocate; none of the calls has a good reason for as much.
MEMORY_LIMIT = 2 << 30
SECONDS_LIMIT = 120


class CrashError(Exception):
    """A call ended its process, or did not come back."""


class Worker:
    """A process that executes calls of one module's handlers; another one after each crash.

    Args:
      path: the compiled module `_cpu`; or "cuda", for the targets of the first GPU.
      prefix: a command to run the process under.
      threads: of the host's pool.
    """

    def __init__(self, path: str, prefix: tuple[str, ...] = (), threads: int = 2):
        self._command = [*prefix, sys.executable, __file__, path, str(threads)]
        self._process = None
        self.output = ""  # what the last process printed

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> str:
        """Ends the process; all that it printed."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(SECONDS_LIMIT)
            self._log.seek(0)
            self.output = self._log.read().decode(errors="replace")
            self._process = None
        return self.output

    def run(self, target: str, attributes: dict, operands, results, *, at_end=True) -> Outcome:
        """Executes a call and fills in its results.

        Raises:
          CrashError: when the process died, with what it said last.
        """
        if self._process is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
            )
        try:
            _send(self._process.stdin, (target, attributes, operands, results, at_end))
            ready, _, _ = select.select([self._process.stdout], [], [], SECONDS_LIMIT)
            if not ready:
                self._process.kill()
            outcome, written = _receive(self._process.stdout)
        except (EOFError, BrokenPipeError):
            code = self._process.wait()
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")
            self._process = None
            why = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            raise CrashError(f"the call ended the process: {why}\n{said[-6000:]}") from None
        for result, data in zip(results, written, strict=True):
            result.data = data
        if isinstance(outcome, str):
            raise CrashError(outcome)
        return outcome


def _send(stream, message) -> None:
    data = pickle.dumps(message)
    stream.write(struct.pack("<q", len(data)) + data)
    stream.flush()


def _receive(stream):
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError
    return pickle.loads(stream.read(*struct.unpack("<q", header)))


def _load(path: str):
    """A compiled module by its path, without JAX: quick to start, and little to instrument."""
    name = os.path.basename(path).split(".")[0]
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


def cuda_registrations() -> dict:
    """Every target of the GPU, with the vendor's libraries opened that are there."""
    from jax_tcgemm.system import modules

    modules.cublaslt_reason()
    modules.cublas_reason()
    found = modules.cuda.registrations()
    return found if modules.cutensor_reason() else found | modules.cutensor.registrations()


def _main(path: str, threads: str) -> None:
    # What the modules print must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if path == "cuda":
        registrations, memory = cuda_registrations(), DeviceMemory()
    else:
        registrations, memory = _load(path).registrations(), HostMemory()
        if "LD_PRELOAD" not in os.environ:  # AddressSanitizer needs more than that for itself.
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    api = Api(int(threads))
    while True:
        try:
            target, attributes, operands, results, memory.at_end = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            outcome = _execute(registrations[target], attributes, operands, results, api, memory)
        except AssertionError as error:
            outcome = str(error)
        _send(answers, (outcome, [result.data for result in results]))


def _execute(handlers, attributes, operands, results, api, memory) -> Outcome:
    """All stages of one call; the buffers are for the last of them."""
    if not isinstance(handlers, dict):
        handlers = {"execute": handlers}
    api.state = None
    for stage in STAGES:
        if stage not in handlers:
            continue
        buffers = (operands, results) if stage == "execute" else ([], [])
        handler = handler_of(handlers[stage])
        outcome = call(handler, attributes, *buffers, api=api, memory=memory, stage=stage)
        if outcome.code:
            break
    for result in results:  # Of a call that did not come to them.
        result.data = poison(result.num_bytes) if result.data is None else result.data
    return outcome


if __name__ == "__main__":
    _main(*sys.argv[1:])
