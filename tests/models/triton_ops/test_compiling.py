"""Kernels compile for GPUs that are not here, down to machine code; only that they compute right is not seen."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from parlay.models.triton_ops import kernels
from parlay.sampling.walk_kernels import walk

WHOLE = {"recent", "place", "window", "spans", "stride"}
ADDRESSES = {"fields", "lists"}


def kind(name, number, sums):
    if name in WHOLE:
        return "i32"
    if name in ADDRESSES:
        return "*i64"
    return "fp32" if name == "cap" else "*" + (sums if name in ("mixed", "peaks", "sums") else number)


for capability in (80, 90):
    for number, factors, wide, keys in (("bf16", tl.bfloat16, False, 64), ("fp64", tl.float32, True, 8)):
        values = dict(HEADS=2, G=6, GP=8 if wide else 16, D=32, DP=32, PAGE=16, ALIGNED=16, KEYS=keys, SPAN=512)
        values |= dict(CAPPED=True, FACTORS=factors, SINKS=True, WIDE=wide)
        for kernel in (kernels.store, kernels.attend, kernels.combine):
            names = kernel.arg_names
            constants = {(place,): values[name] for place, name in enumerate(names) if name.isupper()}
            sums = "fp64" if wide else "fp32"
            signature = {name: "constexpr" if name.isupper() else kind(name, number, sums) for name in names}
            target = GPUTarget("cuda", capability, 32)
            made = triton.compile(ASTSource(kernel, signature=signature, constexprs=constants), target=target)
            print(kernel.__name__, capability, number, len(made.asm["cubin"]) > 0)
    signature = dict(logits="*fp32", numbers="*i64", out="*i64", stride="i32", room="i32", V="i32", BLOCK="constexpr")
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(ASTSource(walk, signature=signature, constexprs={(6,): 1024}), target=target)
    print("walk", capability, len(made.asm["cubin"]) > 0)
"""


@pytest.mark.slow
def test_kernels_compile_for_two_kinds_of_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False)
    assert done.stderr == "" or done.returncode == 0, done.stderr
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["True"] * 14
