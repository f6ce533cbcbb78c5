"""cuBLAS's log."""

from jax_tcgemm.system import modules


def set_logging(path) -> None:
    """Make cuBLAS write one line per call of this process to a file.

    Args:
      path: the file, or "stdout" or "stderr". None turns logging off.

    Raises:
      RuntimeError: if cuBLAS cannot be loaded (with the reason), or does not accept the path.

    Examples:
      >>> from jax_tcgemm import blas
      >>> blas.set_logging("cublas.log")  # doctest: +SKIP
    """
    if reason := modules.cublas_reason():
        raise RuntimeError(
            f"blas.set_logging: cuBLAS must be there to log, got path={path!r} and {reason}; "
            "jax_tcgemm.info() says what is found"
        )
    modules.cuda.set_cublas_logging("" if path is None else str(path))
