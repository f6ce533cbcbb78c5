"""Small odd products by every hand-written kernel and config, for compute-sanitizer to watch.

Each operand is copied from the host into an allocation of its own, so that a read past its end, or
of something nobody wrote, is seen.
"""

import sys

import jax
from gemm_call import (
    ALL_TYPES,
    LAYOUTS,
    Case,
    implementations,
    make_inputs,
    mismatch,
    rejection,
    run_all,
)

DEFAULT_CASES = [
    Case("odd", 67, 45, 35),
    Case("aligned", 64, 64, 64),
    Case("long_k", 33, 40, 520),
    Case("odd_batch", 19, 23, 17, batch=(1, 2), beta=-1.0),
]
CONFIG_CASES = [Case("odd", 67, 45, 35), Case("several_tiles", 136, 264, 72)]


def inputs_of(name, config, is_default):
    """One layout for each case; they take turns, so that all types together meet all layouts."""
    for types_idx, types in enumerate(ALL_TYPES):
        for case_idx, case in enumerate(DEFAULT_CASES if is_default else CONFIG_CASES):
            inputs = make_inputs(types, LAYOUTS[(types_idx + case_idx) % 4], case)
            if not rejection(name, config, inputs.problem):
                yield inputs


def main():
    jax.config.update("jax_enable_x64", True)
    for name, configs in implementations().items():
        if name == "cublaslt":
            continue
        num_products = 0
        for config in configs:
            inputs = list(inputs_of(name, config, config == configs[0]))
            results = run_all(inputs, implementation=name, config=config, with_c=False)
            for got, each in zip(results, inputs, strict=True):
                if wrong := mismatch(got, each):
                    sys.exit(f"{name} {config}: {wrong}")
            num_products += len(inputs)
        print(f"{name}: {num_products} products", flush=True)


if __name__ == "__main__":
    main()
