"""``python -m jax_tcgemm``."""

from jax_tcgemm.command.cli import app
from jax_tcgemm.command.terminal import run

run(app, "python -m jax_tcgemm")
