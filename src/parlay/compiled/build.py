"""Builds the library in C with the machine's compiler, when the package is installed and on demand.

kernels.c and formats.c, which are the decoder, are compiled once for each instruction set (`_X86`, `_ARM`), under names
of its own; choose.c, pool.c, shelf.c and stream.c once. All are linked into one library, which picks the widest set
that the processor has. Only the standard library is imported, because this runs while the package is being installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "core"
LIBRARY = Path(__file__).parent / "core.so"

_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-w")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_EVERYWHERE: dict[str, tuple[str, ...]] = {"plain": ()}
_X86: dict[str, tuple[str, ...]] = {
    "avx2": _AVX2,
    "avx_vnni": (*_AVX2, "-mavxvnni"),
    "avx512": _AVX512,
    "avx512_vnni": (*_AVX512, "-mavx512vnni"),
    "avx512_bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
}
_ARM: dict[str, tuple[str, ...]] = {"dotprod": ("-march=armv8.2-a+dotprod",)}  # NEON itself is in all of AArch64
_OF_MACHINES = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}
SYSTEMS = ("linux", "darwin")
NAMES = (*_EVERYWHERE, *_OF_MACHINES.get(platform.machine(), {}))
"""Instruction sets of this kind of machine, from the least to the widest. A library has those its compiler knew."""


class CannotBuild(Exception):
    """The library can't be built; its text says why in one line."""


def digest() -> str:
    """Hash the sources: a library carries the hash of what it was built of."""
    files = sorted(SOURCES.glob("*.[ch]"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def is_current(library: Path = LIBRARY) -> bool:
    """Whether the library was built of these sources, by this file as it is now, for a machine like this one."""
    try:
        if library.stat().st_mtime < Path(__file__).stat().st_mtime:
            return False
        built_of = ctypes.CDLL(str(library)).parlay_sources
    except (OSError, AttributeError):  # there is none, or it is for another machine, or no library of this kind
        return False
    built_of.restype = ctypes.c_char_p
    return bool(built_of() == digest().encode())


def build(library: Path = LIBRARY, only: Collection[str] = NAMES, flags: Sequence[str] = ()) -> Path:
    """Build the library for those of the instruction sets ``only`` that the compiler knows; raises CannotBuild.

    ``flags`` come behind the usual ones, for compiling and for linking.
    """
    if sys.platform not in SYSTEMS:
        raise CannotBuild(f"the compiled decoder is for Linux and macOS, not {sys.platform}")
    compiler = compiler_command()
    try:
        handle, name = tempfile.mkstemp(prefix=library.name, suffix=".new", dir=library.parent)
        os.close(handle)
        try:
            with tempfile.TemporaryDirectory() as folder:
                build_objects(compiler, platform.machine(), Path(folder), only, flags)
                objects = sorted(str(path) for path in Path(folder).glob("*.o"))
                made = Path(folder) / library.name
                _run([*compiler, "-shared", "-pthread", "-o", str(made), *objects, "-lm", *flags])
                shutil.copy(made, name)
            os.replace(name, library)  # processes that run the old one keep it; a build beside this has another name
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise CannotBuild(f"can't write {error.filename or library}: {error.strerror}") from None
    return library


def compiler_command() -> Sequence[str]:
    """The command that compiles C: CC's words, else cc or gcc; raises CannotBuild where there is none."""
    compiler = os.environ.get("CC", "").strip()
    if compiler:
        return [compiler] if shutil.which(compiler) else shlex.split(compiler)
    found = shutil.which("cc") or shutil.which("gcc")
    if found is None:
        raise CannotBuild("there is no C compiler")
    return [found]


def build_objects(
    compiler: Sequence[str],
    machine: str,
    folder: Path,
    only: Collection[str] | None = None,
    flags: Sequence[str] = (),
) -> None:
    """Compile all objects of the library into ``folder``, for a machine of this kind; see `build`."""
    sets = _EVERYWHERE | _OF_MACHINES.get(machine, {})
    known = {name: own for name, own in sets.items() if (only is None or name in only) and _knows(compiler, own)}
    jobs = [job for name, own in known.items() for job in _objects(compiler, folder, name, own)]
    about = (f"-DSOURCES={digest()}", *(f"-Dparlay_{name}=parlay_none" for name in sets if name not in known))
    jobs += [
        _command(compiler, SOURCES / f"{name}.c", folder / f"{name}.o", *about)
        for name in ("choose", "pool", "shelf", "stream")
    ]
    jobs.reverse()  # wide sets take longest, so they begin first
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, [[*job, *flags] for job in jobs]))


def _knows(compiler: Sequence[str], flags: tuple[str, ...]) -> bool:
    """Whether the compiler takes these flags. Without flags always: if it does not work at all, compiling says why."""
    try:
        _run([*compiler, *flags, "-fsyntax-only", "-x", "c", os.devnull])
    except CannotBuild:
        return not flags
    return True


def _objects(compiler: Sequence[str], folder: Path, name: str, flags: tuple[str, ...]) -> list[list[str]]:
    """The commands for one instruction set.

    formats.c is compiled without contracting a * b + c to one operation: its sums must round where the source says.
    """
    shared = {"BLOCK_FORMATS": "formats", "QUANTISE": "quantise", "SCORE": "score", "LOWER": "lower", "RAISE": "raise"}
    names = (*(f"-D{macro}=parlay_{name}_{suffix}" for macro, suffix in shared.items()), *flags)
    core = (f"-DCORE=parlay_{name}", f"-DLABEL={name}", *names)
    return [
        _command(compiler, SOURCES / "kernels.c", folder / f"{name}.o", *core),
        _command(compiler, SOURCES / "formats.c", folder / f"{name}_formats.o", "-ffp-contract=off", *names),
    ]


def _command(compiler: Sequence[str], source: Path, made: Path, *flags: str) -> list[str]:
    return [*compiler, *_FLAGS, *flags, "-c", str(source), "-o", str(made)]


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise CannotBuild(f"the C compiler {command[0]} can't be run: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines() or ["?"]
        raise CannotBuild(f"{command[0]} failed: {lines[0].strip()}") from None


if __name__ == "__main__":
    try:
        print("compiled decoder:", LIBRARY if "--if-changed" in sys.argv[1:] and is_current() else build())
    except CannotBuild as reason:
        sys.exit(f"not built: {reason}")
