"""Texts to learn from: given conversations, and features that do not depend on how texts share forwards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from parlay import models
from parlay.llm import LLM
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer
from parlay.options import LoadOptions
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.text.prompts import TokensPrompt
from parlay.train.data import collecting, features, writing
from parlay.train.data.collecting import write_featured
from parlay.train.data.features import Featured, FeatureStore, Reading, complete, pack
from parlay.train.data.preparing import prepare
from parlay.train.data.prompts import ChatFrame, PromptAndAnswer, read_conversations, read_prompts
from parlay.train.data.user_texts import (
    Cut,
    TrainingText,
    UserTexts,
    check_filled,
    encode_user_texts,
    load_shard,
    read_user_texts,
    save_shard,
    save_user_texts,
    shard_path,
    shards,
)
from parlay.train.data.writing import Writer, WritingPlan, short_prompts
from parlay.train.options import MedusaTrainOptions
from parlay.train.recipes.linear_start import states_ahead
from parlay.types import ParlayError, Runner, SamplingParams


def test_given_conversations_are_cut_and_nothing_in_them_is_the_targets(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve("parlay-mini"))
    asked, said = "How are you today, my friend?", "I am well, and you? " * 9
    given = UserTexts((PromptAndAnswer(asked, said), PromptAndAnswer("Hi", "Ho")))
    save_user_texts(tmp_path, encode_user_texts(given, tokenizer, Cut(prompt=3, answer=5, row=64, documents=100)))
    (path,) = shards(tmp_path)
    long, short = load_shard(path)
    frame = ChatFrame.of(tokenizer)
    words, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (asked, said))
    assert long.ids == (*frame.around(words[:3]), *answer[:5])
    assert [text.answer for text in (long, short)] == [len(long.ids), len(short.ids)]


def test_a_folder_of_texts_of_every_kind_is_read_in_rows(tmp_path: Path) -> None:
    """Documents are cut to rows, each begun as the tokenizer begins a text; hidden and binary files are left out."""
    tokenizer = load_tokenizer(resolve("parlay-mini"))
    story = "The harbour was quiet before the storm. " * 20
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "story.txt").write_text(story)
    (tmp_path / "notes.md").write_text("# Notes\n\nNobody in the village had seen such clouds before that day.\n")
    lines = [{"text": "Martha closed the window and lit the lamp by her bed."}, {"prompt": "Hi", "answer": "Ho"}]
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (tmp_path / ".hidden.txt").write_text("Nobody reads this.")
    given = read_user_texts(tmp_path)
    assert given.conversations == (PromptAndAnswer("Hi", "Ho"),)
    assert [text[:6] for text in given.documents] == ["The ha", "Martha", "# Note"]

    texts = encode_user_texts(given, tokenizer, Cut(prompt=8, answer=8, row=64, documents=10_000))
    assert max(len(text.ids) for text in texts) == 64
    begin = tokenizer.encode("")
    story_ids = [token for text in texts[1:] for token in text.ids[len(begin) :]]
    whole = tokenizer.encode(story, add_special_tokens=False)
    assert story_ids[: len(whole)] == whole
    fewer = encode_user_texts(given, tokenizer, Cut(prompt=8, answer=8, row=64, documents=130))
    assert sum(len(text.ids) for text in fewer[1:]) <= 130
    assert read_user_texts(tmp_path / "notes.md").documents == (given.documents[2],)


def test_a_folder_without_text_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ParlayError, match=r"no text in .*: name a folder of text files"):
        read_user_texts(tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ParlayError, match="no text in"):
        read_user_texts(tmp_path)
    (tmp_path / "odd.jsonl").write_text('{"title": "Nothing"}\n{"text": "Something to read"}\nbroken\n')
    with pytest.raises(ParlayError, match=r"odd.jsonl, line 1: .*\(2 such lines\).*--skip-broken"):
        read_user_texts(tmp_path)
    assert read_user_texts(tmp_path, skip_broken=True).documents == ("Something to read",)
    assert "left out: 2 such lines" in capsys.readouterr().out
    tokenizer = load_tokenizer(resolve("parlay-mini"))
    with pytest.raises(ParlayError, match="too short"):
        encode_user_texts(UserTexts(documents=("Hi",)), tokenizer, Cut(prompt=8, answer=8, row=64, documents=100))


def test_a_work_folder_of_other_texts_is_refused(tmp_path: Path) -> None:
    save_user_texts(tmp_path, [TrainingText((1, 2, 3), 3)])
    save_user_texts(tmp_path, [TrainingText((1, 2, 3), 3)])
    with pytest.raises(ParlayError, match="name another folder by --work"):
        save_user_texts(tmp_path, [TrainingText((1, 2, 4), 3)])


def test_a_work_folder_of_another_model_or_of_other_prompts_is_refused(tmp_path: Path) -> None:
    """Its states would be read as this model's own, without an error where both have one shape."""
    check_filled(tmp_path, {"model": "one"})
    check_filled(tmp_path, {"model": "one", "prompts": "some"})
    save_shard(shard_path(tmp_path, 0), [TrainingText((1, 2, 3), 3)])
    for other in ({"model": "two"}, {"model": "one", "prompts": "others"}):
        (name,) = [key for key, value in other.items() if value in ("two", "others")]
        with pytest.raises(ParlayError, match=f"holds texts of another --{name}: name another folder by --work"):
            check_filled(tmp_path, other)
    asked = MedusaTrainOptions(model="parlay-mini", work=tmp_path, out=tmp_path)
    with pytest.raises(ParlayError, match="holds texts of another --model"):
        prepare(asked)


