"""Turns prompts and parameters into jobs, whose samples are engine requests."""

from __future__ import annotations

import itertools
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from parlay.certificates.gate import CertificateGate, ExactnessChoice, chooses
from parlay.certificates.requirement import Allowed
from parlay.certificates.requirement import parse as allowed_by
from parlay.llm.jobs import Job, Sample, audit_of, resume
from parlay.llm.outputs import token_decoder
from parlay.llm.request_options import RequestOptions
from parlay.llm.vocabulary import Vocabulary
from parlay.llm.voting import Ballot, sampling_of
from parlay.sampling.processors import BadWords, packed
from parlay.strategies.catalogue import find
from parlay.strategies.spelling import StrategySpec
from parlay.structured.after_reasoning import AfterReasoning
from parlay.structured.grammars import Grammar
from parlay.text.chat_template import (
    NO_TEMPLATE,
    ChatOptions,
    Messages,
    in_format,
    render,
    render_pieces,
    with_system,
)
from parlay.text.detokenizer import TextStream
from parlay.text.prompt_kind import PromptClassifier
from parlay.text.prompts import (
    Documents,
    Ids,
    Predictions,
    Prompt,
    Prompts,
    TokensPrompt,
    begins_anew,
    check_known,
    listed,
    one_each,
    prediction_ids,
    predictions,
    references,
    salt_of,
    text_or_ids,
)
from parlay.text.reasoning import Thoughts, expected_thoughts, marks
from parlay.text.tokenize import check_length, check_unicode
from parlay.types import (
    Adapter,
    Constraint,
    Exactness,
    FieldError,
    Guidance,
    NoiseKey,
    ParlayError,
    Request,
    RunnerSpec,
    SamplingParams,
    UsageError,
    check_kind,
)

PerPrompt = SamplingParams | Sequence[SamplingParams] | None
Strategies = str | StrategySpec | Sequence[str | StrategySpec] | None

PREDICTION_STRATEGY = "prediction"  # of requests with a prediction, if the default strategy names other drafters
_SEED_BITS = 53
"""Bits of a drawn seed. JavaScript clients hold numbers as float64, and must be able to send the seed back exactly."""


def _check_params(params: object) -> None:
    check_kind("sampling_params", params, SamplingParams, "a SamplingParams, such as SamplingParams(temperature=0)")


