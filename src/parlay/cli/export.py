"""`parlay export`: writes a trained drafter in another program's format."""

from __future__ import annotations

import argparse
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.options import UsageError

if TYPE_CHECKING:
    from parlay.heads.artefact import HeadArtefact
    from parlay.heads.opening import Matrices


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drafter", metavar="HEAD", help="a name that parlay drafters list prints, or a folder")
    parser.add_argument(
        "out", type=Path, nargs="?", metavar="OUT", help="folder to write; it must be empty, or not there"
    )
    parser.add_argument("-o", "--out", dest="folder", type=Path, metavar="OUT", help="the same")
    parser.add_argument(
        "--format",
        required=True,
        choices=("speculators", "vllm"),
        help="speculators: eagle3, block-drafter (as P-EAGLE) and mtp; vllm: medusa",
    )
    parser.add_argument("--model", default="", help="the target (default: the one that the head's config names)")
    parser.add_argument(
        "--verifier", default="", help="what the other program calls the target, as in user/name (default: MODEL)"
    )


def run(options: argparse.Namespace) -> int:
    import torch  # here, as help needs none of it

    from parlay.cli.drafters import folder_of
    from parlay.drafters.heads.modules import check_tensors
    from parlay.heads.artefact import load
    from parlay.heads.layouts.writing import Verifier, export
    from parlay.heads.opening import matrices_of
    from parlay.models.weights.fused import as_tensor

    out = options.folder or options.out
    if out is None:
        raise UsageError("OUT is missing: name a folder to write, as in parlay export HEAD OUT")
    folder = folder_of(options.drafter)
    head = load(folder)
    check_tensors(head)
    model = options.model or head.origin.target
    matrices = cache(partial(matrices_of, model))
    if options.model:
        _check_target(folder, head, matrices())
    verifier = Verifier(
        options.verifier or model,
        lambda: as_tensor(matrices().embedding, torch.bfloat16),
        lambda: as_tensor(matrices().lm_head, torch.bfloat16),
    )
    export(head, _card(folder), options.format, out, verifier)
    print(f"wrote {out}: {head.method} for {verifier.name or 'a target without a name'}")
    return 0


def _card(folder: Path) -> str:
    from parlay.heads.artefact import CARD

    return (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else ""


def _check_target(folder: Path, head: HeadArtefact, matrices: Matrices) -> None:
    """Raises BadHead for a head that was trained for another target."""
    from parlay.heads.artefact import check_target

    if len(head.witness_WH):
        vocab_size = matrices.embedding.shape[0]
        check_target(str(folder), head.layer, head.witness_WH, matrices.witnesses(vocab_size), vocab_size)
