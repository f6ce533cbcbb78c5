"""Performance losses that ptxas reports for a kernel.

A kernel that spills registers, or whose wgmma instructions are serialized or setmaxnreg ignored,
still computes the right results, several times slower, so that no other test would notice. Both the
build and the run-time compiler use this file, which therefore imports nothing of the package.
"""

import re

# Spills that are accepted: a regular expression, searched in "<source> <target> <function>",
# to the reason why.
ALLOWED_SPILLS: dict[str, str] = {
    r"8FunctionINS_11elementwise": "what a function needs beyond the registers that accumulators "
    "leave is spilled after the main loop, which has none",
    r"fLi128EEENS\d*_8Operands": "beside two sets of accumulators, as of 8-bit floats, what a "
    "tile begins and ends with is spilled outside of the main loop, which has none",
}

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
# C7510 and related messages (serialized wgmma), C7508 (setmaxnreg).
_LOSS = re.compile(
    r"Potential Performance Loss|wgmma\.mma_async instructions are serialized|setmaxnreg ignored"
)


def find_faults(log: str, source: str) -> list[str]:
    """Return one sentence for each fault that ptxas reports in `log`."""
    faults = []
    target = function = "?"
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            function, target = match.groups()
        elif match := _FUNCTION.search(line):
            function = match[1]
        if _LOSS.search(line):
            faults.append(line.strip())
        elif (match := _SPILLS.search(line)) and match.groups() != ("0", "0"):
            where = f"{source} {target} {function}"
            if not any(re.search(pattern, where) for pattern in ALLOWED_SPILLS):
                faults.append(f"{function} for {target} spills registers: {match[0]}")
    return faults
