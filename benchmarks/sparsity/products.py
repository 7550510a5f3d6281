"""Times the product of a row and a sparse matrix read from memory, in four layouts, and compares it with the dense
product.

    python -m benchmarks.sparsity.products

One thread, bfloat16, CPU time. The layouts take turns in a round, and the median of the ratios within a round counts,
so other work slows all alike. It needs a C compiler, and AVX-512 with bf16 and VBMI2 (Zen 4, Ice Lake with bf16 and
later).
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from benchmarks.commands import one_line_errors
from benchmarks.options import command_parser
from benchmarks.pages import table

GROUP, AT_ONCE = 32, 4
"""The number of inputs of a mask or block, and the number of outputs that share a block."""
NEEDED = ("avx512_bf16", "avx512_vbmi2")
SHARES = (0.75, 0.5, 0.25)
_CACHES = 64 << 20
"""The count of numbers that fill every cache twice."""
Numbers = npt.NDArray[np.uint16]
Call = Callable[[], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Layout:
    """One layout of a matrix: its product with the row, its bytes, and the expected product."""

    name: str
    kept: float
    bytes: int
    call: Call
    expected: npt.NDArray[np.float32]


def runs_here() -> bool:
    """Return whether this processor has the instructions of the products."""
    flags = Path("/proc/cpuinfo")
    return flags.exists() and all(flag in flags.read_text() for flag in NEEDED)


def compiled(folder: Path) -> ctypes.CDLL:
    """Compile the products to a library. Raises ValueError if they can't be compiled or don't run here."""
    if not runs_here():
        raise ValueError(f"this processor lacks {' or '.join(NEEDED)}: run it on one that has them")
    built = folder / "products.so"
    source = Path(__file__).with_suffix(".c")
    command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", str(built), str(source)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"{source.name} can't be compiled: {error}") from None
    return ctypes.CDLL(str(built))


def layouts(library: ctypes.CDLL, outputs: int, inputs: int, shares: Sequence[float], seed: int = 0) -> list[Layout]:
    """Return all layouts of one random matrix, the dense one first."""
    chance = np.random.default_rng(seed)
    weights_OI, x_I = _numbers(chance, (outputs, inputs)), _numbers(chance, (inputs,))
    whole = _dense(library, weights_OI, x_I)
    found = [Layout("all weights", 1.0, weights_OI.nbytes, whole, whole())]
    for share in shares:
        kept_OI = chance.random((outputs, inputs), np.float32) < share
        found.append(_bitmap(library, weights_OI, kept_OI, x_I, share))
    quads = chance.random((outputs, inputs // 4, 4), np.float32).argsort(-1) < 2
    found.append(_two_of_four(library, weights_OI, quads.reshape(outputs, inputs), x_I))
    for share in shares:
        found.append(_blocks(library, weights_OI, chance.random((outputs // AT_ONCE, inputs // GROUP)) < share, x_I))
    return found


def _numbers(chance: np.random.Generator, shape: tuple[int, ...]) -> Numbers:
    """Return the bits of random bfloat16 numbers from -1 to 1."""
    bits: Numbers = (chance.uniform(-1, 1, shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits


def _pointer(numbers: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(numbers.ctypes.data)


def _caller(function: Callable[..., object], arrays: Sequence[npt.NDArray[np.generic]], sizes: Sequence[int]) -> Call:
    """Return a call of a C function with the arrays, a result with one number per output, and the sizes."""
    y_O = np.zeros(sizes[0], np.float32)

    def call() -> npt.NDArray[np.float32]:
        function(*map(_pointer, arrays), _pointer(y_O), *map(ctypes.c_long, sizes))
        return y_O

    return call


def _dense(library: ctypes.CDLL, weights_OI: Numbers, x_I: Numbers) -> Call:
    return _caller(library.dense, (np.ascontiguousarray(_grouped(weights_OI)), x_I), weights_OI.shape)


def _grouped(weights_OI: Numbers) -> Numbers:
    """Return the weights as ``[O / 4, I / 32, 4, 32]``."""
    outputs, inputs = weights_OI.shape
    return weights_OI.reshape(outputs // AT_ONCE, AT_ONCE, inputs // GROUP, GROUP).transpose(0, 2, 1, 3)


def _expected(library: ctypes.CDLL, weights_OI: Numbers, kept_OI: npt.NDArray[np.bool_], x_I: Numbers) -> Call:
    return _dense(library, np.where(kept_OI, weights_OI, np.uint16(0)), x_I)


def _masks(kept_OI: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    return np.packbits(kept_OI, axis=-1, bitorder="little").view(np.uint32)


def _padded(numbers: Numbers) -> Numbers:
    """Add zeros after the last weight, because a whole register is read there."""
    return np.concatenate((numbers, np.zeros(GROUP, np.uint16)))


def _bitmap(
    library: ctypes.CDLL, weights_OI: Numbers, kept_OI: npt.NDArray[np.bool_], x_I: Numbers, share: float
) -> Layout:
    close, masks = _padded(weights_OI[kept_OI]), _masks(kept_OI)
    starts = np.concatenate(([0], kept_OI.sum(-1).cumsum()[:-1])).astype(np.int64)
    call = _caller(library.bitmap, (close, masks, starts, x_I), weights_OI.shape)
    expected = _expected(library, weights_OI, kept_OI, x_I)()
    return Layout("bitmap", share, close.nbytes + masks.nbytes + starts.nbytes, call, expected)


def _two_of_four(library: ctypes.CDLL, weights_OI: Numbers, kept_OI: npt.NDArray[np.bool_], x_I: Numbers) -> Layout:
    close, masks = _padded(weights_OI[kept_OI]), _masks(kept_OI)
    call = _caller(library.two_of_four, (close, masks, x_I), weights_OI.shape)
    return Layout("2:4", 0.5, close.nbytes + masks.nbytes, call, _expected(library, weights_OI, kept_OI, x_I)())


def _blocks(library: ctypes.CDLL, weights_OI: Numbers, kept_BG: npt.NDArray[np.bool_], x_I: Numbers) -> Layout:
    close, counts = _padded(_grouped(weights_OI)[kept_BG].reshape(-1)), kept_BG.sum(-1).astype(np.int32)
    places = np.nonzero(kept_BG)[1].astype(np.int32)
    call = _caller(library.blocks, (close, places, counts, x_I), weights_OI.shape[:1])
    kept_OI = kept_BG.repeat(AT_ONCE, 0).repeat(GROUP, 1)
    share = float(kept_BG.mean())
    expected = _expected(library, weights_OI, kept_OI, x_I)()
    return Layout("blocks of 4 x 32", share, close.nbytes + places.nbytes, call, expected)


def checked(found: Sequence[Layout]) -> None:
    """Check each layout's product. Raises AssertionError if it differs from the dense product of the same weights."""
    for each in found:
        np.testing.assert_allclose(each.call(), each.expected, rtol=1e-3, atol=1e-3, err_msg=each.name)


