"""Edits of a text whose right answer is known: rename, replace, misspell, delete, quote."""

from __future__ import annotations

import ast
import builtins
import io
import keyword
import random
import re
import textwrap
import tokenize
from typing import NamedTuple

from parlay.train.records import words

WORD = re.compile(r"[A-Za-z]{4,12}")
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'])")
NEW_NAMES = words(
    "value, item, result, total, count, index, data, node, current, entry, buffer, size, key, source, target, path, "
    "text, limit, offset, first, last, left, right, other, number, record, info, state, output, config, parent, child, "
    "width, start, stop, step"
)


class Edit(NamedTuple):
    """What an instruction needs (``old``, ``new``), the text before and after."""

    old: str
    new: str
    before: str
    after: str


def functions(source: str) -> list[str]:
    """Dedented sources of the functions in a module; none when it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    lines = source.splitlines()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            found.append(textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])))
    return found


def local_names(function: str) -> list[str]:
    """Arguments and assigned names that can be renamed by token: never an attribute, keyword or global too."""
    try:
        tree = ast.parse(function)
    except (SyntaxError, ValueError):
        return []
    nodes = list(ast.walk(tree))
    names = {node.arg for node in nodes if isinstance(node, ast.arg)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    taken = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    taken |= {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
    taken |= {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    taken |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    # Before Python 3.12 an f-string is one STRING token, so a name used inside one can't be replaced by token.
    formatted = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    taken |= {node.id for string in formatted for node in ast.walk(string) if isinstance(node, ast.Name)}
    return sorted(names - taken - {"self", "cls", "_"} - set(dir(builtins)))


def rename(function: str, rng: random.Random) -> Edit | None:
    """Renames one local name in every place where it is a name; None when there is none to rename."""
    candidates = local_names(function)
    fresh = [name for name in NEW_NAMES if not re.search(rf"\b{name}\b", function)]
    if not candidates or not fresh:
        return None
    old, new = rng.choice(candidates), rng.choice(fresh)
    if rng.random() < 0.3:
        new = f"{new}_{rng.choice(NEW_NAMES)}"
    after = replace_name(function, old, new)
    return Edit(old, new, function, after) if after != function and not keyword.iskeyword(new) else None


def replace_name(function: str, old: str, new: str) -> str:
    """``function`` with every NAME token ``old`` spelled ``new``; strings and comments stay."""
    lines = function.splitlines(keepends=True)
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(function).readline) if token.string == old]
    for token in reversed([token for token in tokens if token.type == tokenize.NAME]):
        row, column = token.start
        line = lines[row - 1]
        lines[row - 1] = line[:column] + new + line[column + len(old) :]
    return "".join(lines)


def replace_word(text: str, vocabulary: list[str], rng: random.Random) -> Edit | None:
    """Replaces every occurrence of one word by another."""
    words = sorted(set(WORD.findall(text)))
    if not words:
        return None
    old, new = rng.choice(words), rng.choice(vocabulary)
    if new in words:
        return None
    return Edit(old, new, text, re.sub(rf"\b{old}\b", new, text))


def misspell(text: str, rng: random.Random) -> Edit | None:
    """Swaps, drops or doubles one letter inside one word; ``after`` is the text as it was."""
    matches = list(WORD.finditer(text))
    if not matches:
        return None
    match = rng.choice(matches)
    word = match.group()
    at = rng.randrange(1, len(word) - 1)
    swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    wrong = rng.choice((swapped, word[:at] + word[at + 1 :], word[: at + 1] + word[at:]))
    if wrong == word:
        return None
    return Edit(wrong, word, text[: match.start()] + wrong + text[match.end() :], text)


def drop_sentence(text: str, rng: random.Random) -> Edit | None:
    """Deletes one sentence, named by its first words; None with fewer than three sentences."""
    sentences = SENTENCE.split(text)
    if len(sentences) < 3:
        return None
    at = rng.randrange(len(sentences))
    start = " ".join(sentences[at].split()[:4])
    kept = sentences[:at] + sentences[at + 1 :]
    joined = " ".join(sentences)
    return Edit(start, "", joined, " ".join(kept)) if joined.count(start) == 1 else None


def drop_line(source: str, rng: random.Random) -> Edit | None:
    """Deletes one line of code, named in full; None when no line is unique."""
    lines = source.splitlines()
    unique = [at for at, line in enumerate(lines) if line.strip() and lines.count(line) == 1 and len(line) < 80]
    if len(lines) < 4 or not unique:
        return None
    at = rng.choice(unique)
    return Edit(lines[at].strip(), "", source, "\n".join(lines[:at] + lines[at + 1 :]))


def quote(paragraphs: list[str], rng: random.Random) -> Edit | None:
    """Picks one paragraph out of several, named by its first words."""
    text = "\n\n".join(paragraphs)
    chosen = rng.choice(paragraphs)
    start = " ".join(chosen.split()[:4])
    return Edit(start, "", text, chosen) if text.count(start) == 1 and len(chosen.split()) >= 12 else None
