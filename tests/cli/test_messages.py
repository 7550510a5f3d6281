"""Every error line that a user can cause without a model, on one page: read it whole after a change."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

PAGE = Path(__file__).parent / "messages.txt"
LINES = """\
genrate
-m model.gguf
generate
generate ''
generate a tale
generate x --file y
generate --file nowhere.txt
generate x --temprature 1
generate x --zzz
generate x --temperature hot
generate x --temperature -1
generate x --top-p 1.5
generate x --typical-p 0
generate x --min-p 2
generate x --top-k -2
generate x --max-tokens -3
generate x --vote 1
generate x --vote 8 --answer '('
generate x --vote 8 --temperature 0
generate x --vote 8 --vote-confidence 2
generate x --answer number
generate x --max-tokens 99999999999999999999999
generate x --strategy prompt-lookup:k=99999999999999999999999
generate x --min-tokens 9 --max-tokens 4
generate x --repetition-penalty 0
generate x --stop ''
generate x --dtype int3
generate x --threads 0
generate x --ngram-states 0
generate x --strategy foo
generate x --strategy prompt-lokup
generate x --strategy prompt-lookup:gramm=3
generate x --strategy prompt-lookup:k=-1
generate x --strategy prompt-lookup:k
generate x --strategy auto:effort=some
generate x --effort low --strategy none
generate x --effort low --strategy auto:effort=high
generate x --exactness most
generate x --exactness lossy:flor=0.5
generate x --model ./nowhere
generate x --model nowhere.gguf
generate x --model parlay-mini:Q8_0
generate x --model user/repo:
generate x --document nowhere.txt
generate x --prediction nowhere.txt
generate x --json-schema nowhere.json
generate x --json-schema '{bad'
generate x --json-schema a --regex b
generate x --chat-template chatml
generate x --lora-scaled adapter
generate x --grammar root
generate x --data-parallel-size 2
generate x -np 4
generate x --revision abc
chat --load nowhere.json
chat --model ./nowhere
serve --port 70000
serve --host 0.0.0.0
serve --api-key a --no-auth
gateway --replica http://h --api-key a --no-auth
gateway --replica http://h --api-key-file nowhere
serve a a
serve --model-dir ./nowhere
serve --router-memory per-key
serve --served-model-name mine
serve --effort low --strategy none
serve --otlp-traces-endpoint localhost:4318
serve --cors-origin example.com
serve --cors-origin https://example.com/
serve --max-loaded 0
serve --max-concurrency 0
serve --api-key-file nowhere
serve --tokenizer t a b
pull ./nowhere
pull parlay-mini
rm parlay-mini
rm smollm2
drafters
drafters info nowhere
drafters remove nowhere
export nowhere out --format vllm
export nowhere out
strategies foo
router
router show --zzz
datastore build nowhere -o s
datastore build - -o no/such/s
datastore info nowhere
train lm
train --data x lm
train everything
completion fish
"""


def test_the_page_of_messages_changes_only_on_purpose(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Write what the assertion shows to ``messages.txt`` if it reads well. Each is one line."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    parts = []
    for line in LINES.splitlines():
        result = cli(*shlex.split(line))
        assert result.code in (1, 2), line
        assert result.err.count("\n") == 1, result.err
        parts.append(f"$ parlay {line}\n{result.err}")
    page = "\n".join(parts).replace(str(tmp_path), "CACHE")
    (tmp_path / "messages.txt").write_text(page)
    assert page == PAGE.read_text(encoding="utf-8")
