"""Draft models whose tokenizer is not the target's: by text, and over the tokens that both have."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from parlay.drafters.other_vocabularies.vocabularies import (
    Codec,
    RetokenizedText,
    codecs,
    continuation,
    intersection,
    scores,
)
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.sampling.sampler import sample
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.testing.conformance import Stage, subject_of
from parlay.testing.conformance.compare import same_tokens
from parlay.testing.conformance.stage import StageRequest, decode
from parlay.testing.toy_tokenizers import byte_level, letters, sentence_pieces, toy_tokenizer
from parlay.testing.toys import ToyRunner, text_hash
from parlay.types import NO_DRAFT, Drafter, Request, SamplingParams
from tests.drafters.sight import GREEDY, MakeRunner, Sight, propose

BOTH = ["universal-draft", "intersection-draft"]
SAMPLED = replace(GREEDY, params=SamplingParams(temperature=0.8, top_k=8))
ALPHABET = "abcdefghijkl"
LINES = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Draft models write ahead; the target verifies what they wrote, token by token.",
    "naïve café, 日本語のテキスト, emoji 🙂🙃 and  several   spaces\n\tand tabs",
)
OURS = byte_level(LINES, 330)
THEIRS = byte_level([*LINES[:1], "a quick café 🙂 and lazy models verify the text"], 300, specials=["<end>"])
PIECES = sentence_pieces(["▁", "▁the", "▁quick", "the", "▁dog", "qu", "ick", "br", "own", "▁🙂", "é", ",", "o"])


def resources(runner: Any, ours: PreTrainedTokenizerFast, theirs: PreTrainedTokenizerFast) -> Resources:
    return Resources(
        vocab_size=len(ours),
        open_runner=lambda name: runner,
        default_draft="toy",
        tokenizer=ours,
        open_tokenizer=lambda name: theirs,
    )


def drafter_on(name: str, runner: Any, ours: PreTrainedTokenizerFast, theirs: PreTrainedTokenizerFast) -> Drafter:
    drafter = build(parse(f"{name}:min_p=0"), resources(runner, ours, theirs))
    assert drafter is not None
    return drafter


@pytest.mark.parametrize(
    ("name", "request_"),
    [("universal-draft", GREEDY), ("intersection-draft", GREEDY), ("intersection-draft", SAMPLED)],
)
def test_with_the_targets_own_tokenizer_it_is_the_draft_models_chain(
    toy_runner: MakeRunner, name: str, request_: Request
) -> None:
    """Tokens, probabilities, and what the runner is fed, through partial acceptance and skipped steps."""
    same = letters(ALPHABET)
    runners = toy_runner(), toy_runner()
    ours, plain = drafter_on(name, runners[0], same, same), drafter_on("draft-model", runners[1], same, same)
    view = Sight(0, [1, 2, 3], request_)
    for kept, more in ((2, [5]), (5, [7]), (0, [9, 9, 9]), (3, []), (5, [1] * 40)):
        draft, expected = propose(ours, view, 5), propose(plain, view, 5)
        assert draft.tree == expected.tree
        assert draft.scores == pytest.approx(expected.scores)
        view.tokens += [*draft.tree.tokens[:kept], *more]
    assert [segments[0].pending for segments in runners[0].calls] == [call[0].pending for call in runners[1].calls]


class HashedLogits:
    """Logits that follow from the last two ids; as large a vocabulary as one likes."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, ids: Sequence[int]) -> Tensor:
        noise = torch.Generator().manual_seed(text_hash(ids[-2:]))
        return 2 * torch.randn(self.vocab_size, generator=noise)


def stage(ours: PreTrainedTokenizerFast, theirs: PreTrainedTokenizerFast, padding: int) -> Stage:
    size = len(ours) + padding
    made = replace(
        resources(ToyRunner(HashedLogits(len(theirs) + padding), len(theirs) + padding), ours, theirs), vocab_size=size
    )
    return Stage("tokenizers", lambda capacity: ToyRunner(HashedLogits(size), size), HashedLogits(size), size, made)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("theirs", [THEIRS, PIECES, OURS], ids=["byte level", "pieces", "the same"])
