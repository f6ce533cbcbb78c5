"""Sources of the emulator: files of kernels, and units of kernels that programs bring."""

import dataclasses
import hashlib
import re
from collections.abc import Sequence

from jax_tcgemm.kernels import Instance


@dataclasses.dataclass(frozen=True)
class Source:
    """A file to compile: of csrc, or of tests/emulator where it starts with "emulator/".

    Or one that holds `text`, or an `instance`, which has no path before `units_of`.
    """

    path: str
    defines: tuple[tuple[str, str], ...] = ()
    text: str = ""
    instance: Instance | None = None


# Kernels that are compiled at once: half the time of one alone is that of its headers.
_MOST_IN_A_UNIT = 4


def carried(instance: Instance) -> Source:
    """A kernel as a program brings it."""
    return Source("", instance=instance)


def units_of(sources: Sequence[Source]) -> list[Source]:
    """The sources, with instances of the same headers put together in translation units."""
    units = []  # Headers, the definitions of each struct, and the instances.
    for source in dict.fromkeys(sources):
        if (instance := source.instance) is None:
            continue
        own = dict.fromkeys(re.findall(r"struct (\w+_[0-9a-f]+)", instance.definitions))
        own = dict.fromkeys(own, instance.definitions)
        for headers, structs, instances in units:
            fits = headers == instance.headers and len(instances) < _MOST_IN_A_UNIT
            if fits and all(structs.get(name, text) == text for name, text in own.items()):
                structs |= own
                instances.append(instance)
                break
        else:
            units.append((instance.headers, own, [instance]))
    found = [source for source in sources if source.instance is None]
    return found + [_unit(instances) for _, _, instances in units]


def _unit(instances: Sequence[Instance]) -> Source:
    """The translation unit of instances with the same headers."""
    headers = (*instances[0].headers, "kernels/common/kernel.h")
    text = "".join(f'#include "{header}"\n' for header in headers)
    text += "".join(dict.fromkeys(f"{x.definitions}\n" for x in instances))
    for i, instance in enumerate(instances):
        text += (
            f"static const bool added{i} = tcgemm::add_kernel(\n"
            f'    "{instance.kernel}",\n'
            f"    reinterpret_cast<const void*>(&{instance.kernel}));\n"
        )
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Source(f"emulator/instances/carried_{digest}.cc", text=text)
