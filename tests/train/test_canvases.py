"""Recipes of models with canvases: masks and losses against enumeration, what each learns, and folders that open."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parlay import LLM, SamplingParams
from parlay.models.families.reading import read_config
from parlay.options import UsageError
from parlay.testing.checkpoints import save_random
from parlay.testing.toy_tokenizers import toy_tokenizer
from parlay.train.canvases import cdlm, cllm, masks
from parlay.train.canvases.decoders import Decoder, load_decoder, new_decoder, save_decoder
from parlay.train.canvases.diffusion import Bd3, Mdlm
from parlay.train.canvases.options import (
    Bd3TrainOptions,
    CanvasTrainOptions,
    CdlmTrainOptions,
    CllmTrainOptions,
    MdlmTrainOptions,
    SetBlockTrainOptions,
)
from parlay.train.canvases.recipe import CanvasRecipe, divergence, masked_loss, next_token_loss
from parlay.train.canvases.rows import HELD_OUT, Words, anchors, batch_of, common_ids, parted, rows_of
from parlay.train.canvases.run import METHODS, Begun, choose_mask, fit, new_tokenizer, train, words_of
from parlay.train.canvases.set_block import SetBlockRecipe, guessing_rows
from parlay.train.canvases.set_block_adapter import MaskAdapterRecipe
from parlay.train.data.prompts import ChatFrame, PromptAndAnswer
from parlay.train.data.user_texts import TrainingText, UserTexts
from parlay.train.lm_model import Shape
from parlay.train.optimizers import adam
from parlay.types import CanvasSpec, ParlayError
from tests.models import gguf_files

VOCAB, MASK, END, AS = 32, 31, 0, 30
TINY = Shape(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=48)
DATA = Path("nothing-is-read")


def decoder(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(new_decoder(TINY.config(VOCAB, END, END)), MASK)


def tokens() -> Any:
    """A tokenizer with an end of text."""
    tokenizer = toy_tokenizer(VOCAB)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(END)
    return tokenizer


COMMON: Mapping[str, Any] = {"data": DATA, "rows": 16, "precision": "float32"}


def reversals(count: int, seed: int = 0) -> list[TrainingText]:
    """Two letters, a sign, the letters from behind, and two ends."""
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        letters = [chance.randrange(1, 9) for _ in range(2)]
        rows.append(TrainingText((END, *letters, AS, *letters[::-1], END, END), 4))
    return rows


def trained(recipe: CanvasRecipe, options: CanvasTrainOptions) -> float:
    """Train on reversals; the loss at the end."""
    return fit(Begun(recipe, tokens(), reversals(300), []), options).loss


def written(folder: Path, recipe: CanvasRecipe, strategy: str) -> tuple[int, int, int]:
    """How many of 20 new rows the saved model gets right, in how many steps, with how many tokens."""
    save_decoder(folder, recipe.decoder, tokens(), "# toy\n", recipe.config())
    rows = reversals(20, seed=1)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = LLM(str(folder), dtype="float32").generate([[*row.ids[:4]] for row in rows], params, strategy=strategy)
    samples = [output.outputs[0] for output in outputs]
    right = sum(tuple(sample.token_ids) == row.ids[4:] for sample, row in zip(samples, rows, strict=True))
    return (
        right,
        sum(sample.metrics.steps for sample in samples),
        sum(len(sample.token_ids) for sample in samples),
    )


def test_both_streams_see_what_the_papers_say() -> None:
    """A noisy place: its own noisy group and clean ones before it. A clean one: clean ones, as causal or in groups."""
    for length, size, offset, causal in ((8, 4, 0, False), (7, 3, 2, True)):
        group_T = masks.groups_of(length, size, offset)
        groups = [(place - offset) // size for place in range(length)]
        assert group_T.tolist() == groups
        seen = masks.two_streams(group_T, causal=causal)
        for row, column in itertools.product(range(2 * length), repeat=2):
            own, other = groups[row % length], groups[column % length]
            if row < length:
                expected = own == other if column < length else other < own
            else:
                before = column <= row if causal else other <= own
                expected = column >= length and before
            assert bool(seen[row, column]) is expected, (row, column)


def test_one_forward_of_both_streams_is_each_group_alone() -> None:
    """Each noisy group after the clean text before it alone gives the same states; so does the clean text."""
    one, length = decoder(), 9
    ids_BT, noisy_BT = torch.randint(1, 20, (1, length)), torch.full((1, length), MASK)
    noisy_BT[0, [2, 5]] = ids_BT[0, [2, 5]]
    for causal, offset in ((False, 0), (True, 1)):
        group_T = masks.groups_of(length, 3, offset)
        with torch.no_grad():
            both = one.streams(noisy_BT, ids_BT, masks.two_streams(group_T, causal=causal))[0]
            clean = torch.ones(length, length, dtype=torch.bool).tril() if causal else masks.by_groups(group_T)
            torch.testing.assert_close(both[length:], one.hidden(ids_BT, clean)[0])
            for group in set(group_T.tolist()):
                places = (group_T == group).nonzero().flatten()
                begin = int(places[0])
                alone = torch.cat([ids_BT[:, :begin], noisy_BT[:, places]], 1)
                seen = torch.ones(alone.shape[1], alone.shape[1], dtype=torch.bool)
                seen[:begin] = clean[:begin, : alone.shape[1]]
                torch.testing.assert_close(both[places], one.hidden(alone, seen)[0, begin:])


def test_the_bound_is_the_mean_over_all_orders() -> None:
    """A table says what each place costs given which places are open. Over all rates and masks, the masked loss is what
    filling the places one by one costs, in the mean over all orders (arXiv:2406.03736)."""
    places, vocab = 3, 5
    table: Mapping[tuple[int, ...], Tensor] = {
        open_: torch.randn(len(open_), vocab, dtype=torch.float64)
        for count in range(1, places + 1)
        for open_ in itertools.combinations(range(places), count)
    }
    labels = torch.randint(vocab, (places,))

    def cost(open_: tuple[int, ...], place: int) -> float:
        return -float(table[open_].log_softmax(-1)[open_.index(place), labels[place]])

    orders = list(itertools.permutations(range(places)))
    one_by_one = sum(cost(tuple(sorted(order[at:])), order[at]) for order in orders for at in range(places))

    total, steps = 0.0, 400
    for rate in ((step + 0.5) / steps for step in range(steps)):
        for open_, logits in table.items():
            chance = rate ** len(open_) * (1 - rate) ** (places - len(open_))
            rates = torch.full((len(open_),), rate, dtype=torch.float64)
            total += chance * float(masked_loss(logits, labels[list(open_)], rates, places)) / steps
    assert total * places == pytest.approx(one_by_one / len(orders), rel=1e-4)


def test_rates_lie_evenly_between_their_bounds() -> None:
    rates = masks.spread_rates(8, torch.Generator().manual_seed(3), 0.2, 0.6).sort().values
    assert rates.min() >= 0.2
    assert rates.max() <= 0.6
    torch.testing.assert_close(rates.diff(), torch.full((7,), 0.05))
    masked = masks.masked_at(torch.ones(2, 4), torch.tensor([[True, False] * 2] * 2), torch.Generator())
    assert masked.tolist() == [[True, False, True, False]] * 2


def test_the_divergence_is_zero_of_equals_and_teaches_the_student_alone() -> None:
    one, other = torch.randn(4, 7, requires_grad=True), torch.randn(4, 7, requires_grad=True)
    assert float(divergence(one, one).detach()) == pytest.approx(0, abs=1e-6)
    found = divergence(one, other)
    by_hand = [
        sum(float(p * (p.log() - q.log())) for p, q in zip(a.softmax(0), b.softmax(0), strict=True))
        for a, b in zip(one.detach(), other.detach(), strict=True)
    ]
    assert float(found.detach()) == pytest.approx(sum(by_hand) / 4, abs=1e-5)
    found.backward()
    assert one.grad is None
    assert other.grad is not None
    assert float(divergence(one[:0], other[:0]).detach()) == float(next_token_loss(one[:0], torch.zeros(0))) == 0


def test_canvases_beside_a_text_are_each_alone_behind_it_and_the_text_stays_as_it_was() -> None:
    """Where they begin in the text, and what they see of it and of each other, as the engine lays them."""
    one, batch = decoder(), batch_of(reversals(3), END, 1)
    options = SetBlockTrainOptions(**COMMON, block=2, lora=4, groups=3)
    recipe = MaskAdapterRecipe(options, one)
    for up in recipe._adapter.up.values():
        up.data.normal_(0, 0.3)
    begins_BG = anchors(batch, 3, torch.Generator().manual_seed(1))
    assert ((begins_BG >= batch.answer_B[:, None]) & (begins_BG < batch.length_B[:, None] - 1)).all()
    with torch.no_grad():
        found = recipe._guessed(batch, begins_BG)
        guess_PH = iter(found.guess_PH)
        for row, begins in enumerate(begins_BG.tolist()):
            for begin in begins:
                _, cache = one.read(batch.ids_BT[row : row + 1, :begin])
                alone = torch.ones(1, 2, begin + 2, dtype=torch.bool)
                places = torch.tensor([[begin, begin + 1]])
                with recipe._adapter.on():
                    two_MH = one.further(torch.full((1, 2), MASK), places, alone, cache)[0]
                for depth in range(min(2, int(batch.length_B[row]) - 1 - begin)):
                    torch.testing.assert_close(next(guess_PH), two_MH[depth])
        assert next(guess_PH, None) is None
        hidden_BTH = one.hidden(batch.ids_BT, masks.causal(batch.ids_BT.shape[1]))
        torch.testing.assert_close(one.read(batch.ids_BT)[0], hidden_BTH)


def test_the_two_copies_guess_each_place_of_a_canvas_once() -> None:
    """But for its first place, which the text predicts; the row behind the last place guesses in both copies."""
    group_T = masks.groups_of(13, 4, 1)
    masked_BT = torch.rand(1, 13) < 0.5
    one, other = (guessing_rows(each, group_T[None])[0] for each in (masked_BT, ~masked_BT))
    first = group_T[1:] != group_T[:-1]
    assert (one[~first] != other[~first]).all()
    assert one[first].all()
    assert other[first].all()


def test_the_commonest_tokens_of_answers_are_learned_over() -> None:
    rows = [TrainingText((9, 9, 9, 5, 7, 7), 3), TrainingText((9, 4, 7), 1)]
    assert common_ids(rows, 2, 16).tolist() == [4, 7], "of equals the lower id"
    assert common_ids(rows, 5, 16).tolist() == [0, 1, 4, 5, 7], "where there are fewer, low ids follow"
    recipe = MaskAdapterRecipe(SetBlockTrainOptions(**COMMON, lora=4), decoder(), common_ids(rows, 5, 16))
    known, label = recipe._labels(torch.tensor([7, 6, 9, 0]))
    assert known.tolist() == [True, False, False, True]
    assert label[[0, 3]].tolist() == [4, 0]


def test_rows_are_conversations_and_pieces_of_documents(capsys: pytest.CaptureFixture[str]) -> None:
    def encode(text: str) -> list[int]:
        return [int(digit) for digit in text]

    asked = (PromptAndAnswer("12", "34"), PromptAndAnswer("12", "34", framed=True), PromptAndAnswer("1" * 40, "2"))
    texts, words = UserTexts(asked, ("1" * 30,)), Words(encode, (9,), 9, ChatFrame((9, 7), (8,)))
    rows = rows_of(texts, words, 20)
    assert rows == [
        TrainingText((9, 7, 1, 2, 8, 3, 4, 9), 5),
        TrainingText((1, 2, 3, 4, 9), 2),
        TrainingText((9, *[1] * 19), 1),
        TrainingText((9, *[1] * 11, 9), 1),
    ]
    batch = batch_of(rows[1:3], 9, 8)
    assert batch.ids_BT.shape == (2, 24)
    assert batch.learned_BT.sum(1).tolist() == [22, 23], "what fills a row up is learned on canvases"
    assert batch.text_BT.sum(1).tolist() == [3, 19]
    with pytest.raises(ParlayError, match="too few texts of at most 7 tokens"):
        rows_of(texts, words, 7)
    assert "1 of 3 conversations have more than 20 tokens: left out" in capsys.readouterr().out


def test_rows_that_are_alike_are_learned_or_measured() -> None:
    rows = [TrainingText((place % 30, 1, 2), 1) for place in range(90)]
    learned, held = parted(rows)
    assert {row.ids for row in held}.isdisjoint(row.ids for row in learned)
    assert len(learned) > 60
    with pytest.raises(ParlayError, match="all texts are alike"):
        parted([rows[0]] * 30)


def test_masks_and_ends_in_texts_are_no_tokens() -> None:
    """A mask is never guessed, so one that is to be learned has a loss beyond all others."""
    documents = ("A mask is <|mask|> here, and <|endoftext|> ends. " * 20,)
    tokenizer = new_tokenizer(UserTexts(documents=documents), 300)
    asked = (PromptAndAnswer("<|endoftext|>Hi", "Ho<|mask|>", framed=True),)
    words = words_of(tokenizer, UserTexts(asked, documents))
    said, *pieces = rows_of(UserTexts(asked, documents), words, 64)
    assert said.ids[0] == tokenizer.eos_token_id, "what a model read is read as it was"
    inside = [token for row in (said, *pieces) for token in row.ids[1:-1]]
    assert not {tokenizer.mask_token_id, tokenizer.eos_token_id} & set(inside)


@pytest.fixture(scope="module")
def teacher() -> Mdlm:
    options = MdlmTrainOptions(**COMMON, updates=120, rate=1.5)
    recipe = Mdlm(options, decoder())
    assert trained(recipe, options) < 0.5
    recipe.decoder.eval()
    return recipe


def test_a_masked_diffusion_model_learns_to_reverse_and_opens_by_itself(teacher: Mdlm, tmp_path: Path) -> None:
    right, steps, _ = written(tmp_path, teacher, "denoise:selector=confidence,k=1")
    assert right >= 18
    assert steps == 4 * 20
    assert read_config(tmp_path).canvas == CanvasSpec(MASK, 0, shift=False, text="full")


def test_a_block_diffusion_model_learns_to_reverse_and_opens_by_itself(tmp_path: Path) -> None:
    options = Bd3TrainOptions(**COMMON, updates=120, rate=1.5, block=4)
    recipe = Bd3(options, decoder())
    assert trained(recipe, options) < 0.5
    assert written(tmp_path, recipe, "denoise:selector=confidence,k=1")[0] >= 18
    assert read_config(tmp_path).canvas == CanvasSpec(MASK, 4, shift=False, text="block")


def test_a_student_learns_what_its_teacher_said_one_by_one(teacher: Mdlm, tmp_path: Path) -> None:
    """The teacher's own words are kept with its states; the student says them in fewer forwards."""
    known = cdlm.write(teacher.decoder, batch_of(reversals(200, 2), END, 4), 4)
    for block in known.rank_BT.view(-1, 4).tolist():
        decided = sorted(rank for rank in block if rank >= 0)
        assert decided == list(range(len(decided)))
    said = teacher.decoder.head(known.states_BTH).argmax(-1)
    assert torch.equal(said[known.rank_BT >= 0], known.batch.ids_BT[known.rank_BT >= 0])

    options = CdlmTrainOptions(**COMMON, model="", block=4, updates=50, rate=1e-3)
    student = decoder()
    student.load_state_dict(teacher.decoder.state_dict())
    recipe = cdlm.Cdlm(options, student, teacher.decoder, known)
    apart, alone = ([batch_of(reversals(16, seed), END, 4)] for seed in (7, 8))
    with torch.no_grad():
        before = [recipe.measure(batches)["loss"] for batches in (apart, alone, apart)]
    assert before[0] == before[2] != before[1], "measured are the rows that were held out"
    trained(recipe, options)
    recipe.decoder.eval()
    with torch.no_grad():
        assert recipe.measure(apart)["loss"] < before[0]
    right, steps, _ = written(tmp_path, recipe, "denoise:selector=threshold,threshold=0.9")
    assert right >= 18
    assert steps < 0.5 * 4 * 20


