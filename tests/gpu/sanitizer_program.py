"""Small odd products by every hand-written kernel and config, for compute-sanitizer to watch.

Each operand is copied from the host into an allocation of its own, so that a read past its end, or
of something nobody wrote, is seen. No kernel of XLA's runs, whose writes the tools would not know.
"""

import sys

import jax
from gemm_call import (
    ALL_TYPES,
    LAYOUTS,
    Case,
    Types,
    choice,
    implementations,
    make_inputs,
    mismatch,
    rejection,
    run_all,
    split_base,
)

from jax_tcgemm.kernels import compile_kernels

DEFAULT_CASES = [
    Case("odd", 67, 45, 35),
    Case("aligned", 64, 64, 64),
    Case("long_k", 33, 40, 520),
    Case("odd_batch", 19, 23, 17, batch=(1, 2), beta=-1.0),
]
CONFIG_CASES = [Case("odd", 67, 45, 35), Case("several_tiles", 136, 264, 72)]
SPLIT_CASES = [Case("long_k", 33, 40, 520)]


def inputs_of(name, configs, config):
    """One layout for each case; they take turns, so that all together meet all layouts."""
    config_idx = configs.index(config)
    cases = CONFIG_CASES if config_idx else DEFAULT_CASES
    all_types = ALL_TYPES
    if split_base(config):  # The kernels are those of other configs; how they split K is new.
        cases = SPLIT_CASES
        all_types = [Types("bf16", "bf16", "f32")]
    for types_idx, types in enumerate(all_types):
        for case_idx, case in enumerate(cases):
            layout = LAYOUTS[(config_idx + types_idx + case_idx) % 4]
            inputs = make_inputs(types, layout, case)
            if not rejection(name, config, inputs.problem):
                yield inputs


def configs_of(tool, name, configs):
    """Those that the tool sees."""
    # Of the configs that only split K, there are many and one kernel to add up the parts.
    splits = [config for config in configs if split_base(config)]
    if tool == "initcheck" and name == "wgmma":
        splits = []  # Partial sums are written by TMA, which initcheck does not see.
    return [c for c in configs if not split_base(c)] + splits[:: max(len(splits) // 25, 1)]


def main(tool):
    jax.config.update("jax_enable_x64", True)
    planned = {
        name: {config: list(inputs_of(name, configs, config)) for config in own}
        for name, configs in implementations().items()
        if name != "cublaslt"
        for own in [configs_of(tool, name, configs)]
    }
    # All at once, on all cores.
    compile_kernels(
        kernel
        for name, by_config in planned.items()
        for config, inputs in by_config.items()
        for each in inputs
        for kernel in choice(name, config, each.problem).kernels
    )
    for name, by_config in planned.items():
        for config, inputs in by_config.items():
            results = run_all(inputs, implementation=name, config=config, poisoned=False)
            for got, each in zip(results, inputs, strict=True):
                if wrong := mismatch(got, each):
                    sys.exit(f"{name} {config}: {wrong}")
        print(f"{name}: {sum(map(len, by_config.values()))} products", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
