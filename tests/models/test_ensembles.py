"""Models that write together: the text is that of their laws, combined by hand, whatever drafts and shares a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parlay import LLM, Ensemble, ParlayError, SamplingParams
from parlay.cache import Budget
from parlay.engine import Engine
from parlay.models.ensembles.ensemble import EnsembleRunner
from parlay.models.ensembles.guided import GuidedRunner
from parlay.models.loading import load_weights, read_config
from parlay.models.native import NativeRunner
from parlay.options import UsageError
from parlay.router.policies import Fixed, Plain
from parlay.sampling.rules import SharedNoise
from parlay.testing import toy_drafters
from parlay.testing.checkpoints import VOCAB_SIZE, random_model, save_random
from parlay.testing.conformance import check_runner
from parlay.testing.conformance.stage import Steady
from parlay.testing.conformance.stages import recomputed, tiny_llama
from parlay.testing.reference import LogitsOf, decode
from parlay.testing.toy_tokenizers import letters
from parlay.testing.toys import RandomLogits, ToyRunner, nan_after
from parlay.types import Drafter, Event, NoiseKey, Request, Runner, Segment, Strategy

RULES = ("mean", "product", "majority", "certainty", "contrast")
STRATEGIES = ("none", "prompt-lookup", "draft-model", "jacobi", "token-recycling", "union")
PROMPTS = [
    [1 + (7 * place + step * step) % (VOCAB_SIZE - 4) for step in range(5 + place % 4)] * 2 for place in range(20)
]


def by_hand(rule: str, members: Sequence[LogitsOf], alpha: float = 0.1) -> LogitsOf:
    """The rules' formulas, written once more and as plainly as can be, in float64."""

    def logits(ids: Sequence[int]) -> Tensor:
        rows = [member(ids).double() for member in members]
        laws = [torch.softmax(row, 0) for row in rows]
        shares = torch.tensor((2, 1, 1)[: len(rows)], dtype=torch.float64)
        choices = [int(law.argmax()) for law in laws]
        if rule == "mean":
            return (torch.stack(laws) * (shares / shares.sum())[:, None]).sum(0).log()
        if rule == "product":
            return (torch.stack(laws).log() * (shares / shares.sum())[:, None]).sum(0)
        if rule == "majority":
            votes = [sum(float(w) for w, other in zip(shares, choices, strict=True) if other == one) for one in choices]
            return rows[votes.index(max(votes))]
        if rule == "certainty":
            sure = [float(share * law.max()) for share, law in zip(shares, laws, strict=True)]
            return rows[sure.index(max(sure))]
        score = 1.5 * laws[0].log() - 0.5 * laws[1].log()
        return score.masked_fill(laws[0] < alpha * laws[0].max(), -math.inf)

    return logits


def ensemble_of(rule: str, models: Sequence[str], alpha: float = 0.1) -> Ensemble:
    if rule == "contrast":
        return Ensemble(models[:1], rule, alpha=alpha)
    return Ensemble(models, rule, (2, 1, 1)[: 1 + len(models)])


def combined(rule: str, runners: Sequence[Runner], alpha: float = 0.1, *, one_budget: bool = False) -> EnsembleRunner:
    return EnsembleRunner(runners, ensemble_of(rule, ["other"] * (len(runners) - 1), alpha), one_budget=one_budget)


# ------------------------------------------------------------------------------------------------------------ runners


@pytest.mark.parametrize(("rule", "cut"), [*((rule, 1) for rule in RULES), ("mean", 4)])
def test_every_row_is_that_of_a_fresh_prefill_in_each_member(rule: str, cut: int) -> None:
    """Whatever is opened, forked, cut back or kept, also where a member goes back to multiples of 4 tokens only."""
    laws = [RandomLogits(12, seed) for seed in (3, 4, 5)][: 2 if rule == "contrast" else 3]
    hand = by_hand(rule, laws, alpha=0)

    def open_runner(capacity: int) -> Runner:
        members = [ToyRunner(law, 12, capacity=capacity, cut=own) for law, own in zip(laws, (1, cut, 1), strict=False)]
        return combined(rule, members, alpha=0)

    def with_offset(ids: Sequence[int]) -> Tensor:
        """The hand's row of log-probabilities with what the first member's logits have besides."""
        offset = laws[0](ids).double().logsumexp(0)
        return hand(ids) if rule in ("majority", "certainty") else hand(ids) + offset

    report = check_runner(open_runner, with_offset, noise_bound=1e-4, steps=40)
    assert report.passed, str(report)