class InputProcessor:
    """Makes jobs: tokenises, resolves seeds and lengths, and gives each sample its detokeniser. Threads may share it.

    A request without a seed gets one: drawn from ``seed``, reproducibly, or from the system if ``seed`` is None. For an
    encoder-decoder, a prompt without the decoder's start token gets it at its end.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        max_context: int,
        spec: RunnerSpec,
        *,
        strategy: StrategySpec,
        seed: int | None,
        gate: CertificateGate,
    ) -> None:
        self._vocabulary, self._tokenizer = vocabulary, vocabulary.tokenizer
        self._encoder = vocabulary.encoder
        self._strategy = strategy
        self._predicting = PREDICTION_STRATEGY if find(strategy.name).factory or strategy.members else strategy
        self.gate = gate
        self._max_context = max_context
        self._start = spec.encoder.start if spec.encoder is not None else None
        self._goes_on = spec.encoder is None and (spec.canvas is None or spec.canvas.ends is None)
        """Whether outputs continue their prompts; otherwise a prompt is a source, as in translation."""
        self._seeds = random.Random(seed if seed is not None else secrets.randbits(64))
        self._names = itertools.count()
        self._vocab_size = vocabulary.size
        self._kinds = PromptClassifier(vocabulary.tokenizer)
        self._decode_token = token_decoder(vocabulary.tokenizer)

    def jobs(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams],
        strategy: Strategies,
        options: RequestOptions,
        *,
        texts: tuple[Documents | None, Predictions | None],
        adapters: Adapter | Sequence[Adapter | None] | None = None,
    ) -> list[Job]:
        """Make one job per prompt. Arguments that are not lists hold for all prompts; they override ``options``."""
        each_prompt = listed(prompts)
        each_strategy: list[str | StrategySpec] = one_each(strategy, "", len(each_prompt), "strategy")
        each = zip(
            each_prompt,
            one_each(params, SamplingParams(), len(each_prompt), "sampling_params"),
            each_strategy,
            references(texts[0], len(each_prompt), self._tokenizer, self._vocab_size),
            predictions(texts[1], len(each_prompt), self._tokenizer, self._vocab_size),
            one_each(adapters, None, len(each_prompt), "lora_request"),
            strict=True,
        )
        return [
            self.job(prompt, own, replace(options, strategy=name or None, adapter=by), references=texts, prediction=ids)
            for prompt, own, name, texts, ids, by in each
        ]

    def single(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Job:
        """Make the job of one prompt, with the documents and the prediction of ``options``."""
        (texts,) = references([options.documents], 1, self._tokenizer, self._vocab_size)
        ids = prediction_ids(options.prediction, self._tokenizer, self._vocab_size)
        return self.job(prompt, params, options, references=texts, prediction=ids)

    def job(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
        *,
        references: tuple[Ids, ...] = (),
        prediction: Ids = (),
    ) -> Job:
        """Make a job. ``references``: token ids of the documents; ``prediction``: token ids of the prediction.

        Raises ValueError for a prompt or a parameter that can't be used.
        """
        _check_params(params)
        text, ids, thoughts = self._encode(prompt, params)
        options = replace(options, salt=options.salt + salt_of(prompt))
        params = params if options.vote is None else sampling_of(options.vote, params)
        if (params.stops or options.vote) and self._tokenizer is None:
            raise FieldError("stop", "strings and votes need a tokenizer, and this model came without one: name one")
        guidance = self._guidance(params, ids)
        room = self._max_context - max(len(ids), len(guidance.negative) if guidance is not None else 0)
        if params.max_tokens is None and options.default_max_tokens is not None:
            params = replace(params, max_tokens=max(1, min(options.default_max_tokens, room)))
        params = self._settled(params, len(ids), room)
        grammar = self._vocabulary.grammars.compile(params.form, options.salt) if params.form is not None else None
        texts = (prediction, *references) if prediction else references
        first = replace(self._request(ids, params, options, texts), guidance=guidance, predicts=bool(prediction))
        kind = partial(self._kinds.of, ids, params)
        choice = self._choice(options, params, kind, predicts=bool(prediction))
        if self.gate.certifies or chooses(choice.strategy):
            first = replace(first, kind=kind())
        before = ids if self._goes_on and not begins_anew(prompt) else ()
        samples = [
            self._sample(
                *(first, n, choice.strategy, self._constraint(grammar, first, thoughts), len(prediction)),
                text=self._vocabulary.text_after(before, params, marks=options.marks, given=options.given),
            )
            for n in range(params.n)
        ]
        if options.written:
            resume(samples, options.written)
        vote = Ballot(options.vote) if options.vote is not None else None
        ended = self.gate.ways.learn if self.gate.certifies else None
        job = Job(first.id, text, samples, thoughts, begins=not before, vote=vote, ended=ended)
        if choice.certificate is not None and choice.certificate.due():  # drawn before anything is decoded
            again = partial(self.job, options=self._compared(options), references=references, prediction=prediction)
            job.audit = audit_of(choice, choice.certificate, first, again)
        return job

    def _compared(self, options: RequestOptions) -> RequestOptions:
        """Options for decoding a lossy job again, exactly or, if the model can't, by its reference strategy."""
        reference, later = self.gate.reference, options.priority + 1
        exactness = None if reference else Allowed(Exactness.SEED)
        return replace(options, strategy=reference, exactness=exactness, store=False, priority=later, vote=None)

    def _choice(
        self, options: RequestOptions, params: SamplingParams, kind: Callable[[], str], *, predicts: bool
    ) -> ExactnessChoice:
        """Choose the strategy. Raises ValueError if the request's exactness forbids the one that it names."""
        usual = self._predicting if predicts else self._strategy
        if options.exactness is None:
            return ExactnessChoice(options.strategy or usual)
        allowed = allowed_by(options.exactness) if isinstance(options.exactness, str) else options.exactness
        if options.adapter is not None and allowed.floor is not None:  # certificates are for the plain model
            allowed = Allowed(Exactness.SEED)
        return self.gate.choose(allowed, options.strategy, usual, params, kind)

    def _request(
        self, prompt: Ids, params: SamplingParams, options: RequestOptions, references: tuple[Ids, ...]
    ) -> Request:
        """Make the request that the samples of one prompt have in common."""
        name = f"request-{next(self._names)}"
        seed = int(params.seed) if params.seed is not None else self._seeds.getrandbits(_SEED_BITS)
        ends = frozenset() if params.ignore_eos else frozenset(self._vocabulary.end_ids)
        own = f" {options.adapter.salt}" if options.adapter is not None else ""
        end = len(prompt) if self._start is None else prompt.index(self._start)
        return Request(
            id=name,
            prompt=prompt,
            params=params,
            key=NoiseKey(seed),
            source=0 if self._goes_on else end,
            stop_ids=ends | frozenset(params.stop_token_ids or ()),
            references=references,
            salt=options.salt + own + (" moved" if options.cache_reuse else ""),
            adapter=options.adapter,
            reuse=options.cache_reuse if params.guidance_scale == 1 else 0,
            owner=options.owner,
            store=options.store,
            group=name if params.n > 1 else "",
            priority=options.priority,
        )

    def _sample(
        self,
        request: Request,
        index: int,
        strategy: str | StrategySpec,
        constraint: Constraint | None,
        predicted: int,
        *,
        text: TextStream | None,
    ) -> Sample:
        key = replace(request.key, sample_index=index)
        own = replace(request, id=f"{request.id}.{index}", key=key, stop_checker=text, constraint=constraint)
        return Sample(own, text, strategy, self._decode_token, predicted, PREDICTION_STRATEGY)

    def _constraint(self, grammar: Grammar | None, request: Request, thoughts: Thoughts) -> Constraint | None:
        """Make one sample's constraint, if it has a form. If there may be reasoning, it begins after that."""
        if grammar is None or self._tokenizer is None:
            return None
        constraint, found = grammar.constraint(request.stop_ids), marks(self._tokenizer, thoughts)
        return constraint if found is None else AfterReasoning(constraint, found)

    def _guidance(self, params: SamplingParams, ids: Ids) -> Guidance | None:
        """The guidance of the text, if any. Raises ValueError for a negative prompt that can't be read."""
        if params.guidance_scale == 1:
            return None
        given = ids[-1:] if params.negative_prompt is None else params.negative_prompt
        try:
            given, _ = text_or_ids(given)
            negative = self._ids(given, cut=False) if isinstance(given, str) else given
        except ValueError as error:
            raise FieldError("negative_prompt", f": {error}") from None
        return Guidance(negative, params.guidance_scale)

    def guided_chat(self, messages: Messages, options: ChatOptions, params: SamplingParams) -> SamplingParams:
        """If the negative prompt is a text, use it as the system message of the same conversation."""
        if params.guidance_scale == 1 or not isinstance(params.negative_prompt, str):
            return params
        negative = self.chat(with_system(messages, params.negative_prompt), options)
        return replace(params, negative_prompt=negative["prompt_token_ids"])

    def chats(
        self, chats: Sequence[Messages], options: ChatOptions, params: SamplingParams | Sequence[SamplingParams]
    ) -> list[tuple[TokensPrompt, SamplingParams]]:
        """Turn each conversation into a prompt, and read its negative prompt. Raises what `chat` raises."""
        each = zip(chats, one_each(params, SamplingParams(), len(chats), "sampling_params"), strict=True)
        return [self.read_chat(messages, options, own) for messages, own in each]

    def read_chat(
        self, messages: Messages, options: ChatOptions, params: SamplingParams
    ) -> tuple[TokensPrompt, SamplingParams]:
        """Turn one conversation into a prompt, with its negative prompt read: `chat`, then `guided_chat`."""
        _check_params(params)
        prompt = self.chat(messages, options, cut=params.truncate_prompt_tokens is not None)
        return prompt, self.guided_chat(messages, options, params)

    def _settled(self, params: SamplingParams, prompt_length: int, room: int) -> SamplingParams:
        """Fill in a limit on the output and numbers of log-probabilities; turn bad words into a logits processor."""
        params = replace(
            params,
            max_tokens=max(room, 1) if params.max_tokens is None else params.max_tokens,  # the engine checks the room
            logprobs=self._vocab_size if params.logprobs == -1 else params.logprobs,
            prompt_logprobs=self._vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs,
            allowed_token_ids=packed(params.allowed_token_ids),
        )
        if not params.bad_words:
            return params
        return replace(params, logits_processors=(*params.logits_processors, self._bad_words(params, prompt_length)))

    def _bad_words(self, params: SamplingParams, prompt_length: int) -> BadWords:
        if self._tokenizer is None:
            raise FieldError("bad_words", "need a tokenizer, and this model came without one: use logit_bias")
        for word in params.bad_words or ():
            check_unicode(word, "bad_words are")
        return BadWords(params.bad_words or (), self._tokenizer, prompt_length)

    def _encode(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, tuple[int, ...], Thoughts]:
        """Text and ids of the prompt, and whether its answer has reasoning. The text is None if the prompt was cut."""
        given, thoughts = text_or_ids(prompt)
        text = given if isinstance(given, str) else None
        ids = self._ids(given, cut=params.truncate_prompt_tokens is not None) if isinstance(given, str) else given
        check_known(ids, self._vocab_size)
        kept = params.truncate_prompt_tokens or len(ids)
        kept = self._max_context - 1 if kept == -1 else kept
        text, ids = (text, ids) if len(ids) <= kept else (None, ids[-kept:])
        return text, ids if self._start is None or self._start in ids else (*ids, self._start), thoughts

    def ids(self, prompt: Prompt) -> tuple[int, ...]:
        """The ids of a prompt that is only read. Raises ValueError if the model can't hold it."""
        given, _ = text_or_ids(prompt)
        ids = self._ids(given, cut=False) if isinstance(given, str) else tuple(given)
        check_length(ids, self._max_context)
        check_known(ids, self._vocab_size)
        return ids

    def _ids(self, text: str, *, cut: bool) -> tuple[int, ...]:
        if self._encoder is None:
            raise UsageError("this model came without a tokenizer: name one, or give prompt_token_ids")
        if not text:  # some tokenizers add a token, so that ids would not be empty
            raise UsageError("the prompt is empty: give some text, or token ids", "prompt")
        return self._encoder.encode(text, self._max_context, cut=cut)

    def chat(self, messages: Messages, options: ChatOptions, *, cut: bool = False) -> TokensPrompt:
        """Render the conversation in the model's chat format. With ``cut``, the caller will cut its ids.

        Raises ParlayError if the template refuses the conversation; ValueError for a value that is not a conversation,
        for content that is not text, and for variables that `check_variables` refuses.
        """
        if self._encoder is None or self._tokenizer is None:
            raise ParlayError(NO_TEMPLATE)
        parts = in_format(self._tokenizer, messages, options, render if options.parse_special else render_pieces)
        ids = self._encoder.encode(parts, self._max_context, special=False, cut=cut)
        begins = options.begin_answer and not options.continue_final
        return TokensPrompt(prompt_token_ids=ids, thoughts=expected_thoughts(self._tokenizer, ids), begins=begins)
