#!/usr/bin/env python3
"""Checks that includes point only in the allowed directions (docs/architecture.md).

scripts/check_includes.py              check the tree; exit 1 and name each violation
scripts/check_includes.py --self-test  show, on made-up files, that violations are caught
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
SUFFIXES = {".h", ".hpp", ".c", ".cpp", ".cc", ".cuh"}
SCANNED = ("include", "src", "kernels", "cli", "tests", "examples")
# First path component of an include -> the folder of src/ it names.
ROOMS = ("core", "reference", "verify", "cpu", "cuda", "dispatch")


@dataclass(frozen=True)
class Rule:
    """Files under `path` may include, of this project, only what starts with one of `allowed`."""

    path: str
    allowed: tuple[str, ...]
    # Angle-bracket headers with a "/" (libraries) that may be included; None: any.
    libraries: tuple[str, ...] | None = None


# CUTLASS's instruction layer.
INSTRUCTIONS = ("cute/arch/", "cutlass/arch/")
# The headers of core that are embedded for NVRTC (src/cuda/embed.cmake).
SHARED_CORE = (
    "core/attention_config.h",
    "core/attention_params.h",
    "core/decode_params.h",
    "core/eight_bits.h",
    "core/merge_params.h",
    "core/host_device.h",
    "core/mask.h",
    "core/philox.h",
    "core/softcap.h",
)

# The first rule whose path is a prefix decides; files that none names (tests) see everything.
RULES = (
    Rule("include/", ("tessera/",), libraries=("dlpack/",)),
    Rule("src/core/", ("tessera/", "core/"), libraries=("dlpack/",)),
    Rule("src/reference/", ("tessera/", "core/", "reference/"), libraries=()),
    # Verify mirrors calls into GPU memory, which the driver's door gives it.
    Rule(
        "src/verify/",
        ("tessera/", "core/", "reference/", "verify/", "cuda/driver/driver.h"),
        libraries=(),
    ),
    Rule("src/cpu/", ("tessera/", "core/", "cpu/"), libraries=("hwy/",)),
    # The driver knows nothing of attention, the plan nothing of CUDA.
    Rule("src/cuda/driver/", ("tessera/", "cuda/driver/")),
    Rule("src/cuda/plan/", ("tessera/", "core/", "cuda/plan/"), libraries=()),
    Rule("src/cuda/launch/", ("tessera/", "core/", "cuda/plan/", "cuda/launch/", "cuda/driver/driver.h")),
    # Device code names its files from kernels/, and sees of core what is compiled for both sides.
    Rule("kernels/standin/", ("cute/", "cutlass/", "cuda/"), libraries=("cute/", "cutlass/", "cuda/")),
    Rule("kernels/ptx/", ("ptx/", *SHARED_CORE), libraries=INSTRUCTIONS),
    Rule("kernels/tile/", ("tile/", "ptx/", *SHARED_CORE), libraries=INSTRUCTIONS),
    Rule("kernels/sm80/", ("sm80/", "tile/", "ptx/", *SHARED_CORE), libraries=INSTRUCTIONS),
    Rule("kernels/sm90/", ("sm90/", "tile/", "ptx/", *SHARED_CORE), libraries=INSTRUCTIONS),
    Rule("kernels/", ("tile/", "ptx/", *SHARED_CORE), libraries=INSTRUCTIONS),
    # Dispatch knows a backend by its one door.
    Rule(
        "src/dispatch/",
        ("tessera/", "core/", "dispatch/", "cpu/kernels.h", "cuda/launch/kernels.h"),
        libraries=(),
    ),
    # api.cpp and c_api.cpp.
    Rule("src/", ("tessera/", "core/", "dispatch/", "cpu/")),
    # tessera-pack compiles the plan's list with the driver's compiler.
    Rule("cli/pack/", ("tessera/", "core/", "cli/", "cuda/driver/", "cuda/plan/pack.h")),
    Rule("cli/", ("tessera/", "core/", "reference/", "verify/", "dispatch/", "cli/")),
    Rule("examples/", ("tessera/",)),
)
# Headers of the system that live in folders of their own.
SYSTEM = ("sys/", "netinet/", "arpa/", "linux/")


@dataclass(frozen=True)
class Violation:
    file: str
    line: int
    included: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: includes {self.included}: {self.reason}"


def rule_of(file: str) -> Rule | None:
    return next((rule for rule in RULES if file.startswith(rule.path)), None)


def is_ours(name: str, quoted: bool) -> bool:
    first = name.split("/", 1)[0]
    return quoted or first in ROOMS or first == "tessera"


def sibling(root: Path, file: str, name: str) -> bool:
    """A quoted name without a folder, next to the file that includes it."""
    return "/" not in name and (root / file).parent.joinpath(name).exists()


def reason_against(root: Path, file: str, name: str, quoted: bool) -> str | None:
    rule = rule_of(file)
    if rule is None:
        return None
    if name.startswith("../") or "/../" in name:
        return "name it from the source root, not by ../"
    if is_ours(name, quoted):
        if name.startswith(rule.allowed) or (quoted and sibling(root, file, name)):
            return None
        return f"{rule.path} may include {', '.join(rule.allowed)}"
    if rule.libraries is None or "/" not in name or name.startswith(SYSTEM + rule.libraries):
        return None
    return f"{rule.path} may include std and {', '.join(rule.libraries) or 'nothing else'}"


def includes(path: Path) -> Iterator[tuple[int, str, bool]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if match := INCLUDE.match(line):
            yield number, match.group(2), match.group(1) == '"'


def check(root: Path) -> tuple[int, list[Violation]]:
    files = sorted(p for top in SCANNED for p in (root / top).rglob("*") if p.suffix in SUFFIXES)
    violations = []
    for path in files:
        file = path.relative_to(root).as_posix()
        for line, name, quoted in includes(path):
            if reason := reason_against(root, file, name, quoted):
                violations.append(Violation(file, line, name, reason))
    return len(files), violations


# file -> (text, whether its include must be caught)
MADE_UP = {
    "include/tessera/a.hpp": ("#include <vector>\n#include <dlpack/dlpack.h>\n", False),
    "include/tessera/b.hpp": ('#include "core/problem.h"\n', True),
    "include/tessera/c.hpp": ("#include <nlohmann/json.hpp>\n", True),
    "src/core/a.h": ('#include "tessera/tessera.hpp"\n#include "core/mask.h"\n', False),
    "src/core/b.h": ('#include "cpu/kernels.h"\n', True),
    "src/core/c.h": ('#  include "../dispatch/dispatch.h"\n', True),
    "src/core/d.h": ("#include <hwy/highway.h>\n", True),
    "src/reference/a.cpp": ('#include "cpu/tile.h"\n', True),
    "src/reference/b.cpp": ('#include "core/problem.h"\n', False),
    "src/verify/a.cpp": ('#include "dispatch/dispatch.h"\n', True),
    "src/verify/b.cpp": ('#include "cuda/driver/driver.h"\n', False),
    "src/verify/c.cpp": ('#include "cuda/driver/cuda_api.h"\n', True),
    "src/cuda/driver/a.cpp": ('#include "core/problem.h"\n', True),
    "src/cuda/driver/b.cpp": ('#include "cuda/driver/cache.h"\n#include "tessera/tessera.hpp"\n', False),
    "src/cuda/plan/a.cpp": ('#include "cuda/driver/driver.h"\n', True),
    "src/cuda/launch/a.cpp": ('#include "cuda/driver/driver.h"\n#include "cuda/plan/pack.h"\n', False),
    "src/cuda/launch/b.cpp": ('#include "cuda/driver/cuda_api.h"\n', True),
    "kernels/a.cuh": ('#include "tile/a.cuh"\n#include "core/mask.h"\n', False),
    "kernels/b.cuh": ('#include "sm80/forward.cuh"\n', True),
    "kernels/ptx/a.cuh": ("#include <cute/arch/util.hpp>\n", False),
    "kernels/ptx/b.cuh": ('#include "tile/a.cuh"\n', True),
    "kernels/tile/a.cuh": ('#include "core/problem.h"\n', True),
    "kernels/tile/b.cuh": ("#include <cute/tensor.hpp>\n", True),
    "kernels/sm80/a.cuh": ('#include "tile/a.cuh"\n#include <cute/arch/mma_sm80.hpp>\n', False),
    "kernels/sm90/a.cuh": ('#include "sm80/a.cuh"\n', True),
    "kernels/standin/cute/a.hpp": ("#include <cute/config.hpp>\n", False),
    "kernels/standin/cute/b.hpp": ('#include "core/mask.h"\n', True),
    "src/cpu/a.cpp": ("#include <hwy/highway.h>\n", False),
    "src/cpu/b.cpp": ('#include "reference/oracle.h"\n', True),
    "src/dispatch/a.cpp": ('#include "cpu/kernels.h"\n', False),
    "src/dispatch/b.cpp": ('#include "cpu/parallel.h"\n', True),
    "src/dispatch/c.cpp": ('#include "cuda/launch/kernels.h"\n', False),
    "src/dispatch/d.cpp": ('#include "cuda/driver/driver.h"\n', True),
    "src/api.cpp": ('#include "dispatch/dispatch.h"\n', False),
    "src/c_api.cpp": ('#include "reference/oracle.h"\n', True),
    "cli/main.cpp": ('#include "verify/case.h"\n', False),
    "cli/a.cpp": ('#include "cpu/tile.h"\n', True),
    "examples/a.cpp": ('#include "core/problem.h"\n', True),
    "tests/a.cpp": ('#include "cpu/tile.h"\n', False),
}


def self_test() -> int:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for file, (text, _) in MADE_UP.items():
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text(text, encoding="utf-8")
        _, violations = check(root)
    caught = {violation.file for violation in violations}
    expected = {file for file, (_, bad) in MADE_UP.items() if bad}
    for file in sorted(caught ^ expected):
        print(f"{file}: {'not caught' if file in expected else 'caught, though allowed'}", file=sys.stderr)
    print(f"include check self-test: {len(caught & expected)} of {len(expected)} violations caught")
    return 0 if caught == expected else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="check the direction of includes")
    parser.add_argument("--self-test", action="store_true", help="run on made-up files")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    count, violations = check(arguments.root)
    for violation in violations:
        print(violation, file=sys.stderr)
    print(f"include directions: {count} files, {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