def tiny(seed: int, budget: Budget | None = None, capacity: int = 2048) -> NativeRunner:
    torch.manual_seed(seed)
    config = replace(tiny_llama(256), canvas=None)
    weights = dict(random_model("llama", seed=seed).state_dict())
    cpu = torch.device("cpu")
    return NativeRunner(
        config, weights, dtype=torch.float32, device=cpu, max_tokens_cached=capacity, budget=budget, name=f"tiny {seed}"
    )


def test_native_members_in_one_memory_give_the_bits_of_a_fresh_prefill() -> None:
    def open_runner(capacity: int) -> Runner:
        budget = Budget(targets=2)
        return combined("mean", [tiny(seed, budget, capacity) for seed in (1, 2)], one_budget=True)

    report = check_runner(open_runner, recomputed(open_runner(1024)), steps=25)
    assert report.passed, str(report)


def test_room_is_counted_for_all_members() -> None:
    """And none takes a running text of another: two members of one size hold half as many tokens as one."""
    alone = tiny(1, Budget(1 << 20))
    budget = Budget(1 << 20, targets=2)
    both = combined("mean", [tiny(1, budget), tiny(2, budget)], one_budget=True)
    assert both.capacity() == pytest.approx(alone.capacity() / 2, abs=16)
    both.open(0, [1] * 8)
    assert both.reserve(0, both.capacity() // 2)
    both.open(1, [2] * 8)
    assert not both.reserve(1, both.capacity() - 32)
    both.check()


# ---------------------------------------------------------------------------------------------------------- the texts


def alone(folder: str) -> LogitsOf:
    """One member's logits in float32, recomputed for each text."""
    config = read_config(Path(folder))
    cpu = torch.device("cpu")
    weights = load_weights(Path(folder), config)
    return recomputed(NativeRunner(config, weights, dtype=torch.float32, device=cpu, max_tokens_cached=1024))


def asks(sampled: bool) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.9 if sampled else 0, top_p=0.95, seed=place, max_tokens=8, ignore_eos=True)
        for place in range(len(PROMPTS))
    ]


def texts(llm: LLM, params: Sequence[SamplingParams], strategy: str = "none") -> list[tuple[int, ...]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[: len(params)]]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, strategy=strategy)]


def expected(logits_of: LogitsOf, params: Sequence[SamplingParams]) -> list[tuple[int, ...]]:
    """What the slow reference writes."""
    requests = [
        Request(id="", prompt=tuple(prompt), params=own, key=NoiseKey(own.seed or 0))
        for prompt, own in zip(PROMPTS, params, strict=False)
    ]
    return [tuple(decode(logits_of, request).output) for request in requests]


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_writes_the_text_of_members_combined_by_hand(rule: str, folders: list[str]) -> None:
    """20 prompts, greedy and sampled, in batches of 8, under plain decoding and five drafters; the other rules share
    the mean's machinery, and get fewer."""
    count, strategies = (20, STRATEGIES) if rule == "mean" else (4, STRATEGIES[:3])
    members = folders[:2] if rule == "contrast" else folders
    logits_of = by_hand(rule, [alone(folder) for folder in members])
    draft = folders[0]
    with LLM(
        folders[0], ensemble=ensemble_of(rule, folders[1:]), dtype="float32", draft_model=draft, max_num_seqs=8
    ) as llm:
        for params in (asks(sampled=False), asks(sampled=True)):
            wanted = expected(logits_of, params[:count])
            for strategy in strategies:
                assert texts(llm, params[:count], strategy) == wanted, f"{rule}, {strategy}"
        llm.runner.check()


@pytest.mark.parametrize("rule", RULES)
def test_identical_members_are_the_single_model_bit_for_bit(rule: str, folders: list[str]) -> None:
    """Log-probabilities included; contrast without its bound, which hides unlikely tokens."""
    first = folders[0]
    same = Ensemble([first], rule, alpha=0) if rule == "contrast" else Ensemble([first, first], rule)
    params = [SamplingParams(temperature=1, seed=place, max_tokens=8, logprobs=3) for place in range(4)]
    with LLM(first, dtype="float32") as one, LLM(first, dtype="float32", ensemble=same) as all_of_them:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:4]]
        plain = [output.outputs[0] for output in one.generate(prompts, params)]
        together = [output.outputs[0] for output in all_of_them.generate(prompts, params)]
        assert [output.token_ids for output in together] == [output.token_ids for output in plain]
        assert [output.logprobs for output in together] == [output.logprobs for output in plain]


