"""`LLM`: the one place that joins a runner, the catalogue of strategies, policies and the engine."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from parlay import models
from parlay.cache import Budget, parse_bytes
from parlay.chat_template import Messages
from parlay.cost.measured import calibrate
from parlay.documents import Document, Documents, Predictions, prediction_ids, predictions, references
from parlay.drafters.resources import Resources
from parlay.engine import Engine, Limits
from parlay.heads.opening import heads_of
from parlay.models.loading import load_tokenizer
from parlay.models.resolving import resolve, resolve_tokenizer
from parlay.one_call import OneCall
from parlay.options import LoadOptions, override
from parlay.outputs import RequestOutput, StreamEvent
from parlay.requests import ChatOptions, Job, Prompt, RequestFactory, RequestOptions
from parlay.strategies.cache import BUILT_IN_DRAFTS, RunnerCache, StrategyCache
from parlay.strategies.offering import offered
from parlay.strategies.spelling import StrategySpec
from parlay.types import ParlayError, RunnerSpec, SamplingParams, Tokenizer
from parlay.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_STRATEGY = "prompt-lookup"
PREDICTION_STRATEGY = "prediction"
"""The default for requests that come with a prediction."""

Prompts = Prompt | Sequence[Prompt]
PerPrompt = SamplingParams | Sequence[SamplingParams] | None
Strategies = str | StrategySpec | Sequence[str | StrategySpec] | None
T = TypeVar("T")


class LLM:
    """A model that decodes several tokens per forward pass. Argument names are vLLM's where it has them.

    ``model`` is a built-in name, a local checkpoint directory, a Hugging Face Hub id, or a loaded transformers model.
    ``tokenizer`` replaces the model's own; it may be the ``vocabulary`` of an earlier LLM of the same model.
    ``strategy`` is the default for requests that name none. ``seed`` makes requests without a seed of their own
    reproducible; otherwise each draws one and reports it. ``memory`` bounds what the caches of all its models take
    together, in bytes or as in ``"2GiB"``; by default it follows from what the machine has free. ``load`` says how the
    models are loaded; ``dtype``, ``device``, ``quantize`` and ``threads`` replace its fields of the same name. Any
    thread may call an LLM; a call waits while another thread's is under way.

    Raises ParlayError for a model that can't be had or run, ValueError for an argument out of range.
    """

    def __init__(
        self,
        model: str | PreTrainedModel = "parlay-mini",
        *,
        tokenizer: str | Tokenizer | Vocabulary | None = None,
        strategy: str | StrategySpec = DEFAULT_STRATEGY,
        draft_model: str | None = None,
        load: LoadOptions = models.USUAL,
        dtype: str | None = None,
        device: str | None = None,
        quantize: str | None = None,
        threads: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        seed: int | None = None,
        memory: int | str | None = None,
    ) -> None:
        self._one_call = OneCall()
        budget = self._budget = Budget(parse_bytes(memory) if memory is not None else None)
        limits = Limits(max_sequences=max_num_seqs, max_rows=max_num_batched_tokens, max_context=max_model_len)
        load = override(load, dtype=dtype, device=device, quantize=quantize, threads=threads)
        self.runner = models.load(model, load, budget=budget)
        self.vocabulary = _vocabulary(model, tokenizer, self.runner.spec)
        self.tokenizer = self.vocabulary.tokenizer
        self.engine = Engine(self.runner, calibrate(self.runner), limits)
        drafts = replace(load, quantize=None)
        self._drafts = RunnerCache(lambda name: models.load(name, drafts, budget=budget))
        self._resources = self._find_resources(model, draft_model)
        self._strategies = StrategyCache(self._resources, self.engine.cost, in_use=self.engine.strategies)
        self._strategies.get(strategy)  # a wrong name is an error now, not at the first request
        self._factory = RequestFactory(
            self.vocabulary,
            self.runner.spec.eos_ids,
            self.engine.longest,
            strategy=strategy,
            prediction_strategy=PREDICTION_STRATEGY,
            seed=seed,
        )

    def _find_resources(self, model: str | PreTrainedModel, draft_model: str | None) -> Resources:
        """What drafters may use: draft models, tokenizers and heads are opened when a strategy first needs them."""
        target = self.runner.spec
        return Resources(
            vocab_size=target.vocab_size,
            open_runner=self._drafts,
            default_draft=draft_model or BUILT_IN_DRAFTS.get(target.name),
            tokenizer=self.tokenizer,
            open_tokenizer=lambda name: load_tokenizer(resolve(name)),
            target=target,
            find_head=heads_of(model, target, self._budget),
        )

    def generate(
        self,
        prompts: Prompts,
        sampling_params: PerPrompt = None,
        *,
        strategy: Strategies = None,
        documents: Documents | None = None,
        prediction: Predictions | None = None,
        store: bool = True,
    ) -> list[RequestOutput]:
        """Decode all prompts together and return one output per prompt, in order.

        ``sampling_params`` and ``strategy`` are one for all or one per prompt. ``documents`` are texts (or token ids)
        that outputs may repeat, say what a search has found: one list for all prompts or one per prompt. Strategies
        that copy draft from them; no text depends on them, and they are no part of the prompt. ``prediction`` is what
        the output will mostly be, say a file before an edit, as text or token ids, one for all or one per prompt:
        where no strategy is named, the one that follows predictions is used, and others have it as their first
        document. ``store=False`` keeps strategies that learn from many requests from learning from these.

        Raises ValueError for a prompt, parameter, document or prediction that can't be used, before anything runs, and
        RequestFailed (which holds all outputs) when a sample failed while the others went on.
        """
        jobs = self._jobs(prompts, sampling_params, strategy, documents=documents, prediction=prediction, store=store)
        for _ in self._run(jobs):
            pass
        outputs = [job.output() for job in jobs]
        failed = [sample for output in outputs for sample in output.outputs if sample.error]
        if failed:
            raise RequestFailed(f"{len(failed)} of the samples failed; the first: {failed[0].error}", outputs)
        return outputs

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: PerPrompt = None,
        *,
        strategy: Strategies = None,
        documents: Documents | None = None,
        prediction: Predictions | None = None,
        store: bool = True,
    ) -> list[RequestOutput]:
        """`generate` for one conversation or several, each a list of {"role": ..., "content": ...}."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self._factory.chat(conversation, ChatOptions()) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(
            prompts, sampling_params, strategy=strategy, documents=documents, prediction=prediction, store=store
        )

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        strategy: str | StrategySpec | None = None,
        documents: Sequence[Document] | None = None,
        prediction: Document | None = None,
        store: bool = True,
    ) -> Stream:
        """Decode one prompt (or conversation) and iterate over what each step adds, as it is committed."""
        options = RequestOptions(strategy=strategy, documents=documents or (), prediction=prediction, store=store)
        job = self.job(prompt, sampling_params, options)
        return Stream(self._run([job]), job)

    def job(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        chat: ChatOptions | None = None,
    ) -> Job:
        """A prompt or conversation made ready to run. Any thread may call this. Raises ValueError or ParlayError.

        ``chat`` says how a conversation becomes a prompt.
        """
        options = options or RequestOptions()
        params = sampling_params or SamplingParams()
        if not isinstance(prompt, str | Mapping):
            cut = params.truncate_prompt_tokens is not None
            prompt = self._factory.chat(prompt, chat or ChatOptions(), cut=cut)
        (texts,) = references([options.documents], 1, self.tokenizer, self.runner.spec.vocab_size)
        ids = prediction_ids(options.prediction, self.tokenizer, self.runner.spec.vocab_size)
        return self._factory.job(prompt, params, options, references=texts, prediction=ids)

    def prepare(self) -> None:
        """Read what the first request would wait for otherwise. For servers, where others would wait with it."""
        self.vocabulary.prepare()

    def add(self, job: Job) -> None:
        """Put a job's samples into the engine. Raises ValueError for what can't run; then none of them is in it."""
        added: list[str] = []
        try:
            for sample in job.samples:
                self.engine.add(sample.request, self._strategies.get(sample.strategy))
                added.append(sample.request.id)
        except Exception:
            for name in added:
                self.engine.abort(name)
            raise

    @property
    def draft_models(self) -> tuple[str, ...]:
        """The draft models that strategies have loaded so far."""
        return self._drafts.names

    def offered(self) -> tuple[str, ...]:
        """The strategies of the catalogue that work for this model by their name alone. Any thread may call this."""
        return offered(self._resources, self.engine.check_needs)

    def reset_prefix_cache(self) -> None:
        """Free what is cached of requests that are over: the next ones compute all of their prompts."""
        self._budget.drop_spare()

    def close(self) -> None:
        """Write what drafters keep in files, free models and caches; the LLM can't be used afterwards."""
        self._strategies.close()
        self.vocabulary.rest()
        del self._strategies, self._resources, self._drafts, self.engine, self.runner

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------------- requests

    def _jobs(
        self,
        prompts: Prompts,
        params: PerPrompt,
        strategy: Strategies,
        *,
        documents: Documents | None,
        prediction: Predictions | None,
        store: bool,
    ) -> list[Job]:
        listed = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        each_params = _one_each(params, SamplingParams(), len(listed), "sampling_params")
        each_strategy: list[str | StrategySpec] = _one_each(strategy, "", len(listed), "strategy")
        each_documents = references(documents, len(listed), self.tokenizer, self.runner.spec.vocab_size)
        each_prediction = predictions(prediction, len(listed), self.tokenizer, self.runner.spec.vocab_size)
        each = zip(listed, each_params, each_strategy, each_documents, each_prediction, strict=True)
        return [
            self._factory.job(
                prompt, own, RequestOptions(strategy=name or None, store=store), references=texts, prediction=ids
            )
            for prompt, own, name, texts, ids in each
        ]

    def _run(self, jobs: Sequence[Job]) -> Generator[StreamEvent]:
        """Add the jobs' samples to the engine and yield events until all are over; leaving early aborts the rest."""
        owners = {sample.request.id: (job, sample) for job in jobs for sample in job.samples}
        live = dict.fromkeys(owners)
        engine = self.engine  # a stream may outlive the LLM's close
        with self._one_call.entered():
            if not engine.idle:
                raise ParlayError("this LLM belongs to an AsyncLLM: ask that one")
            try:
                for job in jobs:
                    self.add(job)
                while live:
                    for event in engine.step():
                        if event.finish_reason is not None:
                            del live[event.request]
                        job, sample = owners[event.request]
                        yield job.event(sample, event)
            finally:
                for name in live:
                    aborted = engine.abort(name)
                    if aborted is not None:
                        owners[name][1].take(aborted)


