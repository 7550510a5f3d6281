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
from parlay.options import SPLITS, LoadOptions, RankOptions, user_path
from parlay.system.user_cache import written_whole
from parlay.types import FieldError, Runner

DEFAULT_SIZE = "1GiB"
_log = logging.getLogger(__name__)


class PrefixCacheFile:
    """The file of a loaded model: read once when the model is loaded, and written by `save`."""

    def __init__(self, path: Path, runner: NativeRunner, key: Key, most_bytes: int) -> None:
        self.path = path
        self._runner, self._key, self._most_bytes = runner, key, most_bytes

    def read(self) -> None:
        """Load the prefixes of the file, so that requests find them. If it can't be used, a warning is logged."""
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
        """Replace the file by the present cache, unless that is empty.

        Only the user can read it, and a crash leaves the old file. If the path is a link, the file that it names is
        replaced. Raises OSError, and BadPrefixFile if the file is not a prefix cache.
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
    """Save for the last time, if there is a file. An error is logged as a warning."""
    if file is None:
        return
    try:
        saved = file.save()
    except (OSError, BadPrefixFile) as error:
        reason = (
            f"{file.path}: {error.strerror}" if isinstance(error, OSError) else error
        )  # the error itself names a temporary file
        _log.warning("the prefix cache is not written: %s", reason)
    else:
        if saved.bytes:
            _log.info("prefixes of %d tokens were written to %s, %d bytes", saved.tokens, file.path, saved.bytes)


def check_prefix_cache(path: str | Path | None, ranks: RankOptions) -> None:
    """Raises UnsupportedModel, before a model is loaded, if several ranks can't keep prefixes."""
    if path is not None and ranks.ranks > 1:
        raise UnsupportedModel(
            f"prefix_cache {path}: prefixes are kept by one process: remove {ranks.asked}", "prefix_cache", *SPLITS
        )


def open_prefix_cache(
    path: str | Path | None, size: int | str, model: object, runner: Runner, load: LoadOptions
) -> PrefixCacheFile | None:
    """Read a model's prefixes from a file, if one is named; it need not exist yet.

    Raises ValueError for a size or path that can't be used, UnsupportedModel if this model's prefixes can't be kept.
    """
    most_bytes = parse_bytes(size, "prefix_cache_size")
    if path is None:
        return None
    place = user_path(path)
    if (place.exists() and not place.is_file()) or not os.access(place.resolve().parent, os.W_OK):
        raise FieldError("prefix_cache", f"{place}: it must be a file, in a folder that can be written to")
    if not isinstance(model, str) or not isinstance(runner, NativeRunner) or not runner.shares_prefixes:
        raise UnsupportedModel(
            "prefix_cache needs a model that Parlay's decoder runs in one process, and that reads text from left to "
            "right: remove it",
            "prefix_cache",
        )
    if runner.store.forgets:
        raise UnsupportedModel(
            "prefix_cache: layers of this model have windows and forget keys: remove it", "prefix_cache"
        )
    if most_bytes < (least := least_bytes(runner.store)):
        raise FieldError("prefix_cache_size", f"{size}: prefixes of this model take at least {format_bytes(least)}")
    kept = PrefixCacheFile(place, runner, _key(model, runner, load), most_bytes)
    kept.read()
    return kept


def _key(model: str, runner: NativeRunner, load: LoadOptions) -> Key:
    """Everything that the model's keys and values depend on, by name."""
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
