"""`parlay generate --json-schema`, `--regex`, `--choice`: what the text must be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import MINI, Cli
from tests.cli.test_generate import failed

SCHEMA = (
    '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false}'
)
NOWHERE = ("generate", "Fine?", "--model", "/nowhere/at/all")


def test_the_text_is_what_was_asked_for(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(SCHEMA)
    assert list(json.loads(cli("generate", "Fine?", *MINI, "--json-schema", str(tmp_path / "schema.json")).out)) == [
        "ok"
    ]
    inline = cli("generate", "Fine?", *MINI, "--json-schema", (tmp_path / "schema.json").read_text())
    assert list(json.loads(inline.out)) == ["ok"]
    assert json.loads(cli("generate", "Fine?", *MINI, "--json-schema", "true").out) is not None
    chosen = cli("generate", "Fine?", *MINI, "--choice", "no", "--choice", "yes")
    assert chosen.out.strip() in ("no", "yes")
    assert "--chat" not in chosen.err  # a choice of one token ends as it was asked to
    assert cli("generate", "Fine?", *MINI, "--regex", "[0-9]{4}").out.strip().isdigit()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--json-schema", "/nowhere/schema"), "can't read the schema /nowhere/schema: No such file"),
        (("--json-schema", '{"not":' * 20_000), "is not JSON: maximum recursion depth exceeded"),
        (("--json-schema", ""), "the file of the schema has an empty name: name a file"),
        (("--document", ""), "the file of the document has an empty name: name a file"),
        (("--choice", ""), "--choice must be a list of non-empty strings"),
        (("--regex", "a", "--choice", "a"), "--choice can't be used with --regex"),
    ],
)
def test_what_can_not_be_asked_is_said_before_a_model_loads(cli: Cli, flags: tuple[str, ...], message: str) -> None:
    failed(cli(*NOWHERE, *flags), 2, message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--regex", "a("), "--regex is not valid: "),
        (("--regex", "()"), "--regex allows only the empty text"),
        (("--choice", "a" * 1_100_000), "--choice has 1100000 bytes"),
        (("--json-schema", '{"not": {}}'), '--json-schema {"not": {}} has "not", which can\'t be enforced'),
        (("--regex", "a", "--steps-model", "parlay-mini-draft"), "--regex can't be used with steps"),
    ],
)
def test_an_error_of_the_form_names_the_flag_that_asked_for_it(cli: Cli, flags: tuple[str, ...], message: str) -> None:
    failed(cli("generate", "Fine?", *MINI, *flags), 2, message)


def test_a_schema_that_no_text_follows_is_no_file(cli: Cli) -> None:
    failed(cli("generate", "Fine?", *MINI, "--json-schema", "false"), 2, "--json-schema false is a schema that")


def test_a_text_that_max_tokens_cut_is_a_failure_that_says_so(cli: Cli) -> None:
    result = cli("generate", "Fine?", *MINI, "--regex", "[0-9]{40}", "--max-tokens", "2")
    assert result.code == 1
    assert "raise --max-tokens" in result.err.splitlines()[-1]