def test_a_run_that_failed_before_it_wrote_texts_leaves_the_work_folder_to_others(tmp_path: Path) -> None:
    """So a mistyped model needs no other folder once it is corrected."""
    for model in ("mistyped", "right"):
        check_filled(tmp_path, {"model": model})
    save_shard(shard_path(tmp_path, 0), [TrainingText((1, 2, 3), 3)])
    with pytest.raises(ParlayError, match="holds texts of another --model"):
        check_filled(tmp_path, {"model": "mistyped"})


def test_prompts_that_are_too_long_are_counted_and_never_all_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(resolve("parlay-mini"))
    assert short_prompts(["Hi", "Nobody in the village " * 9], tokenizer, 8) == ["Hi"]
    assert "1 of 2 prompts have more than 8 tokens: left out" in capsys.readouterr().out
    with pytest.raises(ParlayError, match="all 1 prompts have more than 8 tokens"):
        short_prompts(["Nobody in the village " * 9], tokenizer, 8)
    assert short_prompts([], tokenizer, 8) == []


def test_conversations_need_both_sides(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"prompt": "Hello", "answer": "Good day"}\n{"prompt": "Hello"}\n')
    with pytest.raises(ParlayError, match="line 2 is no"):
        read_conversations(file)
    assert read_conversations(file, skip_broken=True) == [PromptAndAnswer("Hello", "Good day")]
    file.write_bytes('\ufeff{"prompt": "Hello", "answer": "Good day"}\r\n\r\n\n'.encode())
    assert read_conversations(file) == [PromptAndAnswer("Hello", "Good day")], "as other systems write them"


def test_recorded_traffic_is_read_as_the_model_read_and_wrote_it(tmp_path: Path) -> None:
    """In its template already, so no frame is put around it; of what is longer than a row the end."""
    tokenizer = load_tokenizer(resolve("parlay-mini"))
    frame = ChatFrame.of(tokenizer)
    read = tokenizer.decode(frame.around(tokenizer.encode("Hi", add_special_tokens=False)), skip_special_tokens=False)
    file = tmp_path / "traffic.jsonl"
    file.write_text(json.dumps({"prompt": read, "answer": "Good day to you", "framed": True}) + "\n")
    answer = tokenizer.encode("Good day to you", add_special_tokens=False)
    for row in (500, 9):
        (text,) = encode_user_texts(read_user_texts(file), tokenizer, Cut(prompt=1, answer=99, row=row, documents=100))
        whole = (*frame.around(tokenizer.encode("Hi", add_special_tokens=False)), *answer)
        assert text.ids == whole[-row:]
    with pytest.raises(ParlayError, match="give it by --texts"):
        read_prompts(file)


def test_features_are_the_same_in_any_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_ROWS", 64)
    save_random("llama", tmp_path / "target")
    runner = models.load(str(tmp_path / "target"), LoadOptions(dtype="float32", device="cpu"))
    lengths = (5, 200, 3, 40)
    texts = [TrainingText(tuple((7 * n + length) % VOCAB_SIZE for n in range(length)), 2) for length in lengths]
    together, alone = tmp_path / "together", tmp_path / "alone"
    for folder, parts in ((together, [texts]), (alone, [[text] for text in texts])):
        folder.mkdir()
        for number, part in enumerate(parts):
            save_shard(shard_path(folder, number), part)
        FeatureStore(folder, (0, 2)).compute(runner)
    pairs = zip(FeatureStore(together, (0, 2)).load(), FeatureStore(alone, (0, 2)).load(), strict=True)
    for (one, other), length in zip(pairs, lengths, strict=True):
        assert len(one.states_TF) == length
        assert torch.equal(one.states_TF, other.states_TF)


def test_states_kept_while_a_text_is_written_are_those_of_reading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding computes all but the last token's state or two; only those are computed in a forward of their own."""
    missing: list[int] = []

    def watched(runner: Runner, readings: Sequence[Reading], layers: Sequence[int]) -> list[Featured]:
        missing.extend(each.missing for each in readings)
        return complete(runner, readings, layers)

    monkeypatch.setattr(collecting, "complete", watched)
    prompts = [tuple(range(5, 5 + length)) for length in (40, 3, 3, 90)]
    params = [SamplingParams(temperature=n % 2, max_tokens=30, seed=n, ignore_eos=n > 0) for n in range(4)]
    with LLM("parlay-mini", router_memory="off", max_num_seqs=3) as llm:
        layers = (1, llm.runner.spec.num_layers)
        written = write_featured(llm, layers, prompts, params)
        plain = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, strategy="none")
        texts = [TrainingText(tuple(each.ids_T.tolist()), each.answer) for each in written]
        read = complete(llm.runner, [Reading(text, str(place)) for place, text in enumerate(texts)], layers)
        llm.runner.check()
    assert [text.ids for text in texts] == [(*out.prompt_token_ids, *out.outputs[0].token_ids) for out in plain]
    assert max(missing) <= 2
    for one, other in zip(written, read, strict=True):
        assert torch.equal(one.states_TF, other.states_TF)


