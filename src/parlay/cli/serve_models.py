"""The models of `parlay serve`: those that are named, those of a folder, and how each is loaded."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.certificates.requirement import AUDIT_SHARE
from parlay.cli import flags
from parlay.cli.ensemble_flags import chosen_ensemble
from parlay.cli.opening import read_text
from parlay.models.fetch.pulled import DEFAULT_MODEL, default_model
from parlay.options import LoadOptions, RankOptions, user_path
from parlay.serve.settings import ServeOptions
from parlay.types import ParlayError

if TYPE_CHECKING:
    from parlay.aio import AsyncLLM
    from parlay.llm.llm import LLM
    from parlay.llm.vocabulary import Vocabularies
    from parlay.serve.cascades import Link
    from parlay.serve.registry import Registry

KEPT = 8
"""How many vocabularies of unloaded models stay in memory."""
_LATER_PART = re.compile(r".*-(?!00001)\d{5}-of-\d{5}")
_FIRST_PART = re.compile(r"-00001-of-\d{5}$")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="local folder or GGUF file, Hugging Face Hub id, or a name from parlay models; NAME=MODEL serves it "
        f"under that name; several may be given (default: {DEFAULT_MODEL}, downloaded at first use)",
    )
    group = parser.add_argument_group("models")
    group.add_argument("--model", action="append", default=[], metavar="MODEL", help="the same as MODEL")
    _add_loading_flags(group)
    flags.add_strategy_flags(
        group, "decoding strategy of requests that name none; parlay strategies lists them (default: auto)"
    )
    flags.add_router_memory_flag(group, keys=True)
    _add_quality_flags(group)
    flags.add_tokenizer_flag(group)
    group.add_argument(
        "--generation-config",
        choices=("auto", "vllm"),
        default="auto",
        help="defaults of temperature, top_p and the like: auto takes what the "
        "model's makers recommend, vllm the defaults of the API (default: auto)",
    )
    group.add_argument("--max-model-len", type=flags.whole, metavar="N", help=flags.CONTEXT)
    samples = "most samples decoded together in a step (default: 32)"
    group.add_argument("--max-num-seqs", type=flags.whole, default=32, metavar="N", help=samples)
    group.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory for each model's KV cache and drafters, as in 2GiB; weights=SIZE, alone or after a comma, limits "
        "the memory of each model's weights, and the rest is read from disk (on a GPU: from host memory)",
    )
    flags.add_prefix_cache_flags(group)
    flags.add_loading_flags(group)
    _add_adapter_flags(group)


def _add_adapter_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags for adapters that requests name like models."""
    group.add_argument(
        "--lora-modules",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=FOLDER",
        help="PEFT adapters for the first model; requests name them as models",
    )
    flags.add_option_flags(group, ServeOptions, ["lora_folder"])


def load_adapters(options: argparse.Namespace, registry: Registry, base: str | None) -> None:
    """Load the adapters named by flags, for the model called ``base``.

    Raises ValueError for a malformed flag, ParlayError for a folder without an adapter of this model.
    """
    from parlay.serve.adapters import NamedAdapter

    if options.lora_folder is not None and not options.lora_folder.is_dir():
        raise ValueError(f"--lora-folder: no folder {options.lora_folder}")
    for word in options.lora_modules:
        name, equals, folder = word.partition("=")
        if not (name and equals and folder):
            raise ValueError(f"--lora-modules must be NAME=FOLDER, got {word!r}")
        if base is None:
            raise ValueError("--lora-modules needs a model: name one")
        if registry.adapters.get(name) or name in {model.name for model in registry}:
            raise ValueError(f"--lora-modules: the name {name!r} is in use: choose another for the adapter")
        adapter, served = NamedAdapter(name, base, user_path(folder).resolve()), registry.get(base).served
        assert served is not None, "the first model is loaded at once"
        served.llm.adapters.load(name, adapter.folder)
        registry.adapters.add(adapter)


def _add_quality_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags that allow requests to use lossy strategies and cascades."""
    flags.add_certificate_flag(group)
    group.add_argument(
        "--cascade",
        action="append",
        default=[],
        metavar="FILE",
        help="file of parlay calibrate --small, for two of the models: the small one answers requests with a floor for "
        "the large one where it is sure enough; may be given several times",
    )
    group.add_argument(
        "--audit-share",
        type=float,
        default=AUDIT_SHARE,
        metavar="X",
        help=f"share of lossy answers that are decoded exactly too, to check them (default: {AUDIT_SHARE:g})",
    )


def _add_loading_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags for models besides the named ones, and for when models are in memory."""
    group.add_argument(
        "--model-dir",
        type=Path,
        metavar="FOLDER",
        help="serve every model in this folder: model folders and GGUF files",
    )
    flags.add_option_flags(group, ServeOptions, ["max_loaded", "idle_seconds"])
    group.add_argument("--allow-pull", action="store_true", help="let requests download models, as parlay pull does")