@pytest.mark.parametrize("rule", ["majority", "mean"])
def test_it_is_said_who_wrote_what_where_one_model_decides(rule: str, folders: list[str]) -> None:
    """Whatever proposed the tokens. Members of one name are told apart by their places."""
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)] * 2
    members = [alone(folder) for folder in folders]
    with LLM(folders[0], ensemble=Ensemble(folders[1:], rule), dtype="float32") as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]]
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, strategy="jacobi")]
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        decided = []
        for length in range(len(output.token_ids)):
            choices = [int(member([*prompt, *output.token_ids[:length]]).argmax()) for member in members]
            decided.append(Path(folders[[choices.count(choice) for choice in choices].index(
                max(choices.count(choice) for choice in choices))]).name)  # fmt: skip
        assert output.writers == (tuple(decided) if rule == "majority" else ())
    both = EnsembleRunner([tiny(1), tiny(1)], Ensemble("other", "certainty"), one_budget=False)
    both.open(0, [])
    both.reserve(0, 8)
    assert both.forward([Segment(0, (1, 2))]).writers == ("tiny 1 (1)",) * 2


def test_preemption_changes_no_text_of_an_ensemble(folders: list[str]) -> None:
    """In memory for a few texts of two members; the engine counts both."""
    params = [SamplingParams(temperature=0.8, seed=place, max_tokens=40, ignore_eos=True) for place in range(6)]
    with LLM(folders[0], ensemble=folders[1], dtype="float32") as llm:
        roomy = texts(llm, params)
        page = sum(member.store.shape.page_bytes for member in llm.runner._members)  # type: ignore[attr-defined]
    with LLM(folders[0], ensemble=folders[1], dtype="float32", memory=9 * page) as llm:
        assert texts(llm, params, "prompt-lookup") == roomy
        llm.runner.check()
        stats = llm.engine.stats()
        assert stats.preemptions > 0
        assert stats.cache_tokens_used == 0


# ---------------------------------------------------------------------------------------------------------- bad input


PROMPTED = {"short": [1, 2], "long": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], "spared": [3] * 13}


def engine_of(ensemble: Ensemble, *laws: LogitsOf) -> Engine:
    """Over toys, of which ``laws`` are the logits."""
    return Engine(EnsembleRunner([ToyRunner(law, 12) for law in laws], ensemble, one_budget=False), Steady())


def ended(engine: Engine, drafters: Sequence[Drafter]) -> tuple[dict[str, list[int]], dict[str, Event]]:
    """Texts and last events of three requests: one that never has 12 tokens, one that comes to them, one beyond."""
    for name, prompt in PROMPTED.items():
        policy = Fixed(3) if drafters else Plain()
        engine.add(asked(name, prompt), Strategy("toy", tuple(drafters), SharedNoise(), policy))
    events = [event for _ in range(40) for event in engine.step()]
    texts = {
        name: [one.token for event in events if event.request == name for one in event.committed] for name in PROMPTED
    }
    return texts, {event.request: event for event in events if event.finish_reason is not None}


def asked(name: str, prompt: Sequence[int]) -> Request:
    params = SamplingParams(temperature=1, max_tokens=8)
    return Request(id=name, prompt=tuple(prompt), params=params, key=NoiseKey(4))


@pytest.mark.parametrize("drafting", [False, True])
def test_a_member_that_gives_nan_ends_only_the_requests_that_meet_it(drafting: bool) -> None:
    """The error names it. What was drafted does not matter: only the text does."""
    laws = RandomLogits(12, 1), nan_after(RandomLogits(12, 2), 12)
    drafters = [toy_drafters.oracle(toy_drafters.answer_by(laws[0]))] if drafting else []
    _, done = ended(engine_of(Ensemble("other"), *laws), drafters)
    assert {name: event.finish_reason for name, event in done.items()} == {
        "short": "length", "long": "error", "spared": "length",
    }  # fmt: skip
    assert "logits of toy are NaN for this text" in str(done["long"].error)