def speeds(found: Sequence[Layout], rounds: int) -> Mapping[int, float]:
    """Return by layout number how many times as fast as the dense product it is: the median of the rounds."""
    ratios: dict[int, list[float]] = {number: [] for number in range(len(found))}
    other_B = np.ones(_CACHES, np.uint16)
    for _ in range(rounds):
        seconds = [_timed(each.call, other_B) for each in found]
        for number, taken in enumerate(seconds):
            ratios[number].append(seconds[0] / taken)
    return {number: median(values) for number, values in ratios.items()}


def _timed(call: Call, other_B: Numbers) -> float:
    """Return the CPU seconds of a call, after other memory was read so that no layout is in the caches."""
    other_B.sum()
    began = time.thread_time()
    call()
    return time.thread_time() - began


def page(found: Sequence[Layout], faster: Mapping[int, float]) -> str:
    """Write the results as a table."""
    rows = [
        (each.name, f"{each.kept:.3f}", f"{each.bytes / found[0].bytes:.2f}", f"{faster[number]:.2f}")
        for number, each in enumerate(found)
    ]
    return "\n".join(table(("layout", "share kept", "bytes", "speed"), rows))


def main() -> None:
    """Run the command."""
    parser = command_parser("sparsity.products", __doc__)
    parser.add_argument("--outputs", type=int, default=32_768, metavar="N", help="rows of the matrix")
    parser.add_argument("--inputs", type=int, default=1536, metavar="N", help="columns of the matrix, a multiple of 64")
    parser.add_argument("--rounds", type=int, default=15, metavar="N")
    options = parser.parse_args()
    with one_line_errors("sparsity.products"), tempfile.TemporaryDirectory() as folder:
        if options.inputs % 64 or options.outputs % AT_ONCE:
            raise ValueError(f"inputs are a multiple of 64, and outputs of {AT_ONCE}")
        found = layouts(compiled(Path(folder)), options.outputs, options.inputs, SHARES)
        checked(found)
        print(page(found, speeds(found, options.rounds)))


if __name__ == "__main__":
    main()