def test_any_text_stays_lossless(name: str, theirs: PreTrainedTokenizerFast) -> None:
    """Random unicode, emoji and spaces, greedy and sampled; the toy writes ids that no text would be cut into.

    Both models have more logits than their tokenizers have ids, as padded checkpoints do.
    """
    where = stage(OURS, theirs, padding=5)
    chance = random.Random(3)
    alphabet = "ab é  🙂🙃日本\n\t\u0301\u200d�<end>"
    for seed, params in enumerate((SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, top_p=0.9))):
        text = "".join(chance.choice(alphabet) for _ in range(40))
        prompt = tuple(OURS.encode(text, add_special_tokens=False))
        ask = StageRequest(prompt, replace(params, max_tokens=40), seed)
        [sample] = decode(where.open_runner(8192), [(ask, subject_of(f"{name}:min_p=0").strategy(where, 5))])
        assert same_tokens(where, ask, where.expected(ask).output, sample) is None
        assert sample.metrics.drafter_faults == 0
        assert sample.metrics.draft_tokens >= 10


class Reciter:
    """Knows one text by heart and goes on with it, in whatever ids it is asked."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
        self.codec, self.text = Codec(tokenizer), text

    def __call__(self, ids: Sequence[int]) -> Tensor:
        logits = torch.zeros(self.codec.size)
        whole = len(ids)
        while self.codec.ends_inside_a_character(ids[:whole]):
            whole -= 1
        said = self.codec.decode(ids[:whole])
        if self.text.startswith(said) and len(said) < len(self.text):
            logits[self.codec.encode_piece(self.text[len(said) :])[len(ids) - whole]] = 50.0
        return logits


@pytest.mark.parametrize("theirs", [THEIRS, toy_tokenizer(8)], ids=["byte level", "without these letters"])
def test_a_draft_model_that_knows_the_text_is_right_wherever_it_drafts(theirs: PreTrainedTokenizerFast) -> None:
    """After every prefix that ends with a character, what it says is what comes, and in the target's own tokens but for
    a word that the draft ends in. A tokenizer that can't write the text proposes nothing."""
    text = LINES[0] + " " + LINES[2]
    drafter = drafter_on("universal-draft", ToyRunner(Reciter(theirs, text), len(theirs)), OURS, theirs)
    ids = Codec(OURS).encode(text).ids
    drafts, right = 0, 0
    view = Sight(0, ids[:1])
    for end in range(1, len(ids) - 8):
        proposed = list(propose(drafter, view, 6).tree.tokens)
        said = Codec(OURS).decode([*ids[:end], *proposed]).rstrip("�")
        assert not proposed or text.startswith(said)
        drafts += bool(proposed)
        right += next((place for place, token in enumerate(proposed) if token != ids[end + place]), len(proposed))
        view.tokens.append(ids[end])
    assert (drafts > 0.7 * len(ids) and right > 4.5 * drafts) if theirs is THEIRS else drafts == 0


def test_text_that_ends_inside_a_character_is_not_drafted_from(toy_runner: MakeRunner) -> None:
    ids = Codec(byte_level(LINES[:2], 260)).encode("a🙂b").ids
    ours = byte_level(LINES[:2], 260)
    drafter = drafter_on("universal-draft", toy_runner(vocab=300), ours, THEIRS)
    assert [bool(len(propose(drafter, Sight(0, ids[:end]), 4))) for end in range(1, 7)] == [
        True,
        *[False] * 3,
        True,
        True,
    ]


@pytest.mark.parametrize("theirs", [THEIRS, PIECES], ids=["byte level", "pieces"])
def test_a_retokenized_sequence_is_the_text_however_it_grew(theirs: PreTrainedTokenizerFast) -> None:
    """Whatever steps the tokens came in, the ids say the same text, and are those of the whole text encoded at once."""
    text = " ".join(LINES) * 2
    ids = Codec(OURS).encode(text).ids
    chance = random.Random(0)
    for _ in range(20):
        retokenized = RetokenizedText(Codec(OURS), Codec(theirs), 10)
        tokens: list[int] = []
        while len(tokens) < len(ids):
            tokens += ids[len(tokens) : len(tokens) + chance.randint(1, 7)]
            if retokenized.follow(tokens):
                assert Codec(theirs).decode(retokenized.ids) == Codec(OURS).decode(tokens).lstrip(" ")
        assert retokenized.ids == Codec(theirs).encode(text).ids


