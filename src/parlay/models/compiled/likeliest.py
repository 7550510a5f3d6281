"""The likeliest token of each row, which the library finds instead of writing logits; see core/likeliest.h."""

from __future__ import annotations

from array import array

from parlay.compiled import structs

_FIRST_UNUSABLE = 0xFF800000
"""+infinity in the order of the keys' upper halves. NaN lies above it."""
_BYTES, _TOKEN = 8, 0xFFFFFFFF  # of a key; its lower half, which is the token's complement


def make_keys(batch: structs.Batch, *, wanted: bool) -> array[int]:
    """Make an array of keys, one for each row that the batch wants, for the library to fill instead of logits.

    It must live until the batch has run. If keys are not ``wanted``, it is empty, and the library writes logits.
    """
    keys = array("Q", bytes(_BYTES * batch.wanted if wanted else 0))
    if wanted:
        batch.likeliest, batch.logits = keys.buffer_info()[0], None
    return keys


def tokens_of(keys: array[int]) -> tuple[int, ...] | None:
    """The tokens that the keys stand for; None if some row has NaN, +infinity, or nothing but -infinity."""
    if not all(keys) or max(keys, default=0) >> 32 >= _FIRST_UNUSABLE:
        return None
    return tuple([~key & _TOKEN for key in keys])