def test_states_of_a_block_that_is_cut_count_its_own_places(teacher: Mdlm) -> None:
    """Rows are as long as those that the teacher learned from, whatever the student's blocks are."""
    known = cdlm.write(teacher.decoder, batch_of(reversals(40, 2), END, 1), 3)
    assert known.rank_BT.shape[1] == 8
    longer = cdlm.write(teacher.decoder, batch_of(reversals(40, 2), END, 24), 3)
    right, worse = (int((each.batch.ids_BT == each.truth_BT).all(1).sum()) for each in (known, longer))
    assert right >= 36
    assert worse < right, "it learned nothing of rows with more places"
    recipe = cdlm.Cdlm(CdlmTrainOptions(**COMMON, model="", block=3), decoder(), teacher.decoder, known)
    for _ in range(20):
        now_BT, later_BT = recipe._states(known.rank_BT)
        for places in (slice(0, 3), slice(3, 6), slice(6, 8)):
            now, later, ranks = (each[:, places] for each in (now_BT, later_BT, known.rank_BT))
            assert (now == now[:, :1]).all()
            count = (ranks >= 0).sum(1)
            assert ((now[:, 0] < count) | (count == 0)).all()
            assert (now < later).all()
            assert (later[:, 0] <= count.clamp(min=1)).all()
    assert recipe.loss_of(known).isfinite()