@pytest.mark.parametrize("drafting", [False, True])
def test_a_failed_member_is_dropped_where_the_ensemble_says_so_and_the_result_tells(drafting: bool) -> None:
    """The text goes on as the others write it, and is lossy; the rest of the batch keeps all members."""
    first, second = RandomLogits(12, 1), RandomLogits(12, 2)
    drafters = [toy_drafters.oracle(toy_drafters.answer_by(first))] if drafting else []
    ensemble = Ensemble("other", weights=(2, 1), drop_failed=True)
    texts, done = ended(engine_of(ensemble, first, nan_after(second, 12)), drafters)
    metrics = {name: event.metrics for name, event in done.items() if event.metrics is not None}
    assert {name: own.lost_members for name, own in metrics.items()} == {
        "short": (),
        "long": ("toy (2)",),
        "spared": (),
    }
    assert [metrics[name].exactness for name in ("spared", "long")] == ["bits", "lossy"]
    both = by_hand("mean", [first, second])
    for name, prompt in PROMPTED.items():
        law: LogitsOf = both if name != "long" else lambda ids: both(ids) if len(ids) < 12 else first(ids)
        assert texts[name] == decode(law, asked(name, prompt)).output


def switched(law: LogitsOf, later: LogitsOf, length: int) -> LogitsOf:
    """One law for shorter texts, and another from a length on."""
    return lambda ids: law(ids) if len(ids) < length else later(ids)


def test_a_late_member_is_dropped_and_the_result_tells() -> None:
    """On a virtual clock: from a forward on that took too long, but for prompts, and for all texts in that forward."""
    first, second, now = RandomLogits(12, 1), RandomLogits(12, 2), [0.0]

    def slow(ids: Sequence[int]) -> Tensor:
        now[0] += 1.0 if len(ids) >= 12 else 0.25
        return second(ids)

    both = by_hand("mean", [first, second])
    for together in (("long",), ("short",), ("spared",), ("short", "spared")):
        ensemble = Ensemble("other", weights=(2, 1), deadline=0.5)
        members = [ToyRunner(law, 12) for law in (first, slow)]
        engine = Engine(EnsembleRunner(members, ensemble, one_budget=False, clock=lambda: now[0]), Steady())
        for name in together:
            engine.add(asked(name, PROMPTED[name]), Strategy("toy", (), SharedNoise(), Plain()))
        events = [event for _ in range(12) for event in engine.step()]
        for name in together:
            own = [event for event in events if event.request == name]
            text = [one.token for event in own for one in event.committed]
            after = {"short": 99, "long": 12, "spared": 14}[name] if len(together) == 1 else len(PROMPTED[name]) + 1
            assert text == decode(switched(both, first, after), asked(name, PROMPTED[name])).output, together
            metrics = own[-1].metrics
            assert metrics is not None
            late = after < 99
            assert (metrics.lost_members, metrics.exactness) == ((("toy (2)",), "lossy") if late else ((), "bits"))


@pytest.mark.parametrize("lenient", [Ensemble("parlay-mini", deadline=60), Ensemble("parlay-mini", drop_failed=True)])
def test_where_members_may_be_left_out_no_exactness_is_promised(lenient: Ensemble) -> None:
    with LLM("parlay-mini", ensemble=lenient, strategy="none", router_memory="off") as llm:
        params = SamplingParams(temperature=0, max_tokens=2)
        with pytest.raises(ValueError, match="bits is stricter than this model guarantees: ask for lossy"):
            llm.generate("Once", params, exactness="bits")
        assert llm.generate("Once", params)[0].chosen.token_ids


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Ensemble([]), "must name one or more other models"),
        (lambda: Ensemble("a", deadline=0), "ensemble deadline must be above 0 seconds, got 0"),
        (lambda: Ensemble("a", "contrast", deadline=1), "can't be used with drop_failed and deadline"),
        (lambda: Ensemble("a", "sum"), "ensemble rule 'sum': choose one of"),
        (lambda: Ensemble("a", weights=(1, 0)), "weights must be above 0, got 0"),
        (lambda: Ensemble("a", weights=(1, -2)), "weights must be above 0, got -2"),
        (lambda: Ensemble("a", weights=(1, math.nan)), "weights must be above 0, got nan"),
        (lambda: Ensemble("a", weights=(1,)), "ensemble weights must be 2 numbers, one for each model, got 1"),
        (lambda: Ensemble(["a", "b"], "contrast"), "contrast needs one other model"),
        (lambda: Ensemble("a", "contrast", alpha=2), "contrast alpha must be between 0 and 1, got 2"),
        (lambda: LLM("parlay-mini", ensemble="/no/such/model"), "/no/such/model"),
        (lambda: LLM("parlay-mini", ensemble="parlay-mini", certificates=["x"]), "certificates is for one model"),
        (lambda: LLM("parlay-mini", ensemble="parlay-mini", prefix_cache="x"), "prefix_cache is for one model"),
        (lambda: LLM("parlay-mini", ensemble="parlay-mini", tensor_parallel_size=2), "run in one process"),
    ],
)
def test_what_can_not_be_an_ensemble_is_one_clear_line(make: Callable[[], object], line: str) -> None:
    with pytest.raises(ParlayError, match=line) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_members_whose_tokenizers_have_little_in_common_are_refused(folders: list[str], tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    letters("abcdefgh").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"has 0% of the commonest tokens of .*, and 50% are needed: name a model"):
        LLM(folders[0], ensemble=str(tmp_path))


