"""Debug switches: environment variables that are read when a program is lowered."""

import sys
from os import environ
from pathlib import Path

SWITCHES = {
    "TCGEMM_PRINT_CHOICE": "1: print each product, the implementation and config chosen, and why",
    "TCGEMM_IMPLEMENTATION": "the implementation of every product and layer that names none itself",
    "TCGEMM_CONFIG": "its config; needs TCGEMM_IMPLEMENTATION",
    "TCGEMM_TUNE": "1: measure each product that no table knows when it is first lowered",
    "TCGEMM_CACHE_DIR": "the folder of tuned choices and kernels; off: neither read nor written",
}


def switch(name: str) -> str | None:
    """The value of a switch, None when unset or empty."""
    return environ.get(name) or None


def is_on(name: str) -> bool:
    """Whether a switch is set to something else than 0, false, off or no."""
    value = switch(name)
    return bool(value and value.lower() not in ("0", "false", "off", "no"))


def cache_folder() -> Path | None:
    """The folder of the user's tuned choices and kernels; None when TCGEMM_CACHE_DIR is "off"."""
    folder = switch("TCGEMM_CACHE_DIR")
    if folder == "off":
        return None
    if folder:
        return Path(folder)
    import platformdirs

    return Path(platformdirs.user_cache_dir("jax_tcgemm", False))


def print_choice(function: str, problem, choice) -> None:
    """Prints what was chosen for a problem, and why, where TCGEMM_PRINT_CHOICE is on."""
    if is_on("TCGEMM_PRINT_CHOICE"):
        print(f"jax_tcgemm: {function}: {problem}: {choice}", file=sys.stderr)


def debug_switches() -> None:
    """Print every debug switch with its value and meaning.

    A program that JAX has already compiled keeps the selections made when it was lowered.

    Examples:
      >>> import jax_tcgemm
      >>> jax_tcgemm.debug_switches()  # doctest: +ELLIPSIS
      TCGEMM_PRINT_CHOICE...
    """
    for name, meaning in SWITCHES.items():
        print(f"{name}={switch(name) or '':<12} {meaning}")