def test_ids_that_did_not_change_stay_in_the_draft_models_cache(toy_runner: MakeRunner) -> None:
    """Each step feeds what is new and at most a few ids before the seam, however long the text is."""
    runner = toy_runner(vocab=300)
    drafter = drafter_on("universal-draft", runner, OURS, THEIRS)
    ids = Codec(OURS).encode(LINES[0] * 8).ids
    view = Sight(0, ids[:200])
    propose(drafter, view, 1)
    for end in range(200, len(ids)):
        runner.calls.clear()
        view.tokens.append(ids[end])
        propose(drafter, view, 1)
        assert sum(len(segments[0].pending) for segments in runner.calls) <= 10


@pytest.mark.parametrize("name", BOTH)
def test_after_a_rewind_the_draft_is_that_of_a_fresh_drafter(toy_runner: MakeRunner, name: str) -> None:
    drafter = drafter_on(name, toy_runner(vocab=300), OURS, THEIRS)
    ids = Codec(OURS).encode(" ".join(LINES[:2])).ids
    for tokens in (ids[:30], ids[:40], ids[:20], ids[5:60], ids[:1]):
        view = Sight(0, list(tokens))
        fresh = drafter_on(name, toy_runner(vocab=300), OURS, THEIRS)
        assert propose(drafter, view, 4) == propose(fresh, view, 4)
    drafter.release(0)
    drafter.release(0)


def test_a_continuation_is_cut_like_the_whole_unless_a_committed_token_stands_in_its_way() -> None:
    """`quick` is one token of ours: after ` qu` only `ick` is open, in whatever tokens it takes alone."""
    codec = Codec(OURS)
    whole = codec.encode("the quick brown fox").ids
    assert continuation(codec, whole[:2], codec.decode(whole[2:]), 10).ids == whole[2:]
    split = [*codec.encode("the").ids, *codec.encode(" ").ids, *codec.encode("q").ids]
    ids, ends = continuation(codec, split, "uick brown", 10)
    assert codec.decode([*split, *ids]) == "the quick brown"
    assert ends[-1] == len("uick brown")
    assert continuation(codec, split, "", 10).ids == []


def test_a_score_is_the_chance_of_what_begins_in_the_token() -> None:
    """Ours end at 2, 3 and 9; theirs begin at 0, 1, 5: the second of ours brings nothing new."""
    assert scores([2, 3, 9], [(0, 0.5), (1, 0.5), (5, 0.9)]) == [0.25, 1.0, 0.9]


def test_the_intersection_goes_by_bytes_not_by_how_they_are_written() -> None:
    common = intersection(OURS, PIECES)
    named = {PIECES.convert_ids_to_tokens(theirs): Codec(OURS).decode([ours]) for theirs, ours in common.items()}
    assert named["▁the"] == " the"
    assert named["▁"] == " "
    assert named["é"] == "é"
    assert named[","] == ","
    assert "<unk>" not in named
    assert len(set(common.values())) == len(common)
    assert "<0x2C>" not in named, "the piece comes before the single byte"
    assert intersection(THEIRS, THEIRS) == {number: number for number in range(len(THEIRS))}


def test_the_drafters_distribution_is_one_on_the_intersection_and_zero_outside(toy_runner: MakeRunner) -> None:
    drafter = drafter_on("intersection-draft", toy_runner(vocab=len(PIECES) + 7), OURS, PIECES)
    logits_RV = torch.randn(3, len(PIECES) + 7)
    distribution_RV = drafter.map(logits_RV).softmax(-1)  # type: ignore[attr-defined]
    assert distribution_RV.shape == (3, len(OURS))
    inside = sorted(intersection(OURS, PIECES).values())
    assert torch.allclose(distribution_RV[:, inside].sum(-1), torch.ones(3))
    assert distribution_RV.sum(-1) == pytest.approx(distribution_RV[:, inside].sum(-1))
    theirs, ours = next(iter(intersection(OURS, PIECES).items()))
    assert drafter.map(logits_RV)[1, ours] == logits_RV[1, theirs]  # type: ignore[attr-defined]


