"""Generated tasks have right answers, and held-out wordings stay held out."""

from __future__ import annotations

import ast
import inspect
import json
import random
import re
import textwrap
from pathlib import Path

import pytest

from parlay.train import edits, wording
from parlay.train.corpus import read_corpus
from parlay.train.records import make_record
from parlay.train.tasks import TaskMaker, make_sources

FUNCTIONS = edits.functions(inspect.getsource(textwrap) + inspect.getsource(json.decoder) + inspect.getsource(ast))
TEXT = "The harbour was quiet before the storm. Martha closed the window.\n\nA letter lay on the table. Nobody read it."


class Renamer(ast.NodeTransformer):
    """Renames by syntax tree: the slow, obvious way."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.new if node.id == self.old else node.id
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self.new if node.arg == self.old else node.arg
        self.generic_visit(node)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        node.name = self.new if node.name == self.old else node.name
        self.generic_visit(node)
        return node


def test_renaming_by_token_equals_renaming_by_syntax_tree() -> None:
    rng, renamed = random.Random(0), 0
    for function in FUNCTIONS:
        edit = edits.rename(function, rng)
        if edit is None:
            continue
        renamed += 1
        wanted = Renamer(edit.old, edit.new).visit(ast.parse(edit.before))
        assert ast.dump(ast.parse(edit.after)) == ast.dump(wanted)
    assert renamed > 30


@pytest.mark.parametrize(
    "function",
    [
        "def f(a):\n    return self.a + a",
        "def f(a):\n    return g(a=a)",
        'def f(a):\n    return f"{a}"',
        "def f():\n    global a\n    a = 1",
    ],
)
def test_names_that_also_mean_something_else_are_not_renamed(function: str) -> None:
    """Attributes, keywords, f-strings and globals."""
    assert "a" not in edits.local_names(function)


def test_a_typo_is_undone_by_its_correction() -> None:
    for seed in range(50):
        edit = edits.misspell(TEXT, random.Random(seed))
        if edit is not None:
            assert edit.before != edit.after == TEXT
            assert edit.old in edit.before


def test_replacing_leaves_the_rest() -> None:
    edit = edits.replace_word(TEXT, ["zebra"], random.Random(0))
    assert edit is not None
    assert edit.after.replace("zebra", edit.old) == TEXT
    assert not re.search(rf"\b{edit.old}\b", edit.after)


def test_dropping_removes_one_sentence_or_line() -> None:
    sentence = edits.drop_sentence(TEXT, random.Random(0))
    assert sentence is not None
    assert sentence.old not in sentence.after
    assert len(sentence.after) < len(sentence.before)
    code = "a = 1\nb = 2\nc = 3\nd = 4"
    line = edits.drop_line(code, random.Random(0))
    assert line is not None
    assert sorted([*line.after.split("\n"), line.old]) == code.split("\n")


def test_records_are_stated_in_full_by_their_sentence() -> None:
    for seed in range(50):
        record = make_record(random.Random(seed))
        assert all(str(value) in record.sentence for value in record.values.values())
        assert json.loads(record.dump(list(record.values))) == record.values


def test_copies_answer_with_the_text_of_the_prompt(data: Path) -> None:
    maker = TaskMaker(make_sources(read_corpus(data), heldout=False))
    for seed in range(50):
        task = maker.copy(random.Random(seed), 200)
        assert task is not None
        assert task.answer in task.turns[-1].text
        assert task.text == f"{task.prompt}{task.answer}<|end|>"


def test_heldout_wordings_and_layouts_stay_out_of_training(data: Path) -> None:
    corpus = read_corpus(data)
    secret = [*wording.HELDOUT_COPY, "[begin]", "Consider the following.", "=== output ==="]
    for heldout in (False, True):
        stream = TaskMaker(make_sources(corpus, heldout=heldout), heldout=heldout).tasks(random.Random(0), (100, 300))
        prompts = [next(stream).prompt for _ in range(300)]
        found = sum(any(text in prompt for text in secret) for prompt in prompts)
        assert (found > 0) == heldout


def test_training_sees_thirty_wordings_or_more() -> None:
    assert len(set(wording.COPY)) >= 30
    assert not set(wording.COPY) & set(wording.HELDOUT_COPY)
