"""``python -m jax_tcgemm``."""

from jax_tcgemm.cli import app

app(prog_name="python -m jax_tcgemm")
