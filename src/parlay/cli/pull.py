"""`parlay pull`: downloads a model, and prints where it is."""

from __future__ import annotations

import argparse
import sys

from tqdm import tqdm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="smollm2-135m, or a Hugging Face Hub id; with :QUANTISATION for a GGUF file, as in user/repo:Q4_K_M",
    )


def run(options: argparse.Namespace) -> int:
    from parlay.models.fetch.resolving import bring  # here, as it imports torch

    with tqdm(desc=options.model, unit="B", unit_scale=True, file=sys.stderr, disable=None, leave=False) as bar:

        def progress(done: int, size: int) -> None:
            bar.total = size
            bar.update(done - bar.n)

        print(bring(options.model, progress))
    return 0