# ----------------------------------------------------------------------------------------------------------- guidance


@pytest.fixture(scope="module")
def guided(folders: list[str]) -> Iterator[LLM]:
    with LLM(folders[0], dtype="float32", draft_model=folders[2], max_num_seqs=8) as llm:
        yield llm


def guided_by_hand(logits_of: LogitsOf, prompt: Sequence[int], negative: Sequence[int], scale: float) -> LogitsOf:
    def logits(ids: Sequence[int]) -> Tensor:
        own = torch.log_softmax(logits_of(ids).double(), 0)
        other = torch.log_softmax(logits_of([*negative, *ids[len(prompt) :]]).double(), 0)
        return other + scale * (own - other)

    return logits


def test_guided_texts_are_those_of_two_prompts_combined_by_hand(guided: LLM, folders: list[str]) -> None:
    """Under five drafters, beside requests that are not guided, whose text is as it always is."""
    one, scales, law = [], [0.0, 1.0, 1.5, 3.0], alone(folders[0])
    for place in range(len(PROMPTS)):
        negative = PROMPTS[(place + 3) % len(PROMPTS)][: 1 + place % 9] if place % 5 else None
        scale = scales[place % 4]
        one.append(
            SamplingParams(
                temperature=0.8 * (place % 2), seed=place, max_tokens=8, ignore_eos=True,
                guidance_scale=scale, negative_prompt=negative,
            )
        )  # fmt: skip
    wanted = []
    for prompt, own in zip(PROMPTS, one, strict=True):
        by = guided_by_hand(law, prompt, own.negative_prompt or prompt[-1:], own.guidance_scale)  # type: ignore[arg-type]
        request = Request(id="", prompt=tuple(prompt), params=own, key=NoiseKey(own.seed or 0))
        wanted.append(tuple(decode(by, request).output))
    for strategy in STRATEGIES:
        assert texts(guided, one, strategy) == wanted, strategy
    guided.runner.check()
    assert guided.engine.stats().cache_tokens_used == 0


def test_a_negative_prompt_equal_to_the_prompt_changes_no_bit(guided: LLM) -> None:
    plain = SamplingParams(temperature=1, seed=3, max_tokens=12, logprobs=2)
    same = SamplingParams(
        temperature=1, seed=3, max_tokens=12, logprobs=2, guidance_scale=4, negative_prompt=PROMPTS[0]
    )
    prompt = {"prompt_token_ids": PROMPTS[0]}
    (one,), (other,) = (guided.generate([prompt], params)[0].outputs for params in (plain, same))
    assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def test_long_negative_prompts_samples_and_preemption_change_no_guided_text(folders: list[str]) -> None:
    """Chunks of prefill, three samples of one prompt, and memory for a few texts only."""
    params = [
        SamplingParams(
            n=3, temperature=1, seed=place, max_tokens=40, guidance_scale=2, negative_prompt=PROMPTS[place] * 6
        )
        for place in range(4)
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:4]]

    def read(llm: LLM) -> list[list[tuple[int, ...]]]:
        return [[one.token_ids for one in output.outputs] for output in llm.generate(prompts, params)]

    with LLM(folders[0], dtype="float32") as llm:
        roomy = read(llm)
        page = llm.runner.store.shape.page_bytes  # type: ignore[attr-defined]
    with LLM(folders[0], dtype="float32", memory=24 * page, max_num_batched_tokens=16, max_num_seqs=8) as llm:
        assert read(llm) == roomy
        assert llm.engine.stats().preemptions > 0
        llm.runner.check()


