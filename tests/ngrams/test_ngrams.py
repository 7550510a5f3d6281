"""N-gram models: counts on disk, Kneser-Ney by a slow reference, ARPA files in and out, and files that lie."""

from __future__ import annotations

import json
import math
import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from parlay.drafters.stores.datastore_file import Datastore
from parlay.ngrams import (
    BadNgramFile,
    InfinityGram,
    Mixed,
    NgramModel,
    NgramOptions,
    Vocabulary,
    best_weight,
    build,
    build_from_ids,
    convert,
    counting,
    rewards,
)
from parlay.ngrams.arpa import BadArpa
from parlay.ngrams.mixture import chances, law
from parlay.ngrams.model import Scores
from parlay.ngrams.trie import BEGIN, END, FIRST, Scratch
from parlay.options import UsageError
from parlay.text import corpus
from parlay.types import ParlayError

B, E = "<s>", "</s>"
Gram = tuple[object, ...]


class Reference:
    """Interpolated modified Kneser-Ney by its definition, from dictionaries."""

    def __init__(self, texts: Sequence[Sequence[int]], order: int, alike: int, thresholds: Sequence[int]) -> None:
        self.order, self.alike, self.thresholds = order, alike, thresholds
        self.raw: list[Counter[Gram]] = [Counter() for _ in range(order + 1)]
        for text in texts:
            whole = [B, *text, E]
            for n in range(1, order + 1):
                self.raw[n].update(tuple(whole[at : at + n]) for at in range(len(whole) - n + 1))
        self.counts: list[dict[Gram, int]] = [{}, *(self._adjusted(n) for n in range(1, order + 1))]
        self.discounts = [[0.0], *(self._discounts(n) for n in range(1, order + 1))]
        self.after: list[dict[Gram, list[Gram]]] = [defaultdict(list) for _ in range(order + 1)]
        for n in range(1, order + 1):
            for gram in self.counts[n]:
                self.after[n][gram[:-1]].append(gram)

    def _adjusted(self, n: int) -> dict[Gram, int]:
        if n == self.order:
            found = dict(self.raw[n])
        else:
            left = Counter(gram[1:] for gram in self.raw[n + 1])
            found = {gram: self.raw[n][gram] if gram[0] == B else left[gram] for gram in self.raw[n]}
        return {**found, (B,): 0} if n == 1 else found

    def _discounts(self, n: int) -> list[float]:
        of = Counter(self.counts[n].values())
        if of[1] and of[2] and of[3]:
            y = of[1] / (of[1] + 2 * of[2])
            found = [k - (k + 1) * y * of[k + 1] / of[k] for k in (1, 2, 3)]
            if all(0 <= each <= k for k, each in enumerate(found, 1)):
                return [0.0, *found]
        return [0.0, 0.5, 1.0, 1.5]

    def kept(self, gram: Gram) -> bool:
        return len(gram) == 1 or self.raw[len(gram)][gram] > self.thresholds[len(gram) - 1]

    def gamma(self, n: int, context: Gram) -> float:
        grams = self.after[n].get(context, [])
        total = sum(self.counts[n][gram] for gram in grams)
        saved = [
            self.discounts[n][min(self.counts[n][gram], 3)] if self.kept(gram) else self.counts[n][gram]
            for gram in grams
        ]
        return sum(saved) / total if total else 1.0

    def known(self, gram: Gram) -> float:
        n = len(gram)
        if not n:
            return 1 / self.alike
        times = self.counts[n].get(gram, 0)
        total = sum(self.counts[n][each] for each in self.after[n][gram[:-1]])
        return (times - self.discounts[n][min(times, 3)]) / total + self.gamma(n, gram[:-1]) * self.known(gram[1:])

    def probability(self, history: Sequence[object], token: object) -> float:
        context = tuple(history[max(0, len(history) - self.order + 1) :]) if self.order > 1 else ()
        gram = (*context, token)
        if not context or (gram in self.counts[len(gram)] and self.kept(gram)):
            return self.known(gram)
        return self.gamma(len(gram), context) * self.probability(context[1:], token)


