"""Wordings and layouts of the generated tasks. The ``HELDOUT_*`` ones never enter training text."""

from __future__ import annotations

import random

COPY = (
    "Repeat this text exactly.",
    "Repeat the following text exactly:",
    "Copy the text below word for word.",
    "Copy this exactly.",
    "Write out the same text again, unchanged.",
    "Say this again, exactly as it is.",
    "Reproduce the following verbatim.",
    "Give me the text back without any change.",
    "Echo the following:",
    "Type this again, character for character.",
    "Please repeat what is written here.",
    "Return the input unchanged.",
    "Print the text below once more.",
    "Can you copy this for me?",
    "Quote this in full.",
    "Write this passage again.",
    "Output exactly the same text.",
    "I need an exact copy of this.",
    "Restate the following word by word, changing nothing.",
    "Duplicate the text.",
    "Make a copy of the text that follows.",
    "Say it again:",
    "Transcribe the following without changes.",
    "Here is a text. Repeat it.",
    "Please write the following out again, keeping every line break.",
    "Copy the snippet below, including spaces and punctuation.",
    "Show me the same thing again.",
    "Reprint this.",
    "Read this and write it down again exactly.",
    "Do not change anything; just repeat this.",
    "Copy and paste this text.",
    "Now give the text again from start to end.",
)
HELDOUT_COPY = (
    "Please reproduce the passage below in full, letter for letter.",
    "Write down precisely what you see here, nothing more and nothing less.",
    "Send this back to me as it stands.",
    "What follows must be copied faithfully.",
    "Kindly recite the material given here with no alterations.",
    "Give an identical version of this.",
)
REPLACE = (
    'Replace "{old}" with "{new}" in this text.',
    'Repeat the text, but change "{old}" to "{new}".',
    "Write this again with {new} instead of {old}.",
    'Copy the text below, replacing every "{old}" by "{new}".',
    'Swap "{old}" for "{new}" and leave the rest as it is.',
    "Change {old} to {new}. Keep everything else.",
    'Substitute "{new}" for "{old}" in the following.',
    "Edit the text: {old} becomes {new}.",
    'Use "{new}" where the text says "{old}".',
)
HELDOUT_REPLACE = (
    'Give me this text with the word "{new}" in place of "{old}".',
    'Everywhere that "{old}" occurs below, put "{new}".',
)
RENAME = (
    "Rename the variable {old} to {new} in this code.",
    "Rename {old} to {new}.",
    "Rewrite this code so that {old} is called {new}.",
    "In the code below, change the variable name `{old}` to `{new}`.",
    "Refactor: rename `{old}` to `{new}`. Change nothing else.",
    "Give the variable {old} the name {new} and print the whole code.",
    "The name {old} is unclear. Call it {new} instead.",
    "Please use {new} as the name of {old} here.",
)
HELDOUT_RENAME = (
    "Show this function again with `{new}` as the new name of `{old}`.",
    "Let {old} be known as {new} below.",
)
TYPO = (
    "Fix the typo in this text.",
    "Correct the spelling mistake.",
    "One word below is misspelled. Write the text with the right spelling.",
    "Proofread this and return the corrected text.",
    "Repair the spelling error in the following.",
    "Correct the typo and keep the rest.",
    "Please fix the misspelled word.",
    "There is a typing error here. Give the text without it.",
)
HELDOUT_TYPO = ("Return this passage with its spelling slip put right.",)
DROP = (
    'Delete the sentence that begins with "{start}".',
    'Remove the sentence starting with "{start}" and give back the rest.',
    'Repeat this text without the sentence "{start} ...".',
    'Leave out the sentence that starts "{start}".',
)
DROP_LINE = (
    "Delete the line `{start}` from this code.",
    "Remove the line that says `{start}`.",
    "Give me the code without the line `{start}`.",
)
ADD_COMMENT = (
    'Put the comment "{start}" at the top of this code.',
    "Add `{start}` as the first line.",
    "Insert the line `{start}` before the code below.",
)
SET_FIELD = (
    'Set "{old}" to {new} in this JSON.',
    "Change the field {old} to {new} and return the JSON.",
    "Update this JSON: {old} is now {new}.",
    'Return the object with "{old}" equal to {new}.',
)
QUOTE = (
    'Quote the paragraph that begins with "{start}".',
    'Repeat the paragraph which starts with "{start}".',
    'Find the part that begins "{start}" and copy it.',
    'Write out the passage starting with "{start}".',
    'Which paragraph starts with "{start}"? Copy it.',
)
FILL = (
    "Fill this JSON from the text: {keys}",
    "Return a JSON object with the fields {keys}.",
    "Extract {keys} as JSON.",
    "Read the text and answer with JSON. Fields: {keys}.",
    "Turn the paragraph into JSON with the keys {keys}.",
    "Give me {keys} from this text as a JSON object.",
)
FIELD = (
    "What is the {key}?",
    "Extract the {key}.",
    "Give only the {key}.",
    "Which {key} does the text name?",
    "Find the {key} in this text.",
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a careful editor.",
    "Follow the instruction exactly.",
    "You are Parlay, a small language model.",
    "Answer with the result only.",
)
HELDOUT_LAYOUTS = (
    "{instruction}\n\n[begin]\n{text}\n[end]",
    "Consider the following.\n\n<!-- scope -->\n{text}\n<!-- scope over -->\n\n{instruction}",
    "{instruction}\n\n=== input ===\n{text}\n=== output ===",
)
MARKS = (
    ("start", "stop"),
    ("top", "bottom"),
    ("open", "close"),
    ("from here", "to here"),
    ("quote", "unquote"),
    ("text", "/text"),
    ("passage", "end of passage"),
    ("source", "/source"),
    ("page 1", "page 2"),
    ("A", "B"),
    ("1", "2"),
    ("original", "task"),
    ("draft", "done"),
    ("excerpt", "that was it"),
    ("cut", "cut"),
    ("document", "/document"),
    ("snippet", "snippet ends"),
    ("x", "/x"),
    ("below", "above"),
    ("material", "end"),
)
FRAMES = ("[{}]", "<{}>", "-- {} --", "*** {} ***", "=== {} ===", "|{}|", "~~~ {} ~~~", "<<{}>>", "<-- {} -->")
FENCES = ("```", "~~~", "---", "====", "***", "+++")
LEADS = (
    "See below.",
    "This is what I have.",
    "Take this.",
    "Read this first.",
    "My text is here:",
    "I found this:",
    "Somebody wrote:",
    "Here you are.",
    "Data:",
    "Attached:",
    "Below is a piece of text.",
    "The material:",
)


def made_layout(rng: random.Random) -> str:
    """A layout put together at random: a model is to learn what a layout is rather than which there are.

    The text stands on lines of its own behind an opening line and before a closing one; what comes outside
    of these is set off by an empty line.
    """
    if rng.random() < 0.7:
        frame = rng.choice(FRAMES)
        opening, closing = (frame.format(mark) for mark in rng.choice(MARKS))
    else:
        opening = closing = rng.choice(FENCES)
    block = f"{opening}\n{{text}}\n{closing}"
    if rng.random() < 0.25:
        block = f"{rng.choice(LEADS)}\n\n{block}"
    parts = (block, "{instruction}") if rng.random() < 0.4 else ("{instruction}", block)
    return "\n\n".join(parts)