class RequestFailed(ParlayError):
    """Some samples failed. ``outputs`` holds every request's output; a failed sample's ``error`` says why."""

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs


class Stream(Iterator[StreamEvent]):
    """The events of one prompt. Closing it ends the request at once; `output` is what has been generated."""

    def __init__(self, events: Generator[StreamEvent], job: Job) -> None:
        self._events = events
        self._job = job

    def __next__(self) -> StreamEvent:
        return next(self._events)

    def close(self) -> None:
        self._events.close()

    @property
    def output(self) -> RequestOutput:
        """The whole result, or after `close` the part of it that there is. Raises ParlayError while under way."""
        if not self._job.finished:
            raise ParlayError("the stream is under way: iterate to its end, or close it, before asking for its output")
        return self._job.output()


def _one_each(value: T | Sequence[T] | None, default: T, count: int, name: str) -> list[T]:
    """One value per prompt. Raises ValueError when a list has another length than the prompts."""
    if value is None:
        return [default] * count
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts: give one for all or one for each")
    return list(value)


def _vocabulary(
    model: str | PreTrainedModel, given: str | Tokenizer | Vocabulary | None, spec: RunnerSpec
) -> Vocabulary:
    """The one that is given, if it was made for such a model."""
    if isinstance(given, Vocabulary) and given.fits(spec.vocab_size, spec.eos_ids):
        return given
    tokenizer = given.tokenizer if isinstance(given, Vocabulary) else _tokenizer(model, given)
    return Vocabulary(tokenizer, spec.vocab_size, spec.eos_ids)


def _tokenizer(model: str | PreTrainedModel, tokenizer: str | Tokenizer | None) -> Tokenizer | None:
    if tokenizer is not None and not isinstance(tokenizer, str):
        return tokenizer
    if tokenizer is not None:
        return load_tokenizer(resolve_tokenizer(tokenizer))
    return load_tokenizer(resolve(model)) if isinstance(model, str) else None