def test_a_student_sees_nothing_of_later_blocks() -> None:
    """Its states in a block do not move, whatever later blocks hold."""
    one = decoder()
    recipe = Bd3(Bd3TrainOptions(data=DATA, block=4), one)
    seen = masks.two_streams(masks.groups_of(12, recipe.multiple))
    ids_BT = torch.randint(1, 20, (1, 12))
    other_BT = ids_BT.clone()
    other_BT[0, 8:] = 7
    with torch.no_grad():
        here, there = (one.streams(each, each, seen)[0, :8] for each in (ids_BT, other_BT))
    assert torch.equal(here, there)


def test_a_causal_model_learns_to_draft_for_itself(tmp_path: Path) -> None:
    options = SetBlockTrainOptions(**COMMON, updates=140, rate=3e-3, block=4, keep=0, text_weight=1)
    recipe = SetBlockRecipe(options, decoder())
    trained(recipe, options)
    with torch.no_grad():
        figures = recipe.measure([batch_of(reversals(40, 3), END, 1)])
    assert figures["perplexity"] < 1.5
    drafted, steps, tokens = written(tmp_path, recipe, "set-block:policy=fixed")
    plain, _, _ = written(tmp_path, recipe, "none")
    assert drafted == plain >= 18
    assert written(tmp_path, recipe, "denoise:selector=confidence,k=1")[0] >= 18, "the same weights fill canvases"
    assert tokens / steps > 1.3, "four tokens take two steps at least"
    assert read_config(tmp_path).canvas == CanvasSpec(MASK, 4, shift=True)


