"""`parlay bench --replay`: strategies on recorded answers of other models, and the speed that forwards' costs give."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli import FAILURE
from parlay.cli.flags import options_from
from parlay.options import LoadOptions

if TYPE_CHECKING:
    from parlay.bench.forwards import ForwardPrices
    from parlay.bench.records import Results
    from parlay.bench.replay.run import Texts
    from parlay.bench.replay.tokens import RecordedTokens

TOKENIZER = "parlay-mini"
MEANINGLESS = {
    "model": None,
    "workloads": None,
    "preset": None,
    "data": None,
    "against": None,
    "rounds": None,
    "concurrency": (1,),
    "temperature": (0.0,),
    "context": (0,),
    "max_tokens": None,
    "keep_loops": False,
    "price_per_hour": None,
    "draft_model": None,
    "effort": None,
    "forwards": False,
}
"""Flags that a replay does not use, and their defaults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "replay", "count the steps in which strategies decode recorded answers; no model runs"
    )
    group.add_argument(
        "--replay",
        metavar="FILES",
        help="recorded answers, joined by commas: JSON lines of prompt and output, or shapes of docs/how-to/measure.md",
    )
    group.add_argument(
        "--tokenizer",
        metavar="T",
        help=f"tokenizer: mistral-common:v1, v2, v3, v7 or tekken, or a model, folder or Hub id (default: {TOKENIZER})",
    )
    priced = group.add_mutually_exclusive_group()
    priced.add_argument(
        "--cost-model",
        metavar="MODEL",
        help="time forwards of this model here, and model speed from them; its weights may be random",
    )
    priced.add_argument(
        "--cost-table", type=Path, metavar="FILE", help="take the times of forwards from results made with --forwards"
    )
    parser.add_argument(
        "--forwards", action="store_true", help="also time forwards by rows and context, and the reading of the weights"
    )


def refuse_without(options: argparse.Namespace) -> None:
    """Raises ValueError for a flag that only --replay uses."""
    for name in ("tokenizer", "cost_model", "cost_table"):
        if vars(options)[name] is not None:
            raise ValueError(f"--{name.replace('_', '-')} works only with --replay: add it, or remove this one")


def _refuse_with(options: argparse.Namespace) -> None:
    """Raises ValueError for a flag that --replay does not use."""
    for name, usual in MEANINGLESS.items():
        if vars(options)[name] != usual:
            raise ValueError(f"--{name.replace('_', '-')} has no effect with --replay, which runs no model: remove it")


def run(options: argparse.Namespace) -> int:
    _refuse_with(options)

    from parlay.bench import presets
    from parlay.bench.provenance import loading, provenance
    from parlay.bench.records import Results, fingerprint
    from parlay.bench.replay.run import cell, lacking, read_texts, replayable
    from parlay.bench.replay.tokens import open_tokens
    from parlay.bench.summary import summarise
    from parlay.bench.table import table
    from parlay.system import threads

    threads.settle(options.threads)
    chosen = presets.strategies(options.strategies) if options.strategies else ()
    tokens = open_tokens(options.tokenizer or TOKENIZER)
    texts = [read_texts(path, tokens, options.prompts) for path in _files(options.replay)]
    strategies = chosen or tuple(replayable(tokens))
    timed = loading(options_from(LoadOptions, options)) if options.cost_model else {}
    shared = {"tokenizer": tokens.name, "settings": {"prompts": options.prompts}, "options": timed}
    prints = {each.name: fingerprint(each.records) for each in texts}
    results = Results(options.out, provenance(_command(options), shared), fresh=options.fresh, texts=prints)
    prices = _prices(options, results)
    _decode(lacking(texts, strategies, results, prices), tokens, results, prices)
    cells = [cell(strategy, each, prices) for each in texts for strategy in strategies]
    print(table(summarise(results.rows, cells)))
    speed = f"; speeds are modelled, with forwards that cost what those of {prices.model} do" if prices else ""
    print(f"\nrecorded answers, tokens of {tokens.name}{speed}; rows in {options.out}")
    return 0 if any(row.requests for one in cells for row in results.of(one)) else FAILURE


def _files(text: str) -> list[Path]:
    """Split the list of files. Raises ValueError for two with the same name, whose rows could not be told apart."""
    from parlay.bench.workloads.files import stem

    paths = [Path(name) for name in text.split(",")]
    names = [stem(path) for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"two files of --replay are called {name}: rename one, or replay them into different files with --out"
            )
    return paths


def _decode(
    pairs: Sequence[tuple[Texts, str]], tokens: RecordedTokens, results: Results, prices: ForwardPrices | None
) -> None:
    from tqdm import tqdm

    from parlay.bench.replay.run import run as replays

    with tqdm(total=len(pairs), unit="row", file=sys.stderr, disable=None) as bar:
        for _ in replays(pairs, tokens, results, prices):
            bar.update()


def _prices(options: argparse.Namespace, results: Results) -> ForwardPrices | None:
    """The prices of forwards, from a file or measured now; None if speed was not asked for."""
    from parlay.bench.forwards import add_missing, prices, read_prices, weight_bytes

    if options.cost_table is not None:
        return read_prices(options.cost_table)
    if options.cost_model is None:
        return None
    from parlay import models
    from parlay.models.fetch.resolving import resolve

    directory = resolve(options.cost_model)
    runner = models.load(options.cost_model, options_from(LoadOptions, options))
    weights = weight_bytes(directory, options.quantize or runner.spec.dtype)
    add_missing(runner, directory.name, results, weights)
    return prices([row for row in results.rows if row.cell.model == directory.name], str(options.out))


def _command(options: argparse.Namespace) -> str:
    """The command line that repeats the run, without local folders."""
    files = ",".join(Path(name).name for name in options.replay.split(","))
    flags = {
        "--replay": files,
        "--tokenizer": options.tokenizer,
        "--strategies": options.strategies,
        "--prompts": options.prompts,
        "--cost-model": options.cost_model and Path(options.cost_model).name,
        "--cost-table": options.cost_table and options.cost_table.name,
    }
    return shlex.join(["parlay", "bench", *(str(word) for flag in flags.items() if flag[1] for word in flag)])