def chosen_models(options: argparse.Namespace) -> dict[str, str]:
    """The models to serve by name; named models come before those of a folder.

    Raises ValueError for a duplicate name, and for a folder without models.
    """
    words = [*options.models, *options.model]
    if options.model_dir is None:
        return named_models(words or [DEFAULT_MODEL])
    named, found = named_models(words), _models_in(options.model_dir)
    if twice := sorted(named.keys() & found.keys()):
        raise ValueError(
            f"two models are called {twice[0]!r}, one of them in {options.model_dir}: rename the other with NAME=MODEL"
        )
    return named | found


def find_models(options: argparse.Namespace, models: Mapping[str, str]) -> str | None:
    """Download the default model if none was named, and resolve the draft model and the first named model.

    Returns the first model's name, or None if all come from a folder. A missing model is reported here, before torch is
    imported.
    """
    from parlay.models.fetch.resolving import resolve, resolve_tokenizer  # here, as help needs no models

    if options.draft_model is not None:
        resolve(options.draft_model)
    if options.tokenizer is not None:
        resolve_tokenizer(options.tokenizer)
    words = options.models or options.model
    if not words and options.model_dir is None:
        default_model()
    elif not words:
        return None
    first = next(iter(models))
    resolve(models[first])
    return first


def named_models(words: Sequence[str]) -> dict[str, str]:
    """The named models by the names under which they are served. Raises ValueError for a duplicate name."""
    models: dict[str, str] = {}
    for word in words:
        name, model = _named(word)
        if name in models:
            raise ValueError(f"two models are called {name!r}: rename one with NAME=MODEL")
        models[name] = model
    return models


def _named(word: str) -> tuple[str, str]:
    """Split ``NAME=MODEL``; without NAME it is the folder's last part, or the GGUF file's name without its suffix."""
    name, equals, model = word.partition("=")
    if equals and not Path(word).is_dir():
        if not name or not model:
            raise ValueError(f"a model must be MODEL or NAME=MODEL, got {word!r}")
        return name, model
    path = user_path(word)
    if path.suffix == ".gguf":
        return _FIRST_PART.sub("", path.stem), word
    return (path.resolve().name, word) if path.is_dir() or word.startswith((".", "/", "~")) else (word, word)


def _models_in(folder: Path) -> dict[str, str]:
    """Folders with a config.json by name, and GGUF files here or one folder down by name without suffix.

    Raises ValueError if there are none, and for a duplicate name.
    """
    folder = user_path(folder)
    if not folder.is_dir():
        raise ValueError(f"--model-dir: no folder {folder}")
    found: dict[str, str] = {}
    for name, path in _named_paths(folder):
        if name in found:
            raise ValueError(f"--model-dir: {found[name]} and {path} are both called {name!r}: rename one of them")
        found[name] = str(path)
    if not found:
        raise ValueError(f"--model-dir: no models in {folder}: it needs folders with config.json, or *.gguf files")
    return found


def _named_paths(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.iterdir()):
        if (path / "config.json").is_file():
            yield path.name, path
        for file in sorted(path.glob("*.gguf")) if path.is_dir() else [path]:
            if file.suffix == ".gguf" and file.is_file() and not _LATER_PART.fullmatch(file.stem):
                yield _FIRST_PART.sub("", file.stem), file


def check_flags(options: argparse.Namespace, models: int) -> None:
    """Raises ValueError for flags that can't be honoured or contradict each other, before anything is downloaded or
    loaded, and ParlayError for an unreadable certificate or cascade."""
    for flag in ("tokenizer", "prefix_cache"):
        if vars(options)[flag] is not None and (models > 1 or options.allow_pull):
            name = flag.replace("_", "-")
            raise ValueError(f"--{name} works with one model: serve only one, without --allow-pull")
    _check_least(options)
    if not 0 <= options.audit_share <= 1:
        raise ValueError(f"--audit-share must be between 0 and 1, got {options.audit_share:g}")
    flags.options_from(LoadOptions, options)
    ranks, ensemble = flags.options_from(RankOptions, options), chosen_ensemble(options)
    together = type(ensemble).__name__.lower()
    for flag, asked in (("rank-listen", ranks.rank_listen), (together, ensemble)):
        if asked is not None and (models > 1 or options.allow_pull):
            raise ValueError(f"--{flag} works with one model: serve only one, without --allow-pull")
    flags.chosen_strategy(options)
    for flag in ("certificates", "cascade"):
        for name in vars(options)[flag]:
            read_text(name, flag.removesuffix("s"))
    if options.memory is not None:
        from parlay.cache import MemoryBounds  # here, as it imports torch

        MemoryBounds.parse(options.memory)


