"""`parlay drafters`: the trained drafters on this machine, and those on the Hugging Face Hub."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parlay.cli import bench_prompts
from parlay.cli.flags import add_model_flags, whole
from parlay.cli.parser import add_action
from parlay.options import UsageError, nearest, user_path
from parlay.system.terminal import aligned, printable

if TYPE_CHECKING:
    from parlay.heads.artefact import HeadFacts
    from parlay.heads.hub import OfferedDrafter
    from parlay.heads.store import StoredDrafter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    listing = add_action(actions, "list", "list the drafters on this machine")
    listing.add_argument("--json", action="store_true", help="print one JSON array")
    info = add_action(actions, "info", "check a drafter and print its card")
    info.add_argument("drafter", metavar="NAME", help="a name that parlay drafters list prints, or a folder")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    adding = add_action(actions, "add", "check a trained drafter and copy it into the store")
    adding.add_argument("folder", type=Path, metavar="FOLDER", help="what parlay train wrote, or a published head")
    adding.add_argument("--model", default="", help="the target of a published head, which it may not name")
    _add_key_flags(adding)
    removal = add_action(actions, "remove", "remove a drafter from the store")
    removal.add_argument("drafter", metavar="NAME")
    _add_hub_actions(actions)
    _add_recommend_flags(
        add_action(actions, "recommend", "measure drafters on your own prompts and rank them by speed")
    )


def _add_hub_actions(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    push = add_action(actions, "push", "upload a drafter to the Hugging Face Hub")
    push.add_argument("drafter", metavar="NAME", help="a name that parlay drafters list prints, or a folder")
    push.add_argument("repo", metavar="REPO", help="repository, as in user/name; it is made if it isn't there")
    push.add_argument("--private", action="store_true", help="make the repository private")
    pull = add_action(actions, "pull", "download a drafter from the Hugging Face Hub into the store")
    pull.add_argument("repo", metavar="REPO", help="repository, as in user/name")
    pull.add_argument("--revision", help="branch, tag or commit (default: main)")
    pull.add_argument("--yes", action="store_true", help="agree to its licence without being asked")
    _add_key_flags(pull)


def _add_key_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--domain", default="", help="kind of texts it is for (default: what its config says)")
    parser.add_argument("--name", default="", help="name in the store (default: TARGET-METHOD-DOMAIN)")


def run(options: argparse.Namespace) -> int:
    calls = {"list": _list, "info": _info, "add": _add, "remove": _remove, "push": _push, "pull": _pull}
    return calls.get(options.action, _recommend)(options)


def _list(options: argparse.Namespace) -> int:
    from parlay.heads.store import drafters  # here, as help needs none of it

    found = drafters()
    if options.json:
        print(json.dumps([_row(each) for each in found]))
        return 0
    rows = [["name", "method", "target", "texts", "first right", "licence", "source"]]
    for each in found:
        origin, source = each.facts.origin, each.pulled.repo if each.pulled else "shipped" if each.shipped else "added"
        rows.append(
            [each.name, each.facts.method, origin.target, origin.domain, _right(each.facts), origin.licence, source]
        )
    print("\n".join(aligned(rows, 7)))
    if any(each.facts.expected is not None for each in found):
        print(
            "first right: share of correct first guesses on the held-out part of each head's own training data. "
            "To compare heads on the same texts, run parlay bench PROMPTS.",
            file=sys.stderr,
        )
    return 0


def _row(each: StoredDrafter) -> dict[str, Any]:
    return {
        "name": each.name,
        **_facts(each.facts),
        "bytes": each.size,
        "folder": str(each.folder),
        "shipped": each.shipped,
        "repo": each.pulled.repo if each.pulled else None,
        "commit": each.pulled.commit if each.pulled else None,
    }


def _facts(facts: HeadFacts) -> dict[str, Any]:
    origin = facts.origin
    return {
        "method": facts.method,
        "target": origin.target,
        "target_sha256": origin.target_sha256,
        "domain": origin.domain,
        "licence": origin.licence,
        "sha256": facts.sha256,
        "expected": facts.expected,
    }


def _right(facts: HeadFacts) -> str:
    """The expected share of right first guesses."""
    return "-" if facts.expected is None else f"{100 * facts.expected:.0f} %"


def _info(options: argparse.Namespace) -> int:
    from parlay.drafters.heads.modules import check_tensors
    from parlay.heads.artefact import load, read_facts
    from parlay.heads.hub import read_card

    folder = folder_of(options.drafter)
    facts, (_, text) = read_facts(folder), read_card(folder)
    check_tensors(load(folder))
    shown = {"folder": str(folder), **_facts(facts), "checked": "ok"}
    if options.json:
        print(json.dumps({**shown, "card": text}))
        return 0
    for name, value in shown.items():
        print(f"{name:14} {_right(facts) if name == 'expected' else value or '-'}")
    print(f"\n{printable(text)}" if text else "\nIt has no card.")
    return 0


def folder_of(drafter: str) -> Path:
    """The folder of a name in the store; a path to a folder is taken as it is."""
    from parlay.heads.artefact import CONFIG
    from parlay.heads.store import find

    path = user_path(drafter)
    return path if (path / CONFIG).is_file() else find(drafter).folder


def _add(options: argparse.Namespace) -> int:
    from parlay.drafters.heads.modules import check_tensors
    from parlay.heads import store
    from parlay.heads.artefact import load
    from parlay.heads.layouts.files import is_artefact

    if not options.folder.is_dir():
        raise UsageError(f"no folder {options.folder}: name one that parlay train wrote, or that of a published head")
    with tempfile.TemporaryDirectory() as started:
        folder = options.folder if is_artefact(options.folder) else Path(started)
        if folder != options.folder:
            _convert(options.folder, options.model, folder)
        head = load(folder)
        _check_method(head.method)
        check_tensors(head)
        _say_added(store.add(folder, domain=options.domain, name=options.name))
    return 0


def _check_method(method: str) -> None:
    """Raises ValueError for a drafter that no strategy can use."""
    from parlay.strategies.catalogue import catalogue

    if method not in catalogue():
        raise ValueError(
            f"the drafter needs strategy {method}, which this version does not have: {nearest(method, catalogue())}"
        )


def _convert(folder: Path, model: str, out: Path) -> None:
    """Convert a published head to one of Parlay's own for this model."""
    from parlay.heads.artefact import CARD, Origin, save
    from parlay.heads.hub import read_card
    from parlay.heads.opening import converted, matrices_of
    from parlay.models.fetch.origin import public_name, weights_sha256
    from parlay.models.fetch.resolving import resolve
    from parlay.models.loading import read_config

    if not model:
        raise ValueError(f"{folder} does not name its target model: add it, as in --model user/name")
    head, proved = converted(folder, read_config(resolve(model)), matrices_of(model))
    if not proved:
        print(f"Nothing in {folder} proves that it goes with {model}: look at how many drafts are accepted")
    licence = str(read_card(folder)[0].get("license", ""))
    origin = Origin(public_name(model), weights_sha256(model), licence=licence)
    card = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else ""
    save(out, replace(head, origin=origin), card)


