"""Runs tests of the C library with a compiler's sanitizers in it, on a copy of the package in a folder of its own.

`make sanitize` calls this. The library there has one instruction set alone, and nothing else reads it. Python is not
built with a sanitizer, so the sanitizer's own library is loaded before all others.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from parlay.compiled.build import NAMES, build, compiler_command
from parlay.compiled.library import SWITCH, load

ROOT = Path(__file__).parent.parent
KNOWN = ROOT / "tests/sanitize.txt"
FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer")


class Sanitizer(NamedTuple):
    """Flags for the compiler, the library that must be loaded first, its options, and the tests that run.

    ``without`` are words of those that depend on how long something takes.
    """

    flags: tuple[str, ...]
    runtime: str
    options: dict[str, str]
    tests: tuple[str, ...]
    without: tuple[str, ...] = ()


_MODELS = ("formats", "kv_cache", "lora", "lookup", "shelving", "streaming", "pool", "rows_that_run", "windows")
SANITIZERS = {
    "memory": Sanitizer(
        # Late threads are waited for: what they read for nobody may be a guard by then.
        ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-DLEAST_PATIENCE=2000000000"),
        "libasan.so",
        {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
        (
            *(f"tests/models/test_{name}.py" for name in _MODELS),
            *("tests/heads/test_growing.py", "tests/heads/test_next_states.py", "tests/ranks/test_parts.py"),
            "tests/ranks/test_ranks.py",  # whose ranks share memory, in processes that load the same library
            *("tests/sampling/test_noise.py", "tests/sampling/test_one_pass.py"),
        ),
        without=("does_not_wait",),
    ),
    "threads": Sanitizer(
        ("-fsanitize=thread",),
        "libtsan.so",
        {"TSAN_OPTIONS": f"die_after_fork=0:ignore_noninstrumented_modules=1:history_size=7:suppressions={KNOWN}"},
        ("tests/models/test_pool.py", "tests/heads/test_growing.py", "tests/models/test_shelving.py"),
        without=("does_not_wait",),
    ),
}


def package(name: str, instructions: str) -> Path:
    """Copy the package, compile its library with the sanitizer, and return the folder for PYTHONPATH."""
    folder = ROOT / "build" / "sanitize" / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "src" / "parlay", folder / "parlay", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    build(folder / "parlay" / "compiled" / "core.so", [instructions], (*FLAGS, *SANITIZERS[name].flags))
    return folder


def run(name: str, instructions: str, tests: list[str]) -> int:
    """Run tests with one of the sanitizers, except tests of other instruction sets, and return pytest's exit code."""
    own = SANITIZERS[name]
    ids = [f"{begin}{each}{end}" for each in NAMES if each != instructions for begin in "[-" for end in "-]"]
    # And that of C++, without which AddressSanitizer ends the process at the first exception that torch throws.
    where = [[*compiler_command(), f"-print-file-name={each}"] for each in (own.runtime, "libstdc++.so.6")]
    about = {
        "PYTHONPATH": os.pathsep.join([str(package(name, instructions)), str(ROOT)]),
        "LD_PRELOAD": " ".join(subprocess.check_output(each, text=True).strip() for each in where),
        "PYTHONMALLOC": "malloc",
        SWITCH: instructions,
        **own.options,
    }
    setarch = shutil.which("setarch")
    still = [setarch, "-R"] if setarch else []  # ThreadSanitizer wants addresses where it expects them
    words = [*still, sys.executable, "-m", "pytest", "-k", " and ".join(f"not {each}" for each in [*own.without, *ids])]
    env = {**os.environ, **about}
    # Where the library can't be loaded, most tests pass by torch's operators.
    loads = "from parlay.compiled.library import load; load()"
    subprocess.run([*still, sys.executable, "-c", loads], env=env, check=True)
    return subprocess.call([*words, *(tests or own.tests)], cwd=ROOT, env=env)


if __name__ == "__main__":
    kind, *more = sys.argv[1:] or [""]
    if kind not in SANITIZERS:
        sys.exit(f"usage: python -m tests.sanitize {'|'.join(SANITIZERS)} [TESTS ...]")
    sys.exit(run(kind, os.environ.get(SWITCH) or load().name.decode(), more))