@pytest.mark.parametrize("seed", range(12))
def test_probabilities_are_those_of_kneser_ney_by_definition(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruned or not, of one run or merged from many; token by token, and of whole texts."""
    monkeypatch.setattr(counting, "_MOST_ROWS", 1 << (24 if seed % 2 else 6))
    monkeypatch.setattr(counting, "_LEAST_ROWS", 16)
    chance = random.Random(seed)
    size, order = chance.choice([2, 5, 20]), 1 + seed % 6
    texts = [
        [min(size - 1, int(chance.expovariate(0.4))) for _ in range(chance.randrange(1, 30))]
        for _ in range(chance.choice([1, 5, 30]))
    ]
    options = NgramOptions(order=order, prune=",".join("001222"[:order]) if seed % 3 == 0 else "", counts=True)
    build_from_ids(tmp_path / "m", texts, Vocabulary(size), options)
    model, slow = NgramModel.open(tmp_path / "m"), Reference(texts, order, size + 2, options.thresholds())
    for text in [*texts[:6], [chance.randrange(size) for _ in range(20)]]:
        whole = [B, *text, E]
        expected = [math.log10(slow.probability(whole[:at], whole[at])) for at in range(1, len(whole))]
        assert model.scores(text).log10 == pytest.approx(expected, abs=2e-5)
        state, alone = model.state([], begin=True), []
        for token in text:
            alone.append(model.log10(state, token))
            state = model.next(state, token)
        assert alone == pytest.approx(expected[:-1], abs=2e-5)
    state = model.state(texts[0][:3])
    probs, _ = model.distribution(state)
    likeliest = [chance for _, chance in model.followers(state, 3)]
    assert likeliest == pytest.approx(sorted(probs, reverse=True)[:3], rel=1e-4)
    assert model.count(texts[0][:1]) == slow.raw[1][texts[0][0],]


@pytest.mark.parametrize("options", [{"smoothing": "stupid-backoff"}, {"bits": 8}, {}])
def test_followers_are_the_likeliest_of_the_distribution(tmp_path: Path, options: dict[str, object]) -> None:
    """Also where a shorter context's likeliest all follow the longer one, less likely; and where nothing is unseen."""
    chance = random.Random(4)
    texts = [[0, 2 + follower] for follower in range(40)] + [[1, 2], [1, 3]] * 200 + [[1, 50]] * 300
    texts += [[min(50, int(chance.expovariate(0.1))) for _ in range(30)] for _ in range(20)]
    build_from_ids(tmp_path / "m", texts, Vocabulary(60), NgramOptions(**{"order": 3, **options}))  # type: ignore[arg-type]
    model = NgramModel.open(tmp_path / "m")
    for context in ([0], [1], [], [7, 0], [55], *texts[-9:]):
        state = model.state(context)
        probs, _ = model.distribution(state)
        for most in (1, 3, 70):
            found = model.followers(state, most)
            assert [each for _, each in found] == pytest.approx(sorted(probs, reverse=True)[:most], rel=1e-4)
            assert [probs[token] for token, _ in found] == pytest.approx([each for _, each in found], rel=1e-4)
    for none in (0, -1):
        with pytest.raises(ValueError, match=f"^most must be at least 1, got {none}$"):
            model.followers(model.state([0]), none)


def test_the_most_frequent_followers_are_those_that_sorting_finds(tmp_path: Path) -> None:
    """Of equal ones the first; they are remembered, because a drafter asks for the same pairs again and again."""
    chance = random.Random(1)
    texts = [[3, int(chance.paretovariate(0.4)) % 500] for _ in range(2000)]
    build_from_ids(tmp_path / "m", texts, Vocabulary(500), NgramOptions(order=2, counts=True))
    model, after = NgramModel.open(tmp_path / "m"), Counter(last for _, last in texts)
    for most in (1, 32, 499):
        total, found = model.counted([3], most)
        assert (total, list(found.items())) == (
            2000,
            sorted(after.items(), key=lambda pair: (-pair[1], pair[0]))[:most],
        )
    model.counted([3], 32)
    assert model._most_frequent.cache_info().hits == 1


def test_no_part_of_a_merge_is_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though all texts begin with the same tokens; what is counted is what a dictionary counts."""
    monkeypatch.setattr(counting, "_LEAST_ROWS", 256)
    chance, sizes, group = random.Random(2), list[int](), counting._Packing.group
    texts = [[5, 5, 5, *(chance.randrange(6) for _ in range(4))] for _ in range(1500)]
    ids = np.array([each for text in texts for each in (BEGIN, *(FIRST + token for token in text), END)])
    monkeypatch.setattr(
        counting._Packing, "group", lambda self, words: sizes.append(len(words[0])) or group(self, words)
    )
    counted = counting.count(ids, FIRST + 6, 6, Scratch(tmp_path), memory=1)
    assert max(sizes) <= 256
    for n in range(1, 7):
        expected = Counter(tuple(ids[at : at + n].tolist()) for at in range(len(ids) - n + 1))
        expected = Counter({gram: times for gram, times in expected.items() if END not in gram[:-1]})
        rows = counted.trie.rows(n, 0, counted.trie.count(n))
        grams = list(zip(*(row.tolist() for row in rows), strict=True))
        found = {gram: times for gram, times in zip(grams, counted.counts[n - 1].tolist(), strict=True) if times}
        assert found == expected
        assert grams == sorted(grams)


LINES = "the cat sat\nthe dog sat on the cat\na dog ran\n\nthe cat ran to the dog\n"


def of_words(path: Path, text: str = LINES, **options: object) -> NgramModel:
    build(path, iter([iter([text])]), NgramOptions(**{"order": 3, **options}))  # type: ignore[arg-type]
    return NgramModel.open(path)


def test_an_arpa_file_holds_the_same_model(tmp_path: Path) -> None:
    """KenLM, where it is installed, reads it and gives the same scores."""
    model = of_words(tmp_path / "m")
    build(tmp_path / "m.arpa", iter([iter([LINES])]), NgramOptions(order=3))
    convert(tmp_path / "m.arpa", tmp_path / "again", 32)
    texts = ["the cat ran on", "zebra the dog", "a"]
    assert [NgramModel.open(tmp_path / "again").score(text) for text in texts] == pytest.approx(
        [model.score(text) for text in texts], abs=1e-5
    )
    assert model.scores("zebra").unknown.tolist() == [True, False]
    kenlm = pytest.importorskip("kenlm")
    theirs = kenlm.Model(str(tmp_path / "m.arpa"))
    assert [theirs.score(text) for text in texts] == pytest.approx([model.score(text) for text in texts], abs=1e-4)


def test_eight_bits_and_stupid_backoff(tmp_path: Path) -> None:
    text = "\n".join(" ".join(random.Random(at).choices("abcdefgh", k=9)) for at in range(300))
    exact, small = of_words(tmp_path / "m", text), of_words(tmp_path / "q", text, bits=8)
    assert small.perplexity(text) == pytest.approx(exact.perplexity(text), rel=0.01)
    assert (tmp_path / "q").stat().st_size < (tmp_path / "m").stat().st_size
    stupid = of_words(tmp_path / "s", "a b\na b\na c", smoothing="stupid-backoff")
    place = {word: at for at, word in enumerate(stupid.words)}
    assert stupid.log10(stupid.state("a"), place["b"]) == pytest.approx(math.log10(2 / 3), abs=1e-5)
    assert stupid.log10(stupid.state("b"), place["a"]) == pytest.approx(math.log10(0.4 * 3 / 9), abs=1e-5)
    assert stupid.counted("a", 1) == (3, {place["b"]: 2})
    assert sum(10 ** stupid.log10(stupid.state("a"), word) for word in range(3)) > 1
    assert law(stupid, stupid.state("a")).sum() == pytest.approx(1)
    assert Scores(np.array([-400.0]), np.array([1]), np.array([False])).perplexity == math.inf


ARPA = "\\data\\\nngram 1=4\nngram 2=2\n\n\\1-grams:\n-1\t<unk>\n0\t<s>\t-.3\n-.5\t</s>\n-.5\ta\t-.2\n\n\\2-grams:\n"
ARPA += "-.1\t<s> a\n-.1\ta </s>\n\n\\end\\\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("ngram 2=2", "ngram 2=3", "line 14: 2 2-grams are there, and the head says 3"),
        ("-.5\ta\t-.2", "-.5\ta", "line 9: longer n-grams begin so, and it has no back-off weight"),
        ("-.1\ta </s>", "nan\ta </s>", "line 13: 'nan' is not a log-probability"),
        ("-.1\ta </s>", ".1\ta </s>", "line 13: a log-probability of .1 is above 0"),
        ("\n\\end\\\n", "", "cut short"),
        ("a </s>", "b </s>", "'b' is not among the 1-grams"),
        ("a </s>", "<s> a", "second time"),
        ("-.1\ta </s>", "-.1\ta", "2 fields where a 2-gram has"),
        ("ngram 1=4", "ngram 1=x", "line 2"),
        ("\ta\t", "\t\udcff\t", "line 9: not UTF-8"),
        ("ngram 2=2", "ngram 2=1", "line 13: more 2-grams than the 1 that the head says"),
        ("ngram 2=2", "ngram 2=999999999999", "MiB and may take 1,024: allow more by --memory"),
        ("ngram 2=2", "ngram 2=2" + "".join(f"\nngram {n}=1" for n in range(3, 12)), "n-grams of 11 lengths"),
        ("\ta\t-.2", "\ta\t1e30", "line 9: a back-off weight of 1e30 is above 30"),
        ("\\data\\", "x\n" * 2000, "no line \\data\\ until here"),
        ("\n\\2-grams", "\n" * 3000 + "\\2-grams", "1,000 empty lines where \\2-grams: is due"),
        ("\ta\t", f"\t{'a' * 200_000}\t", "line 9: a line of 131,072 bytes or more"),
        ("\ta\t", f"\t{'a' * 5000}\t", "line 9: a word of 5,000 letters"),
    ],
)
def test_arpa_files_that_lie_are_refused_in_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "m.arpa"
    path.write_bytes(ARPA.replace(old, new, 1).encode(errors="surrogateescape"))
    with pytest.raises(BadArpa) as error:
        convert(path, tmp_path / "m", 32)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    path.write_text(ARPA)
    convert(path, tmp_path / "m", 32)


def test_texts_of_endless_words_or_lines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bounded memory; files of a folder that hold no text are left out by name."""
    with pytest.raises(UsageError, match="a word of more than 4,096 letters"):
        of_words(tmp_path / "m", "a " + "b" * 5000)
    with pytest.raises(UsageError, match="100,003 different words need more than --memory"):
        of_words(tmp_path / "m", " ".join(map(str, range(100_000))), memory=16)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(corpus, "_BATCH", 100)
    monkeypatch.setattr(corpus, "_LONGEST_LINE", 1000)
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n{"text": "' + "c " * 2000 + '"}\n')
    (tmp_path / "b.txt").write_bytes(b"\xff" * 300)
    named, found = corpus.sources([str(tmp_path / "a.jsonl")]), corpus.sources([str(tmp_path)])
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: longer than 1,000"):
        [piece for document in corpus.streams(named[0]) for piece in document]
    skipped: list[corpus.CorpusSource] = []
    assert [piece for document in corpus.streams(found[1], skipped) for piece in document] == []
    assert skipped == found[1:]


def test_an_arpa_file_is_no_model_until_it_is_built(tmp_path: Path) -> None:
    with pytest.raises(BadNgramFile, match=r"make a model with `parlay ngram build .*m.arpa -o FILE`"):
        of_words(tmp_path / "m.arpa")


def test_damaged_files_and_texts_without_words_are_refused(tmp_path: Path) -> None:
    of_words(tmp_path / "m")
    content = (tmp_path / "m").read_bytes()
    for bad in (b"", content[:50], content[:-4], content[:-1] + b"\7", b"x" * 100):
        (tmp_path / "bad").write_bytes(bad)
        with pytest.raises(BadNgramFile):
            NgramModel.open(tmp_path / "bad")
    with pytest.raises(ParlayError, match="no text"):
        of_words(tmp_path / "e", " \n")
    lie(content, tmp_path / "bad")
    for prune in ("1", "0,2,1", "x", "0,0,0,1"):
        with pytest.raises(UsageError, match="prune"):
            NgramOptions(order=3, prune=prune)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "m"]


