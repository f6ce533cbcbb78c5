"""Public `plan_cache`."""

from jax_tcgemm.system import modules


def plan_cache() -> dict[str, int]:
    """Return hits, misses, evictions and size of the plan cache; all are 0 without cuTENSOR."""
    if modules.cutensor is None:
        return dict.fromkeys(("hits", "misses", "evictions", "size", "capacity"), 0)
    return modules.cutensor.plan_cache() | {"capacity": modules.cutensor.max_plans}