def _say_added(added: StoredDrafter) -> None:
    print(
        f"added {added.name} ({added.size / 1e6:,.1f} MB, SHA-256 {added.facts.sha256})\n"
        f"Use it: parlay generate --model {added.facts.origin.target or 'MODEL'} "
        f"--strategy {added.facts.method}:head={added.name}"
    )


def _remove(options: argparse.Namespace) -> int:
    from parlay.heads.store import remove

    print(f"removed {options.drafter} from {remove(options.drafter)}")
    return 0


def _push(options: argparse.Namespace) -> int:
    from parlay.drafters.heads.modules import check_tensors
    from parlay.heads.artefact import load
    from parlay.heads.hub import push

    folder = folder_of(options.drafter)
    check_tensors(load(folder))
    print(push(folder, options.repo, private=options.private))
    return 0


def _pull(options: argparse.Namespace) -> int:
    from parlay.heads.hub import look, pull

    offer = look(options.repo, options.revision)
    facts, origin = offer.facts, offer.facts.origin
    _check_method(facts.method)
    print(f"{offer.repo} at {offer.commit[:12]}: {facts.method} for {origin.target or 'a target without a name'}")
    print(f"licence: {printable(offer.licence) or 'not stated'}")
    if not (options.yes or _agreed(offer)):
        print("nothing was downloaded")
        return 1
    _say_added(pull(offer, domain=options.domain, name=options.name))
    return 0


def _agreed(offer: OfferedDrafter) -> bool:
    """Ask in the terminal whether the user accepts the licence. Raises ValueError without a terminal."""
    if not sys.stdin.isatty():
        raise ValueError(
            f"{offer.repo} was not downloaded: add --yes to agree to its licence ({offer.licence or 'not stated'})"
        )
    return input("Use it under this licence? [y/N] ").strip().lower() in ("y", "yes")


def _add_recommend_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the older form of `parlay bench PROMPTS`."""
    add_model_flags(parser)
    parser.set_defaults(draft_model=None, out=None, minutes=None, concurrency=(1,), context=(0,), effort=None)
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE", dest="file", help="your prompts")
    parser.add_argument("--strategies", metavar="NAMES", help="what to measure, joined by commas")
    parser.add_argument("--most", type=whole, default=8, metavar="N", help="most prompts, the first ones (default: 8)")
    parser.add_argument("--max-tokens", type=whole, default=64, metavar="N", help="longest answer (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: 0)")
    parser.add_argument("--rounds", type=whole, default=3, metavar="N", help="rounds of the best (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _recommend(options: argparse.Namespace) -> int:
    for flag, value in (("--most", options.most), ("--max-tokens", options.max_tokens), ("--rounds", options.rounds)):
        if value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    if not 0 <= options.temperature <= 100:
        raise ValueError(f"--temperature must be between 0 and 100, got {options.temperature:g}")
    options.prompts, options.temperature = options.most, (options.temperature,)
    code = bench_prompts.run(options, [options.file])
    print(f"parlay: note: this is parlay bench {options.file}, which has more flags", file=sys.stderr)
    return code
