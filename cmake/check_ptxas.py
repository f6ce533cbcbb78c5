"""CUDA compiler launcher: runs nvcc and fails where ptxas gave up performance.

The full ptxas report is left beside the object file as <object>.ptxas.txt.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

# Nothing is installed yet while it is built.
sys.path.append(str(Path(__file__).resolve().parents[1] / "jax_tcgemm" / "kernels"))
from ptxas import find_faults

_REPORT = re.compile(r"^ptxas info|^\s+\d+ bytes stack frame")


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