def test_canvases_begin_where_answers_do_or_later_and_prompts_are_never_masked() -> None:
    recipe = SetBlockRecipe(SetBlockTrainOptions(**COMMON, block=3, keep=0, text_weight=1), decoder())
    prompts = [TrainingText((END, *range(1, 3 + more), AS, 5, 6, 7, 8, 9, END), 4 + more) for more in (0, 1, 2)] * 20
    batch, seen = batch_of(prompts, END, 1), list[tuple[Tensor, Tensor]]()
    recipe._losses = lambda batch, masked_BT, group_BT: seen.append((masked_BT, group_BT)) or masked_BT.sum() * 0.0  # type: ignore[method-assign]
    for _ in range(2):
        recipe.loss(batch)
    (all_BT, group_BT), (part_BT, _) = seen
    later_B = group_BT.eq(0).int().argmax(1) - batch.answer_B
    assert set(later_B.tolist()) == {0, 1, 2}, "at most a block later"
    assert later_B.eq(0).sum() > 30, "half of them, and some that were drawn so"
    assert torch.equal(all_BT, group_BT >= 0)
    here_BT, there_BT = part_BT.split(len(batch.ids_BT))
    assert not (here_BT & there_BT).any()
    assert not ((here_BT | there_BT) & ~batch.learned_BT).any()


