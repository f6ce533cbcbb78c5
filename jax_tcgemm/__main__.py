"""``python -m jax_tcgemm``."""

from jax_tcgemm.cli import app
from jax_tcgemm.terminal import run

run(app, "python -m jax_tcgemm")