def test_states_that_no_file_keeps_are_held_from_writing_to_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them the target would read all that it has written once more."""
    monkeypatch.setattr(writing, "_SHARD", 4)
    plan = WritingPlan(["Hello", "Name a town.", "Why?"], own_share=0, answer_tokens=5)
    with LLM("parlay-mini", router_memory="off") as llm:
        layers = (1, llm.runner.spec.num_layers)
        held, stored = (FeatureStore(tmp_path / str(disk), layers, on_disk=disk) for disk in (False, True))
        for store, disk in ((held, False), (stored, True)):
            Writer(llm, plan, store).write(tmp_path / str(disk), 2)
    assert not held.missing()
    assert not list((tmp_path / "False").glob("features-*"))
    assert FeatureStore(tmp_path / "False", layers).missing() == shards(tmp_path / "False"), "another run reads them"
    for one, other in zip(held.load(), stored.load(), strict=True):
        assert torch.equal(one.ids_T, other.ids_T)
        assert torch.equal(one.states_TF, other.states_TF)


def test_states_in_eight_bits_keep_what_is_small_beside_an_outlier(tmp_path: Path) -> None:
    """Each row and layer has a scale of its own, as one number of a row may be thousands of times the others."""
    states_TF = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    states_TF[1] *= 1e-6
    states_TF[2] *= 1e6
    states_TF[3, 7], states_TF[4] = 3000.0, 0.0
    states_TF = states_TF.bfloat16()
    path = shard_path(tmp_path, 0)
    save_shard(path, [TrainingText((1, 2, 3, 4, 5, 6), 2)])
    FeatureStore(tmp_path, (0, 2)).save(path, [Featured(torch.arange(6), 2, *pack(states_TF, 2))])
    (read,) = FeatureStore(tmp_path, (0, 2)).load()
    assert read.numbers_TF.element_size() == 1
    error = (read.states_TF.float() - states_TF.float()).abs()
    assert bool((error <= states_TF.float().abs() / 16 + states_TF.float().abs().amax(-1, keepdim=True) * 2**-17).all())
    assert torch.equal(read.last(2, torch.device("cpu")), read.states_TF[-2:])


def test_heads_start_from_the_best_linear_guess_of_states_to_come() -> None:
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0))).Q
    states = [torch.randn(4, generator=torch.Generator().manual_seed(1))]
    for _ in range(200):
        states.append(turn @ states[-1])
    text = Featured(torch.zeros(201, dtype=torch.int64), 1, torch.stack(states))
    one, two = states_ahead(4, [text], 2)
    assert torch.allclose(one, turn, atol=0.02)
    assert torch.allclose(two, turn @ turn, atol=0.02)


def test_lines_that_no_parser_can_read_are_broken_ones_and_no_others_are(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one\u2028two"}\n' + "[" * 100_000 + '\n{"prompt": 7}\n')
    with pytest.raises(ParlayError, match=r"line 2: not JSON .*\(2 such lines\)"):
        read_prompts(file)
    assert read_prompts(file, skip_broken=True) == ["one\u2028two"]


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_file_without_prompts_is_an_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ParlayError, match=r"prompts\.jsonl"):
        read_prompts(file)
    with pytest.raises(ParlayError, match="holds no prompts"):
        read_prompts(file, skip_broken=True)


def test_a_shard_of_texts_that_was_cut_short_is_named(tmp_path: Path) -> None:
    path = shard_path(tmp_path, 0)
    save_shard(path, [TrainingText(tuple(range(400)), 3)])
    whole = path.read_bytes()
    for cut in (0, 20, len(whole) // 2, len(whole) - 4):
        path.write_bytes(whole[:cut])
        with pytest.raises(ParlayError, match=r"texts-00000\.npz is damaged .*delete it"):
            load_shard(path)


def test_training_takes_every_file_of_prompts_that_other_commands_take(tmp_path: Path) -> None:
    text, lines, array = (tmp_path / name for name in ("prompts.txt", "prompts", "prompts.json"))
    text.write_text("Hello\n\nWhat is a tree?\n")
    lines.write_text('{"prompt": "Hello"}\n{"prompt": "What is a tree?"}\n')
    array.write_text(
        '[{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}]'
    )
    assert read_prompts(text) == read_prompts(lines) == ["Hello", "What is a tree?"]
    assert read_prompts(array) == ["Hello"]