@pytest.mark.parametrize("text_weight", [0, 1])
def test_the_causal_mode_learns_that_it_writes_no_mask(text_weight: int) -> None:
    """Programs that know no mask write by the same logits: one that nobody holds down stands in the place of words."""
    options = SetBlockTrainOptions(data=DATA, block=4, keep=1 - text_weight, text_weight=text_weight)
    recipe = SetBlockRecipe(options, decoder(), decoder())
    batch = batch_of(reversals(8), END, 1)
    with torch.no_grad():
        own_BTH = recipe.decoder.hidden(batch.ids_BT, masks.causal(batch.ids_BT.shape[1]))
        wanted_BT, head = batch.text_BT[:, 1:], recipe.decoder.inner.lm_head.weight
        before = float(recipe._loss(own_BTH, own_BTH, batch, wanted_BT))
        perplexity = recipe.measure([batch])["perplexity"]
        head[MASK] = 4 * head.abs().max() * own_BTH.mean((0, 1)).sign()
        assert float(recipe._loss(own_BTH, own_BTH, batch, wanted_BT)) > before + 0.1
        assert recipe.measure([batch])["perplexity"] > 1.1 * perplexity, "and its measure tells"


def test_the_causal_mode_is_kept_by_what_it_was() -> None:
    """Where nothing has moved yet, the text adds nothing to the loss; and no gradient pulls it away."""
    options = SetBlockTrainOptions(data=DATA, block=4)
    recipe = SetBlockRecipe(options, decoder(), decoder())
    batch = batch_of(reversals(8), END, 1)
    group_BT = masks.groups_of(batch.ids_BT.shape[1], 4, batch.length_B[:, None])
    nowhere_BT = torch.zeros_like(batch.ids_BT, dtype=torch.bool)
    assert float(recipe._losses(batch, nowhere_BT, group_BT).detach()) == pytest.approx(0, abs=1e-5)
    with pytest.raises(UsageError, match="keep=1 needs an existing model; for a new one give --keep 0"):
        SetBlockRecipe(options, decoder())


