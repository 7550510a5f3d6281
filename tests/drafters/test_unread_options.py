"""Options that nothing would read are refused, with the strategy and what to do."""

from __future__ import annotations

import pytest

from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from tests.drafters.sight import MakeRunner


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("draft-model:model=toy,width=8", "draft-model: width=8 has no effect on a single chain"),
        ("draft-model:model=toy,tokens=9,rule=k-seq", "draft-model: tokens=9 has no effect with rule=k-seq"),
        ("draft-model:model=toy,width=8,rule=block", "draft-model: width=8 has no effect on a single chain"),
        ("cascade:levels=prompt-lookup+draft-model(model=toy,width=2)", "cascade: draft-model: width=2 has no effect"),
        (
            "cascade:levels=prompt-lookup+draft-model(model=toy,tokens=9)",
            "cascade: draft-model: tokens=9 has no effect",
        ),
        ("parallel-draft:model=toy,deadline_ms=5", "parallel-draft: deadline_ms=5.0 has no effect without url="),
        ("parallel-draft:url=http://toy,threads=2", "parallel-draft: threads=2 has no effect with url="),
        ("superposed-draft:model=toy,alpha=0.1", "superposed-draft: alpha=0.1 has no effect without ngrams="),
        ("blockwise:rescore=none,weight=0.1", "blockwise: weight=0.1 has no effect with rescore=none"),
        ("suffix-automaton:min_match=9", "suffix-automaton: min_match=9 has no effect without fallback="),
    ],
)
def test_an_option_that_nothing_reads_is_refused(toy_runner: MakeRunner, spec: str, said: str) -> None:
    runner = toy_runner()
    resources = Resources(vocab_size=runner.spec.vocab_size, open_runner=lambda name: runner)
    with pytest.raises(UsageError, match=said):
        build(parse(spec), resources)


def test_where_something_reads_them_they_are_taken(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    resources = Resources(vocab_size=runner.spec.vocab_size, open_runner=lambda name: runner)
    for spec in (
        "draft-model:model=toy,width=8,shape=tree",
        "draft-model:model=toy,width=8,rule=k-seq",
        "cascade:levels=prompt-lookup+draft-model(model=toy,width=2,shape=tree)",
        "suffix-automaton:min_match=9,fallback=prompt-lookup",
    ):
        assert build(parse(spec), resources) is not None