def lie(content: bytes, path: Path) -> None:
    """Say other things in the header, under a checksum that is right."""
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].decode()
    entries = json.loads(header)
    begin, end = entries["words"]["data_offsets"]
    texts = {
        "of other numbers": header.replace("U16", "F16"),
        "with a place outside": header.replace(f"[{begin}, {end}]", f"[{begin}, {end + 99}]"),
        "of another size": header.replace('\\"order\\": 3', '\\"order\\": 4'),
        "of many dimensions": header.replace('"shape": [', f'"shape": [{"1, " * 70}', 1),
        "with floats as places": header.replace('"U32"', '"F32"'),
    }
    for name, text in texts.items():
        assert text != header, name
        length = max(size, -(-len(text) // 8) * 8)
        path.write_bytes(length.to_bytes(8, "little") + text.encode().ljust(length) + content[8 + size :])
        with pytest.raises(BadNgramFile):
            NgramModel.open(path)
    refuse_signed_tokens(content, path)
    data = bytearray(content)
    data[8 + size + begin] = 0xFF  # no UTF-8
    checksum = f"{zlib.crc32(data[8 + size :]):08x}".encode()
    path.write_bytes(bytes(data).replace(entries["__metadata__"]["checksum"].encode(), checksum, 1))
    with pytest.raises(BadNgramFile, match="not UTF-8"):
        NgramModel.open(path)


def refuse_signed_tokens(content: bytes, path: Path) -> None:
    """A token below 0 would be another one's place."""
    tensors = safetensors.numpy.load(content)
    tensors["tokens.2"] = tensors["tokens.2"].astype(np.int64) * -(10**9)
    size = int.from_bytes(content[:8], "little")
    about = json.loads(content[8 : 8 + size])["__metadata__"]
    for _ in range(2):
        data = safetensors.numpy.save(tensors, about)
        size = int.from_bytes(data[:8], "little")
        about["checksum"] = f"{zlib.crc32(data[8 + size :]):08x}"
    path.write_bytes(data)
    with pytest.raises(BadNgramFile, match="do not fit together"):
        NgramModel.open(path)


def test_the_infinity_gram_counts_what_followed_the_longest_end() -> None:
    corpus = InfinityGram(Datastore.build([np.array([1, 2, 3, 4]), np.array([9, 2, 3, 5, 2, 3, 4])], 10))
    found = corpus.support([7, 2, 3], 4)
    assert (found.length, found.total, found.times) == (2, 3, 2)
    assert corpus.support([1, 2, 3], 5).times == 0
    assert corpus.support([8], 2).times == 3
    assert corpus.followers([7, 2, 3]) == (2, {4: 2, 5: 1})


def test_a_mixture_is_the_weighted_mean_and_its_weight_the_likeliest(tmp_path: Path) -> None:
    build_from_ids(tmp_path / "m", [[0, 1, 2, 0, 1]], Vocabulary(3), NgramOptions(order=2))
    model = NgramModel.open(tmp_path / "m")
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4])
    mixed = Mixed(model, 0.25)([0], logits).softmax(-1)
    probs, _ = model.distribution(model.state([0]))
    expected = 0.75 * logits.softmax(-1) + 0.25 * torch.tensor([*(probs / probs.sum()), 0.0])
    assert torch.allclose(mixed, expected.float(), atol=1e-6)
    assert law(model, model.state([0])) == pytest.approx(probs / probs.sum())
    kept = Mixed(model, 0.5, end_ids=(2, 7))([0], logits).softmax(-1)
    assert kept[2] == pytest.approx(float(logits.softmax(-1)[2]), abs=1e-6)
    assert float(kept.sum()) == pytest.approx(1, abs=1e-6)
    for tokens in (2, 7):
        with pytest.raises(ValueError, match=f"the n-gram model has 3 tokens and the target {tokens}"):
            Mixed(model, 0.25)([0], torch.zeros(tokens))
    of_the_text = [law(model, model.state([0]))[1], law(model, model.state([1]))[2], 0.0]
    assert chances(model, [0, 1, 2, 5]) == pytest.approx(of_the_text)
    ours, theirs = np.array([0.5, 0.1, 0.2]), np.array([0.2, 0.3, 0.2])
    grid = np.linspace(0, 1, 101)
    best = grid[np.argmax([np.log(w * ours + (1 - w) * theirs).sum() for w in grid])]
    assert best_weight(ours, theirs) == pytest.approx(best, abs=0.02)


def test_a_text_is_rewarded_for_repeating_itself() -> None:
    found = rewards([1, 2, 3, 9, 2, 4, 9, 1, 2, 3], 10, 3)
    assert [each.known for each in found] == [0.4, 0.1, 0.0]
    assert found[1].right == 1.0
    assert found[1].guessed > found[0].guessed