def test_a_new_model_learns_both_modes(tmp_path: Path) -> None:
    data = tmp_path / "say.jsonl"
    words = ["aa" if place % HELD_OUT == 0 else ("ab", "ba")[place % 2] for place in range(80)]  # aa is held out
    lines = [json.dumps({"prompt": f"say {word}:", "answer": word}) for word in words]
    data.write_text("\n".join(lines))
    common: dict[str, Any] = {"data": data, "rows": 8, "length": 32, "precision": "float32", "model": ""}
    common |= {"shape": "tiny", "vocab_size": 280, "block": 4, "keep": 0, "text_weight": 1, "rate": 1}
    said = train("set-block", SetBlockTrainOptions(**common, updates=60, out=tmp_path / "both"))
    assert said.startswith(f"{tmp_path / 'both'}: 60 updates")
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(tmp_path / "both"), dtype="float32") as llm:
        for strategy in ("none", "denoise:selector=confidence,k=1", "set-block:policy=fixed"):
            texts = [each.outputs[0].text for each in llm.generate(["say ab:", "say ba:"], params, strategy=strategy)]
            assert texts == ["ab", "ba"], strategy
    with pytest.raises(UsageError, match="need an existing model: name it"):
        train("set-block", SetBlockTrainOptions(**common, updates=1, out=tmp_path / "none", layers=1))


def test_the_last_layers_alone_can_be_trained() -> None:
    options = SetBlockTrainOptions(data=DATA, rows=4, precision="float32", updates=1, rate=0.1, layers=1, block=4)
    recipe = SetBlockRecipe(options, decoder(), decoder(1))
    before = {name: weight.clone() for name, weight in recipe.decoder.state_dict().items()}
    trained(recipe, options)
    moved = {name for name, weight in recipe.decoder.state_dict().items() if not torch.equal(weight, before[name])}
    assert all("layers.1." in name or name.endswith("model.norm.weight") for name in moved)
    assert moved


