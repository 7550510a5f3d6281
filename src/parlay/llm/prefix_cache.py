"""The file that keeps a model's cached prefixes from one process to the next."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from parlay.cache import parse_bytes
from parlay.cache.budget import format_bytes
from parlay.cache.prefix_file import (
    BadPrefixFile,
    Key,
    SavedPrefixes,
    check_own,
    least_bytes,
    read_prefixes,
    write_prefixes,
)
from parlay.models.config import UnsupportedModel
from parlay.models.fetch.hub import hash_of
from parlay.models.fetch.origin import build_fingerprint, weights_fingerprint
from parlay.models.fetch.resolving import resolve
from parlay.models.lora_layout import CONFIG, WEIGHTS
from parlay.models.native import NativeRunner
from parlay.options import LoadOptions, RankOptions, user_path
from parlay.system.user_cache import written_whole
from parlay.types import Runner

DEFAULT_SIZE = "1GiB"
_log = logging.getLogger(__name__)


class PrefixCacheFile:
    """Read once, when the model is loaded, and written on demand."""

    def __init__(self, path: Path, runner: NativeRunner, key: Key, most_bytes: int) -> None:
        self.path = path
        self._runner, self._key, self._most_bytes = runner, key, most_bytes

    def read(self) -> None:
        """Let requests find what the file holds. One that can't be used costs a line in the log."""
        try:
            with self.path.open("rb") as file:
                tokens = read_prefixes(self._runner.store, file, self._key)
            _log.info("prefixes of %d tokens are in %s", tokens, self.path)
        except FileNotFoundError:
            pass
        except (BadPrefixFile, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            _log.warning("the prefix cache %s is not used: %s", self.path, reason)

    def save(self) -> SavedPrefixes:
        """Replace the file by what is cached now, unless nothing is.

        Nobody else may read it, and a crash leaves the old one. A link stays, and what it names is replaced. Raises
        OSError, and BadPrefixFile for a file that is something else.
        """
        check_own(self.path)
        if not any(self._runner.store.index.pages()):
            return SavedPrefixes(0, 0)
        with written_whole(self.path.resolve(), mode=0o600) as part, part.open("wb") as file:
            saved = write_prefixes(self._runner.store, file, self._key, self._most_bytes)
            file.flush()
            os.fsync(file.fileno())
        return saved


def close_prefix_cache(file: PrefixCacheFile | None) -> None:
    """Save for the last time, if there is a file. What goes wrong costs a line in the log."""
    if file is None:
        return
    try:
        saved = file.save()
    except (OSError, BadPrefixFile) as error:
        reason = f"{file.path}: {error.strerror}" if isinstance(error, OSError) else error  # the part's name is random
        _log.warning("the prefix cache is not written: %s", reason)
    else:
        if saved.bytes:
            _log.info("prefixes of %d tokens were written to %s, %d bytes", saved.tokens, file.path, saved.bytes)


def check_prefix_cache(path: str | Path | None, ranks: RankOptions) -> None:
    """Raises UnsupportedModel, before a model is loaded, where none has prefixes that can be kept."""
    if path is not None and ranks.ranks > 1:
        raise UnsupportedModel(f"prefix_cache {path}: prefixes are kept by one process: leave out {ranks.asked}")


def open_prefix_cache(
    path: str | Path | None, size: int | str, model: object, runner: Runner, load: LoadOptions
) -> PrefixCacheFile | None:
    """Read the prefixes of a model from a file, if one is named; it need not exist.

    Raises ValueError for a size or a path that can't be, UnsupportedModel where prefixes can't be kept.
    """
    most_bytes = parse_bytes(size, "prefix_cache_size")
    if path is None:
        return None
    place = user_path(path)
    if (place.exists() and not place.is_file()) or not os.access(place.resolve().parent, os.W_OK):
        raise ValueError(f"prefix_cache {place}: it must be a file, in a folder that can be written to")
    if not isinstance(model, str) or not isinstance(runner, NativeRunner) or not runner.shares_prefixes:
        raise UnsupportedModel(
            "prefix_cache needs a model that Parlay's decoder runs in one process, and that reads text from left to "
            "right: leave it out"
        )
    if runner.store.forgets:
        raise UnsupportedModel("prefix_cache: layers of this model have windows and forget keys: leave it out")
    if most_bytes < (least := least_bytes(runner.store)):
        raise ValueError(f"prefix_cache_size {size}: prefixes of this model take at least {format_bytes(least)}")
    kept = PrefixCacheFile(place, runner, _key(model, runner, load), most_bytes)
    kept.read()
    return kept


def _key(model: str, runner: NativeRunner, load: LoadOptions) -> Key:
    """Name all that the model's keys and values depend on."""
    found, digest = resolve(model), hashlib.sha256(weights_fingerprint(model).encode())
    if found.is_dir():
        digest.update((found / "config.json").read_bytes())
    folder = user_path(load.lora) if load.lora is not None else None
    return {
        "model": digest.hexdigest(),
        "adapter": "".join(hash_of(folder / name) for name in (CONFIG, WEIGHTS)) if folder is not None else "",
        "type of weights or cache": f"{runner.spec.dtype} {load.quantize} {load.kv_cache_dtype}",
        "longest text": str(runner.spec.max_context),
        "decoder or processor": runner.spec.kernels,
        "version of Parlay": build_fingerprint(),
    }
