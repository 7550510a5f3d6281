"""In a notebook: what there is can be listed, values are short in print, results and waits can be looked at."""

from __future__ import annotations

import asyncio
import html
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

import parlay
from parlay import LLM, AsyncLLM, SamplingParams
from parlay.llm.notebook_html import shown, steps
from parlay.system.progress import bar, watched

GREEDY = SamplingParams(temperature=0, max_tokens=40)
COPY = "Say it again and again: one two three <b>four</b> & five. one two three <b>four</b> & five. one two three"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("parlay-mini", dtype="float32", strategy="prompt-lookup:policy=fixed,k=4") as model:
        yield model


def test_dir_shows_what_there_is() -> None:
    assert {"LLM", "AsyncLLM", "SamplingParams", "RequestOutput"} <= set(dir(parlay))
    assert all(getattr(parlay, name) is not None for name in dir(parlay))
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = parlay.LMM  # type: ignore[attr-defined]


def test_values_are_short_in_print(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=5, prompt_logprobs=5)
    (output,) = llm.generate(COPY, params)
    assert repr(llm) == "LLM('parlay-mini', strategy='prompt-lookup:policy=fixed,k=4')"
    assert repr(SamplingParams(temperature=0, max_tokens=3)) == "SamplingParams(temperature=0, max_tokens=3)"
    assert len(repr(output)) < 400
    assert len(repr(output.outputs[0].metrics)) < 150
    assert "and 38 more" in repr(output.outputs[0].logprobs)
    assert "None" in repr(output.prompt_logprobs)
    for event in llm.stream(COPY, GREEDY):
        assert repr(event).startswith("StreamEvent(")


def text_of(markup: str) -> str:
    return html.unescape(re.sub(r"<svg.*?</svg>|<[^>]+>", "", markup))


def test_a_result_shows_its_text_coloured_by_source_and_a_bar_for_each_step(llm: LLM) -> None:
    outputs = llm.generate([COPY, "Hello"], GREEDY)
    markup = outputs._repr_html_()  # type: ignore[attr-defined]
    for output in outputs:
        sample = output.outputs[0]
        own = output._repr_html_()
        assert own in markup
        assert sample.text in text_of(own)
        assert output.prompt is not None
        assert output.prompt[:40] in text_of(own)
        assert "<b>" not in own
        tree = ElementTree.fromstring(own.replace("&nbsp;", " ").replace("<br>", "<br/>"))
        picture = tree.find(".//svg")
        assert picture is not None
        assert len(picture.findall("rect")) == len(sample.token_ids)
        assert len({rect.get("x") for rect in picture.findall("rect")}) == sample.metrics.steps
        coloured = "".join(span.text or "" for span in tree.iter("span") if span.get("title") == "prompt-lookup")
        assert bool(coloured) == ("prompt-lookup" in sample.sources)
    assert any("prompt-lookup" in output.outputs[0].sources for output in outputs)


def test_runs_are_cut_where_tokens_end_and_at_a_stop() -> None:
    markup = shown("abcdé", [1, 3, 3, 9], ["target", "copy", "copy", "target"], "", "")
    assert '<span style="background:#2a9d8f40;border-radius:3px" title="copy">bc</span>' in markup
    assert "abcdé" in text_of(markup)
    assert steps(["copy", "target", "target", "copy", "copy"]) == [["copy", "target"], ["target"], ["copy", "copy"]]
    assert "160 of 200" in shown("x", [1] * 200, ["target"] * 200, "", "")
    assert "<svg" not in shown("", [], [], "", "")


def test_bars_are_shown_in_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not watched()
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert watched()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not watched()


def test_a_load_is_counted_matrix_by_matrix() -> None:
    seen: list[tuple[int, int]] = []

    def make(**options: object) -> object:
        made = bar(None, "", "", False)
        made.update = lambda n: seen.append((made.n, made.total))  # type: ignore[method-assign]
        return made

    LLM("parlay-mini", use_tqdm_on_load=make).close()  # type: ignore[arg-type]
    if seen:  # torch's operators pack nothing
        assert len(seen) == seen[-1][1] > 10


def test_an_async_llm_is_made_from_a_name() -> None:
    async def ask() -> str:
        async with AsyncLLM("parlay-mini") as service:
            assert repr(service) == "AsyncLLM(LLM('parlay-mini', strategy='auto'))"
            return (await service.generate("Once upon a time", GREEDY)).outputs[0].text

    with LLM("parlay-mini") as llm:
        assert asyncio.run(ask()) == llm.generate("Once upon a time", GREEDY)[0].outputs[0].text