def test_an_adapter_for_mask_rows_drafts_for_a_model_that_stays_as_it_is(tmp_path: Path) -> None:
    base = decoder()
    batch, optimizer = batch_of(reversals(120), END, 1), adam([*base.parameters()], 1e-2)
    for _ in range(60):
        hidden_BTH = base.hidden(batch.ids_BT, masks.causal(batch.ids_BT.shape[1]))
        next_token_loss(base.head(hidden_BTH[:, :-1].flatten(0, 1)), batch.ids_BT[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    save_decoder(tmp_path / "base", base, tokens(), "# toy\n", {})
    before = {name: weight.clone() for name, weight in base.state_dict().items()}

    options = SetBlockTrainOptions(**COMMON, updates=110, rate=2e-2, block=4, lora=8)
    recipe = MaskAdapterRecipe(options, base)
    trained(recipe, options)
    assert all(torch.equal(weight, before[name]) for name, weight in base.state_dict().items() if name in before)
    recipe.save(tmp_path / "masks", tokens(), "# toy\n")

    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [[*row.ids[:4]] for row in reversals(20, seed=1)]
    with LLM(str(tmp_path / "base"), dtype="float32") as llm:
        plain = llm.generate(prompts, params, strategy="none")
        drafted = llm.generate(prompts, params, strategy=f"set-block:adapter={tmp_path / 'masks'},policy=fixed")
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.outputs[0].metrics.steps for each in drafted) < 4 * 20 / 1.3
    with LLM(str(tmp_path / "base"), dtype="float32") as llm:
        assert "set-block" not in llm.offered()
    owned = f"auto:of=prompt-lookup+set-block(adapter={tmp_path / 'masks'})"
    with LLM(str(tmp_path / "base"), dtype="float32", strategy=owned) as llm:
        assert "set-block" in llm.offered()
        routed = llm.generate(prompts, params)
        assert [each.outputs[0].token_ids for each in routed] == [each.outputs[0].token_ids for each in plain]
        assert {arm.drafter for arm in routed[0].outputs[0].metrics.router.drafters} == {
            "prompt-lookup",
            f"set-block:adapter={tmp_path / 'masks'}",
        }
        again = llm.generate(prompts, params, strategy="set-block:groups=1,policy=fixed")
        assert [each.outputs[0].token_ids for each in again] == [each.outputs[0].token_ids for each in plain]
        assert sum(each.outputs[0].metrics.draft_tokens for each in again) > 0, "the owner's adapter is everybody's"


def test_a_fixed_point_is_the_greedy_text_and_tuning_reaches_it_sooner() -> None:
    one = decoder(1)
    prefixes = [row.ids[:4] for row in reversals(30)]
    solved = cllm.solve(one, prefixes, 6, torch.Generator().manual_seed(0))
    for trajectory in solved[:5]:
        ids = list(trajectory.prefix)
        with torch.no_grad():
            for _ in range(6):
                hidden = one.hidden(torch.tensor([ids]), masks.causal(len(ids)))
                ids.append(int(one.head(hidden[0, -1:]).argmax()))
        assert tuple(ids[-6:]) == trajectory.states[-1]
        assert len(set(trajectory.states)) == len(trajectory.states)
    own = [TrainingText((*each.prefix, *each.states[-1]), len(each.prefix)) for each in solved]
    options = CllmTrainOptions(data=DATA, rows=16, precision="float32", updates=90, rate=3e-3, block=6, groups=3)
    recipe = cllm.Cllm(options, one, decoder(1).requires_grad_(False), own, END)
    trained(recipe, options)
    again = cllm.solve(one.eval(), prefixes, 6, torch.Generator().manual_seed(0))
    before, after = (sum(len(each.states) for each in found) for found in (solved, again))
    assert after < 0.7 * before
    kept = sum(new.states[-1] == old.states[-1] for new, old in zip(again, solved, strict=True))
    assert kept >= 27, "it writes what it wrote"


def test_a_model_that_repeats_one_token_shows_in_its_figures() -> None:
    """Its blocks are solved at once, which would look like success."""

    class Stuck(Decoder):
        def head(self, hidden_MH: Tensor) -> Tensor:
            return super().head(hidden_MH).index_fill(-1, torch.tensor([5]), 50.0)

    torch.manual_seed(1)
    stuck = Stuck(new_decoder(TINY.config(VOCAB, END, END)), MASK)
    rows = [TrainingText(row.ids, 4) for row in reversals(3)]
    options = CllmTrainOptions(data=DATA, rows=3, precision="float32", block=6)
    with torch.no_grad():
        said = cllm.Cllm(options, stuck, decoder(1), rows, END).measure([batch_of(rows, END, 1)])
    assert said["tokens per iteration"] == pytest.approx(3)
    assert said["distinct tokens"] == pytest.approx(1 / 6)


def test_commands_go_from_texts_to_folders_that_decode(tmp_path: Path) -> None:
    """A diffusion model from nothing, its student, and two causal models, each by its own command's function."""
    lines = [json.dumps({"prompt": f"say {number}", "answer": str(number)}) for number in range(45)]
    data = tmp_path / "say.jsonl"
    data.write_text("\n".join(lines))
    common: dict[str, Any] = {"data": data, "updates": 2, "rows": 4, "length": 32, "precision": "float32"}
    made = tmp_path / "mdlm"
    said = train("mdlm", MdlmTrainOptions(**common, out=made, shape="tiny", vocab_size=280))
    assert said.startswith(f"{made}: 2 updates, loss")
    train("bd3", Bd3TrainOptions(**common, out=tmp_path / "bd3", model=str(made), block=4))
    train("cdlm", CdlmTrainOptions(**common, out=tmp_path / "cdlm", model=str(made), block=4, prompts=4))
    train("set-block", SetBlockTrainOptions(**common, out=tmp_path / "set", model="parlay-mini", block=4, layers=1))
    train(
        "cllm",
        CllmTrainOptions(**common, out=tmp_path / "cllm", model="parlay-mini", block=4, prompts=2, blocks=1, layers=1),
    )
    params = SamplingParams(temperature=0, max_tokens=6)
    for name in METHODS:
        folder = tmp_path / ("set" if name == "set-block" else name)
        assert LLM(str(folder)).generate(["say one"], params)[0].outputs[0].finish_reason in ("stop", "length")
        assert "Held out, after" in (folder / "README.md").read_text()
    again = load_decoder(str(made)).state_dict()
    assert all(weight.isfinite().all() for weight in again.values())


def test_a_run_that_is_stopped_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "say.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"say {n}", "answer": str(n)}) for n in range(40)))
    whole, calls = Mdlm.loss, []

    def loss(self: Mdlm, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) > most:
            raise KeyboardInterrupt
        return whole(self, batch)

    monkeypatch.setattr(Mdlm, "loss", loss)
    monkeypatch.setattr(Mdlm, "measure", lambda self, batches: {"loss": 1.0})
    for most, saved in ((0, False), (3, True)):
        calls.clear()
        options = MdlmTrainOptions(
            data=data, updates=9, rows=4, length=32, precision="float32", out=tmp_path / str(most), shape="tiny"
        )
        with pytest.raises(KeyboardInterrupt):
            train("mdlm", options)
        assert (options.out / "model.safetensors").is_file() == saved
    card = (tmp_path / "3" / "README.md").read_text()
    assert "3 updates" in card
    assert "not measured, the run was stopped" in card


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_is_trained_as_the_folder_that_it_was_made_of(name: str, tmp_path: Path) -> None:
    save_random(name, tmp_path)
    file = gguf_files.write(tmp_path / "model.gguf", tmp_path)
    ids_BT, seen_TT = torch.randint(1, 20, (2, 9)), masks.causal(9)
    found = []
    for source in (tmp_path, file):
        one = Decoder(load_decoder(str(source)).eval())
        with torch.no_grad():
            found.append(one.head(one.hidden(ids_BT, seen_TT)))
    torch.testing.assert_close(*found, rtol=0, atol=5e-6)


def test_recipes_that_would_learn_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="keep=0 and text_weight=0: nothing would be learned"):
        SetBlockTrainOptions(**COMMON, keep=0)
    with pytest.raises(UsageError, match="nothing would be learned"):
        CdlmTrainOptions(**COMMON, model="", distill=0, consistency=0, denoise=0)


def test_masks_are_tokens_that_no_text_has() -> None:
    tokenizer = toy_tokenizer(VOCAB)
    named = tokenizer.convert_ids_to_tokens(3)
    assert choose_mask(tokenizer, VOCAB, named) == 3
    assert choose_mask(tokenizer, VOCAB + 2, "") == VOCAB, "the vocabulary has ids without a token"
    with pytest.raises(ParlayError, match="mask_token='nowhere' is not a token of the model"):
        choose_mask(tokenizer, VOCAB, "nowhere")
    with pytest.raises(ParlayError, match="no token that texts never have"):
        choose_mask(tokenizer, VOCAB, "")


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"set_block_size": 4, "mask_token_id": 64}, "mask_token_id 64 is not in the vocabulary of 64"),
        ({"set_block_size": 0, "mask_token_id": 3}, "set_block_size 0: expected at least 1"),
        ({"set_block_size": 4}, "config.json has no mask_token_id"),
    ],
)
def test_a_canvas_that_makes_no_sense_is_refused(keys: Mapping[str, int], reason: str, tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **keys}))
    with pytest.raises(ParlayError, match=reason):
        read_config(tmp_path)
