"""The prompts of the demo: one for each kind of text on which drafting pays off, and one on which it hardly does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A conversation as (role, text) turns, or a single turn without a role to continue."""

    name: str
    turns: tuple[tuple[str, str], ...]

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": role, "content": text} for role, text in self.turns]

    @property
    def text(self) -> str:
        """The turns as one text, for a model without a chat format."""
        return "\n\n".join(text for _, text in self.turns) + ("\n\n" if self.is_chat else "")

    @property
    def is_chat(self) -> bool:
        return all(role for role, _ in self.turns)


_FUNCTION = '''\
def moving_average(values, window):
    """Mean of each run of `window` values."""
    averages = []
    total = 0
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        if index >= window - 1:
            averages.append(total / window)
    return averages'''

_PASSAGE = """\
The ferry leaves the north pier every morning at ten past seven. In summer it carries walkers and their dogs, a few
bicycles, and the letters for the three islands; in winter it carries mostly coal and bread. The crossing takes forty
minutes when the sea is calm. Old Mr. Harding, who has steered it for thirty years, says that he has never once looked
at the clock, because the gulls tell him when it is time to turn."""

_MENU = (
    '{"menu_items": [{"menu_item_id": "latte-2871", "name": "Latte"}, '
    '{"menu_item_id": "iced-latte-514", "name": "Iced Latte"}]}'
)
_ADDONS = (
    '{"attributes": [{"attribute_id": "milk-options", "attribute_name": "Milk", "options": '
    '["Whole Milk", "Oat Milk", "Almond Milk"]}]}'
)

EDIT = DemoPrompt(
    "edit", (("user", f"Rename the variable value to number in this code.\n\n[code]\n{_FUNCTION}\n[/code]"),)
)
CALL = DemoPrompt(
    "JSON call",
    (
        ("system", "You take coffee orders. Answer with a JSON call, or with a short reply."),
        ("user", "Could I have an iced latte with oat milk?"),
        ("assistant", '{"name": "get_menu_items", "arguments": {"query": "iced latte"}}'),
        ("tool", _MENU),
        ("assistant", '{"name": "get_addons", "arguments": {"query": "oat milk", "menu_item_id": "iced-latte-514"}}'),
        ("tool", _ADDONS),
    ),
)
COPY = DemoPrompt(
    "copy", (("user", f"Repeat the following text exactly:\n\n[text]\n{' '.join(_PASSAGE.splitlines())}\n[/text]"),)
)
PROSE = DemoPrompt(
    "prose", (("", "It was late in the autumn when the stranger came to the village. He had walked all day, and"),)
)
