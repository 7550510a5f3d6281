"""Tests of the compiled decoder for macOS that need no Mac.

Its sources compile for macOS, against no more of its headers than ``macos/`` declares; and the pool of threads keeps
its promises in the form that asks nothing of Linux. Nothing here was run on macOS.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from parlay.compiled import build

HEADERS = Path(__file__).parent / "macos"
MACHINES = {"x86_64": build._X86["avx512_bf16"], "arm64": build._ARM["dotprod"]}
"""Each with the flags of its widest instructions."""
NAMES = (
    *("-DCORE=core", "-DLABEL=core", "-DBLOCK_FORMATS=formats", "-DQUANTISE=quantise", "-DSCORE=score"),
    "-DSOURCES=none",
)


@pytest.mark.skipif(not shutil.which("clang"), reason="no clang, which compiles for other systems")
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("source", ["choose", "formats", "kernels", "pool"])
def test_the_sources_compile_for_macos(machine: str, source: str, tmp_path: Path) -> None:
    made = tmp_path / "made.o"
    system = ("-target", f"{machine}-apple-macos11", "-ffreestanding", "-nostdlibinc", "-isystem", str(HEADERS))
    flags = [*(flag for flag in build._FLAGS if flag != "-w"), "-Werror=implicit-function-declaration", "-O0"]
    command = ["clang", *flags, *MACHINES[machine], *NAMES, *system]
    subprocess.run([*command, "-c", str(build.SOURCES / f"{source}.c"), "-o", str(made)], check=True)
    assert made.read_bytes()[:4] == b"\xcf\xfa\xed\xfe", "an object of macOS"


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
@pytest.mark.parametrize("form", [("-DPARLAY_POSIX",), ()], ids=["posix", "this system's"])
def test_the_pool_runs_in_both_forms(form: tuple[str, ...], tmp_path: Path) -> None:
    """Every piece is committed once, whoever sleeps, is late, or has forked."""
    made = tmp_path / "runs"
    sources = [str(HEADERS / "pool_runs.c"), str(build.SOURCES / "pool.c")]
    flags = ("-std=gnu11", "-O2", "-pthread", "-w", *form, "-I", str(build.SOURCES))
    subprocess.run(["cc", *flags, *sources, "-o", str(made), "-lm"], check=True)
    done = subprocess.run([str(made)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n")
