"""CUDA compiler launcher: runs nvcc and fails where ptxas gave up performance.

A kernel that spills registers, whose wgmma instructions are serialised or whose setmaxnreg is
ignored still computes the right numbers, several times slower, so nothing else would notice.
The full ptxas report is left beside the object file as <object>.ptxas.txt.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

# Spills that are accepted: a regular expression, searched in "<source> <target> <function>",
# to the reason why.
ALLOWED_SPILLS: dict[str, str] = {}

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
# C7510 and its kin (serialised wgmma), C7508 (setmaxnreg).
_LOSS = re.compile(
    r"Potential Performance Loss|wgmma\.mma_async instructions are serialized|setmaxnreg ignored"
)
_REPORT = re.compile(r"^ptxas info|^\s+\d+ bytes stack frame")


def find_faults(log: str, source: str) -> list[str]:
    """Returns one sentence for each fault that ptxas reports in `log`."""
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


def _demangle(text: str) -> str:
    if shutil.which("c++filt") is None:
        return text
    return subprocess.run(["c++filt"], input=text, capture_output=True, text=True).stdout


def main(command: list[str]) -> int:
    """Runs `command`; its exit status, or 1 with the object removed when there are faults."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    loud = done.returncode != 0
    sys.stdout.writelines(
        x for x in done.stdout.splitlines(keepends=True) if loud or not _REPORT.match(x)
    )
    if done.returncode != 0 or "-o" not in command:
        return done.returncode
    output = Path(command[command.index("-o") + 1])
    output.with_name(output.name + ".ptxas.txt").write_text(done.stdout)
    source = next((arg for arg in command if arg.endswith(".cu")), "")
    faults = find_faults(done.stdout, source)
    if not faults:
        return 0
    # Without this, a second run of the build would take the object for good.
    output.unlink(missing_ok=True)
    print(f"{source}: ptxas reports lost performance, which fails the build:", file=sys.stderr)
    print(_demangle("\n".join(faults)), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