def test_what_is_drafted_is_what_the_requests_sampler_draws_from_the_mapped_logits(toy_runner: MakeRunner) -> None:
    """The coupling: same noise, at the target's ids and positions, on the path so far."""
    ours, theirs = letters("abcdefghijkl"), letters("xylkjihgfed")
    runner = toy_runner(vocab=11)
    drafter = drafter_on("intersection-draft", runner, ours, theirs)
    view = Sight(0, [3, 4, 5], SAMPLED)  # d e f
    drafted = list(propose(drafter, view, 5).tree.tokens)
    told, written = [10, 9, 8], []
    for _ in range(5):
        row = torch.full((12,), -torch.inf)
        for place, letter in enumerate("xylkjihgfed"):
            if letter in "abcdefghijkl":
                row["abcdefghijkl".index(letter)] = runner.logits(told)[place]
        written += sample(row[None], [view], [written])
        told.append("xylkjihgfed".index("abcdefghijkl"[written[-1]]))
    assert drafted == written


def test_output_tokens_that_both_have_are_taken_over_and_others_told_by_their_text(toy_runner: MakeRunner) -> None:
    """Theirs has no `ab` and no `c`: `ab` becomes a and b, `c` is lost, `d` is theirs under another id."""
    runner = toy_runner(vocab=3)
    merged = toy_tokenizer(4)  # two letters and two pairs
    alphabet = sorted(token for token in merged.get_vocab() if len(token) == 1)
    theirs = letters("".join(reversed(alphabet)))
    drafter = drafter_on("intersection-draft", runner, merged, theirs)
    tokens = [merged.get_vocab()[alphabet[0]], *range(4)]
    propose(drafter, Sight(0, tokens), 1)
    told = [merged.decode([token]).replace(" ", "") for token in tokens]
    assert runner.calls[-1][0].pending == tuple(theirs.get_vocab()[letter] for letter in "".join(told))


def test_nothing_in_common_is_an_error_that_says_what_else_works(toy_runner: MakeRunner) -> None:
    with pytest.raises(UsageError, match="no token in common"):
        drafter_on("intersection-draft", toy_runner(), letters("abc"), letters("xyz"))


@pytest.mark.parametrize("name", BOTH)
def test_text_that_the_draft_model_cannot_read_is_decoded_plainly(toy_runner: MakeRunner, name: str) -> None:
    drafter = drafter_on(name, toy_runner(), letters("abc"), letters("cxyz"))
    assert propose(drafter, Sight(0, [0, 1, 0]), 4) == NO_DRAFT
    assert propose(drafter, Sight(1, [2, 2]), 0) == NO_DRAFT


@pytest.mark.parametrize("name", BOTH)
def test_without_tokenizers_or_a_model_the_error_says_so(toy_runner: MakeRunner, name: str) -> None:
    whole = resources(toy_runner(), letters("abc"), letters("abc"))
    with pytest.raises(UsageError, match="the target has no tokenizer"):
        build(parse(name), replace(whole, tokenizer=None))
    with pytest.raises(UsageError, match="model=NAME_OR_PATH"):
        build(parse(name), replace(whole, default_draft=None))


def test_special_tokens_that_the_draft_model_lacks_have_no_text_for_it() -> None:
    ours = byte_level(LINES, 300, specials=["<end>", "<turn>"])
    target, drafter = codecs(ours, THEIRS)
    ids = ours.encode("a<turn>b<end>", add_special_tokens=False)
    assert target.decode(ids) == "ab<end>"
    assert THEIRS.convert_tokens_to_ids("<end>") in drafter.encode("ab<end>").ids


def test_the_two_ways_differ_where_the_draft_models_best_token_is_not_the_targets() -> None:
    """By text any token can be said; over the intersection only what both vocabularies have."""
    text = "the quick brown dog"
    ours = letters("abcdefghijklmnopqrstuvwxyz ")
    theirs = byte_level([text] * 9, 280)
    runner = ToyRunner(Reciter(theirs, text), len(theirs))
    view = Sight(0, Codec(ours).encode("the ").ids, prompt_length=4)
    by_text = propose(drafter_on("universal-draft", runner, ours, theirs), view, 5)
    by_intersection = propose(drafter_on("intersection-draft", runner, ours, theirs), view, 5)
    assert Codec(ours).decode(by_text.tree.tokens).replace(" ", "") == "quick"
    assert by_text.tree != by_intersection.tree