def test_chances_of_the_prompt_are_those_without_guidance(folders: list[str]) -> None:
    """Wherever its chunks end, and however long the negative prompt is."""
    prompt = {"prompt_token_ids": PROMPTS[0] * 5}
    plain = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    guided = replace(plain, guidance_scale=3, negative_prompt=PROMPTS[1] * 12)
    with LLM(folders[0], dtype="float32", max_num_batched_tokens=16, max_num_seqs=2) as llm:
        one, other = (llm.generate([prompt], params)[0].prompt_logprobs for params in (plain, guided))
    assert one == other


def test_a_form_may_ask_for_tokens_that_contrast_excludes(folders: list[str]) -> None:
    """Where nothing else is left, they come in the first model's order; but no law moves away from excluded tokens."""
    prompt = {"prompt_token_ids": PROMPTS[0]}
    only = SamplingParams(temperature=0, max_tokens=6, allowed_token_ids=[7, 8, 9], ignore_eos=True, logprobs=0)
    with LLM(folders[0], dtype="float32", ensemble=Ensemble(folders[1:2], "contrast", alpha=1)) as llm:
        (output,) = llm.generate([prompt], only)[0].outputs
        assert set(output.token_ids) <= {7, 8, 9}
        assert output.cumulative_logprob is not None
        assert math.isfinite(output.cumulative_logprob)
        with pytest.raises(ValueError, match="guidance_scale can't be honoured by"):
            llm.generate([prompt], SamplingParams(guidance_scale=2))


def test_an_ensemble_can_be_guided(folders: list[str]) -> None:
    params = [SamplingParams(temperature=0, max_tokens=8, guidance_scale=2, negative_prompt=[5, 6, 7], ignore_eos=True)]
    law = by_hand("product", [alone(folder) for folder in folders[:2]])
    by = guided_by_hand(law, PROMPTS[0], [5, 6, 7], 2)
    with LLM(folders[0], dtype="float32", ensemble=ensemble_of("product", folders[1:2])) as llm:
        assert texts(llm, params, "prompt-lookup") == expected(by, params)


def test_what_can_not_guide_is_one_clear_line(guided: LLM) -> None:
    prompt = {"prompt_token_ids": PROMPTS[0]}

    def refuse(match: str, **fields: Any) -> None:
        with pytest.raises(ValueError, match=match):
            guided.generate([prompt], SamplingParams(max_tokens=4, **fields))

    refuse("guidance_scale must be between 0 and 100", guidance_scale=-1)
    refuse("guidance_scale must be between 0 and 100", guidance_scale=math.nan)
    refuse("negative_prompt must be a non-empty string or list", guidance_scale=2, negative_prompt=[])
    refuse("negative_prompt must be a non-empty string or list", guidance_scale=2, negative_prompt=5)
    refuse("negative_prompt: a prompt must be a text, a list", guidance_scale=2, negative_prompt=["a"])
    refuse("negative_prompt must have ids from 0 to 63", guidance_scale=2, negative_prompt=[64])
    refuse("negative_prompt of 254 tokens and the output", guidance_scale=2, negative_prompt=[5] * 254)


def test_in_a_chat_the_negative_prompt_is_the_system_message() -> None:
    """So it is the same as the ids of the conversation with that system message."""
    ask = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
    told = [{"role": "system", "content": "Be long."}, ask[1]]
    with LLM("parlay-mini") as llm:
        text = SamplingParams(temperature=0, max_tokens=8, guidance_scale=2, negative_prompt="Be long.")
        ids = llm.job(told).samples[0].request.prompt
        by_ids = SamplingParams(temperature=0, max_tokens=8, guidance_scale=2, negative_prompt=ids)
        first, second = (llm.chat(ask, params)[0].outputs[0] for params in (text, by_ids))
        assert first.token_ids == second.token_ids
        assert llm.job(ask, text).samples[0].request.guidance == llm.job(ask, by_ids).samples[0].request.guidance


def test_a_guided_runner_keeps_the_protocol() -> None:
    law = RandomLogits(12, 3)
    report = check_runner(lambda capacity: GuidedRunner(ToyRunner(law, 12, capacity=capacity)), law, steps=20)
    assert report.passed, str(report)