def _check_least(options: argparse.Namespace) -> None:
    """Raises ValueError for a number that is too small."""
    for flag, least in (("max_model_len", 2), ("max_num_seqs", 1), ("max_waiting", 0)):
        value = vars(options)[flag]
        if value is not None and value < least:
            raise ValueError(f"--{flag.replace('_', '-')} must be at least {least}, got {value}")


def loading(options: argparse.Namespace, vocabularies: Vocabularies) -> Callable[[str], Callable[[], AsyncLLM]]:
    """A function that makes a loader from a model's name. Loaders take a vocabulary from ``vocabularies`` if it is
    there."""
    from parlay.aio import AsyncLLM  # here, as they import torch
    from parlay.llm.llm import LLM
    from parlay.serve.hosted import ModelLoader

    def loader(model: str) -> ModelLoader:
        make = partial(_load, model, options, vocabularies)
        load = partial(AsyncLLM.load, make, max_waiting=options.max_waiting, when_idle=LLM.prepare)
        return ModelLoader(model, load)

    return loader


def read_ahead(models: Sequence[str], vocabularies: Vocabularies, ends: str | None = None) -> None:
    """Read the vocabularies of those models that are on this machine.

    Reading one blocks all requests, so it is done before there are any. Errors are reported later, to the request that
    names the model.
    """
    from parlay.llm.vocabulary import Vocabulary
    from parlay.models.facts import stamps
    from parlay.models.fetch.resolving import is_local, resolve
    from parlay.models.loading import load_tokenizer, read_config

    for model in filter(is_local, models):
        with suppress(ParlayError, OSError):
            found = resolve(model)
            if vocabularies.get(stamps(found)) is None:
                config = read_config(found)
                vocabulary = Vocabulary(load_tokenizer(found), config.vocab_size, config.eos_ids, ends)
                vocabulary.prepare()
                vocabularies.put(stamps(found), vocabulary)


def cascades(options: argparse.Namespace, models: Mapping[str, str]) -> dict[str, Link]:
    """Cascades by the large model's name; the models are found by the weights of the calibration.

    Raises ValueError if a cascade's two models are not both served, and for two cascades of one model.
    """
    from parlay.certificates.cascade import read
    from parlay.models.fetch.origin import weights_fingerprint
    from parlay.serve.cascades import Link

    found: dict[str, Link] = {}
    names = {weights_fingerprint(model): name for name, model in models.items()} if options.cascade else {}
    for file in options.cascade:
        cascade = read(Path(file))
        large, small = names.get(cascade.large.weights), names.get(cascade.small.weights)
        if large is None or small is None:
            missing = cascade.large.model if large is None else cascade.small.model
            raise ValueError(
                f"--cascade {file} needs {missing}, which is not served with these weights: add that model"
            )
        if large in found:
            raise ValueError(f"--cascade {file}: {large} has another cascade already: remove one of them")
        found[large] = Link(small, Path(file), options.audit_share)
    return found


def _certificates(model: str, options: argparse.Namespace) -> list[Path]:
    """The certificates of this model; if it is the only model, all of them: it then reports those that are not its
    own."""
    from parlay.certificates.certificate import read
    from parlay.models.fetch.origin import weights_fingerprint

    paths = [Path(name) for name in options.certificates]
    if not paths or len(chosen_models(options)) == 1:
        return paths
    own = weights_fingerprint(model)
    return [path for path in paths if read(path).binding.weights == own]


def _load(model: str, options: argparse.Namespace, vocabularies: Vocabularies) -> LLM:
    """Load a model, with its earlier vocabulary if it is loaded again and its files have not changed."""
    from parlay.llm.llm import LLM
    from parlay.models.facts import stamps
    from parlay.models.fetch.resolving import resolve
    from parlay.strategies.entry import DEFAULT_STRATEGY

    files = stamps(resolve(model))
    llm = LLM(
        model,
        tokenizer=vocabularies.get(files) or options.tokenizer,
        load=flags.options_from(LoadOptions, options),
        ranks=flags.options_from(RankOptions, options),
        strategy=flags.chosen_strategy(options) or DEFAULT_STRATEGY,
        draft_model=options.draft_model,
        certificates=_certificates(model, options),
        audit_share=options.audit_share,
        max_model_len=options.max_model_len,
        memory=options.memory,
        prefix_cache=options.prefix_cache,
        prefix_cache_size=options.prefix_cache_size,
        max_num_seqs=options.max_num_seqs,
        router_memory=options.router_memory,
        ensemble=chosen_ensemble(options),
        generation_config=options.generation_config,
    )
    vocabularies.put(files, llm.vocabulary)
    return llm
