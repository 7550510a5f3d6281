"""`LLM`, the Python API: the only place that joins a runner, strategies, policies and the engine."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from parlay import models
from parlay.certificates.gate import CertificateGate, open_gate
from parlay.certificates.requirement import AUDIT_SHARE, Allowed
from parlay.llm import embedding, numbers, steps_ahead, suggesting, vllm_arguments
from parlay.llm.adapters import Adapted, Adapters, PerPromptAdapted
from parlay.llm.beam_search import BeamSearchOutput, BeamSearchParams, search_beams
from parlay.llm.ensemble import Members, ensemble_of, open_budget, open_runner
from parlay.llm.input_processor import InputProcessor, PerPrompt, Strategies
from parlay.llm.jobs import CallLock, Job, Stream, audit, decoded, follow
from parlay.llm.judging import INSTRUCTION, by_answer, judge
from parlay.llm.outputs import RequestFailed, RequestOutputs, StreamEvent
from parlay.llm.prefix_cache import DEFAULT_SIZE, check_prefix_cache, close_prefix_cache, open_prefix_cache
from parlay.llm.request_options import RequestOptions
from parlay.llm.resources import parts_of
from parlay.llm.router_file import RememberedBy
from parlay.llm.vocabulary import Vocabulary, model_or_default, vocabulary_of
from parlay.llm.voting import VoteParams
from parlay.models.sampling_defaults import usual_params
from parlay.options import LoadOptions, RankOptions, override
from parlay.ranks.starting import ALONE, end_ranks, loss_of, ranks_ended_on_error
from parlay.strategies.building import offered
from parlay.strategies.built import StrategyCache
from parlay.strategies.entry import DEFAULT_STRATEGY
from parlay.strategies.spelling import StrategySpec
from parlay.system.progress import Progress, bar
from parlay.text.chat_template import ChatOptions, Messages, Tools
from parlay.text.prompts import Document, Documents, Predictions, Prompt, Prompts, conversations, is_prompt, listed
from parlay.types import ParlayError, SamplingParams, ScoreBy, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LLM:
    """A model that decodes several tokens per forward pass. Argument names are vLLM's where it has them.

    ``model``: a name that `parlay models` lists, a local folder or GGUF file, a Hugging Face Hub id, or a loaded
    transformers model; None is SmolLM2-135M-Instruct, fetched at the first use (98 MB). ``tokenizer`` replaces the
    model's own; it may be the ``vocabulary`` of another LLM. ``strategy`` is for requests that name none; by default it
    is ``auto``. ``seed`` fixes the seeds of requests without one; otherwise each request draws a seed and reports it.
    ``memory`` limits caches and drafters, in bytes or as in ``"2GiB"`` (default: a share of what is free);
    ``"weights=6GiB"`` limits the weights: layers that do not fit are read from disk in every forward. ``prefix_cache``:
    a file that keeps cached prefixes after `close`, at most ``prefix_cache_size``. A field of ``load`` or ``ranks`` may
    also be given as an argument of its own. Calls without sampling parameters use those that the model's makers
    recommend or, with ``generation_config="vllm"``, the defaults of `SamplingParams`. vLLM's ``speculative_config``
    names a strategy, too. ``router_memory``: ``auto`` keeps the numbers that it learns on this machine, for all
    requests together (``"shared"``), for each owner (``"per-key"``), or not at all (``"off"``). ``certificates``: files
    of `parlay.calibration` that allow lossy strategies for requests whose ``exactness`` has a floor; a share
    ``audit_share`` of their answers is also decoded exactly. ``ensemble``: models (`parlay.Ensemble`) or a datastore
    (`parlay.Nest`) that write together with this one.

    Raises ParlayError for a model that can't be run, TypeError for an argument that neither Parlay nor vLLM has, and
    ValueError for a wrong value. Arguments of vLLM that have no effect here give one warning that names them.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel | None = None,
        *,
        tokenizer: str | Path | Tokenizer | Vocabulary | None = None,
        strategy: str | StrategySpec | None = None,
        draft_model: str | Path | None = None,
        load: LoadOptions = models.USUAL,
        dtype: str | None = None,
        device: str | None = None,
        quantize: str | None = None,
        kv_cache_dtype: str | None = None,
        threads: int | None = None,
        compile: bool | None = None,
        enforce_eager: bool | None = None,
        runner: str | None = None,
        ranks: RankOptions = ALONE,
        tensor_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        context_parallel_size: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        seed: int | None = None,
        memory: int | str | None = None,
        prefix_cache: str | Path | None = None,
        prefix_cache_size: int | str = DEFAULT_SIZE,
        use_tqdm_on_load: Progress = None,
        generation_config: Literal["auto", "vllm"] = "auto",
        speculative_config: Mapping[str, object] | None = None,
        router_memory: RememberedBy = "shared",
        certificates: Sequence[str | Path] = (),
        audit_share: float = AUDIT_SHARE,
        ensemble: Members = None,
        **of_vllm: object,
    ) -> None:
        vllm_arguments.accept(of_vllm, ["model", *inspect.getfullargspec(LLM.__init__).kwonlyargs])
        numbers.check_seed(seed)
        limits = numbers.limits_of(max_model_len, max_num_seqs, max_num_batched_tokens)
        strategy = vllm_arguments.one_strategy(strategy, speculative_config) or DEFAULT_STRATEGY
        self._closed, self.strategy, self.call_lock = False, str(strategy), CallLock()
        ensemble = ensemble_of(ensemble, {"certificates": certificates, "prefix_cache": prefix_cache})
        budget = self._budget = open_budget(memory, ensemble)
        model, draft_model = model_or_default(model, draft_model)
        load = override(load, dtype=dtype, device=device, quantize=quantize, kv_cache_dtype=kv_cache_dtype)
        load = override(load, threads=threads, compile=compile, runner=runner, enforce_eager=enforce_eager)
        ranks = numbers.ranks_of(ranks, tensor_parallel_size, pipeline_parallel_size, context_parallel_size)
        check_prefix_cache(prefix_cache, ranks)
        self.runner = open_runner(
            model, load, ranks, budget, progress=use_tqdm_on_load, longest=max_model_len, ensemble=ensemble
        )
        with ranks_ended_on_error(self.runner):
            self.prefix_cache = open_prefix_cache(prefix_cache, prefix_cache_size, model, self.runner, load)
            self.adapters, self.loss = Adapters(self.runner), loss_of(self.runner)
            self.vocabulary = vocabulary_of(model, tokenizer, self.runner.spec, load.end_tokens)
            self.tokenizer, self._usual_params = self.vocabulary.tokenizer, usual_params(model, generation_config)
            self.engine, self._strategies, self._drafts = parts_of(
                self.runner, model, load, limits, budget, ensemble=ensemble, tokenizer=self.tokenizer,
                draft_model=draft_model, router_memory=router_memory,
            )  # fmt: skip
            strategy = self._strategies.build_default(strategy)  # a wrong name fails now, not at a request
            resources = self._strategies.resources
            gate = open_gate(certificates, model, ensemble, resources, self.engine, share=audit_share, load=load)
            spec, longest = self.runner.spec, self.engine.longest
            self._inputs = InputProcessor(self.vocabulary, longest, spec, strategy=strategy, seed=seed, gate=gate)

    def get_tokenizer(self) -> PreTrainedTokenizerBase | Tokenizer:
        """The tokenizer, as transformers has it (or as it was given). Raises ParlayError if there is none."""
        return self.vocabulary.in_transformers

    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of the parameters that calls without any use; see `LLM`."""
        return replace(self._usual_params)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: PerPrompt = None,
        use_tqdm: Progress = None,
        *,
        strategy: Strategies = None,
        documents: Documents | None = None,
        prediction: Predictions | None = None,
        store: bool = True,
        exactness: str | Allowed | None = None,
        lora_request: PerPromptAdapted = None,
        vote: VoteParams | None = None,
    ) -> RequestOutputs:
        """Decode all prompts together and return one output per prompt, in order.

        A prompt is a text, a list of token ids, or a dict with ``prompt`` or ``prompt_token_ids``. ``sampling_params``,
        ``strategy``, ``documents`` (a list of documents), ``prediction`` and ``lora_request`` (`parlay.LoRARequest`)
        are one for all prompts or one per prompt. Documents and predictions, texts or token ids, only speed up
        decoding: strategies that copy draft from them. A ``prediction`` is what the output will mostly be, such as a
        file before an edit; ``auto`` drafts from it. If the LLM's default strategy names drafters, a request with a
        prediction and no strategy of its own uses ``prediction``. ``store=False``: no strategy learns from these
        requests. ``exactness`` None allows what the strategy loses (`parlay.certificates.requirement`). ``vote``:
        several chains of thought for each prompt decide its answer, which is in ``vote`` of the output. The returned
        list also has the rate of the whole call, ``tokens_per_second``.

        Raises ValueError for a prompt, parameter, document or prediction that can't be used, before anything runs, and
        RequestFailed (which holds all outputs) if a sample failed while the others went on.
        """
        self._check_open()
        options = RequestOptions(store=store, exactness=exactness, vote=vote)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        texts, adapters = (documents, prediction), self.adapters.of_all(lora_request)
        jobs = self._inputs.jobs(prompts, params, strategy, options, texts=texts, adapters=adapters)
        use_tqdm = False if use_tqdm is None and len(jobs) < 2 else use_tqdm
        # Close here: notebooks keep an error's traceback, which would keep the events and, through them, the call lock.
        with closing(self._run(jobs)) as events, bar(len(jobs), "Prompts", "prompt", use_tqdm) as shown:
            seconds = follow(events, shown)
        outputs = RequestOutputs([job.output() for job in jobs], seconds)
        failed = [error for output in outputs for error in output.errors]
        if failed:
            raise RequestFailed(f"{len(failed)} of the samples failed; the first: {failed[0]}", outputs)
        return outputs

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: PerPrompt = None,
        use_tqdm: Progress = None,
        *,
        tools: Tools | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        parse_special: bool = False,
        strategy: Strategies = None,
        documents: Documents | None = None,
        prediction: Predictions | None = None,
        store: bool = True,
        exactness: str | Allowed | None = None,
        lora_request: PerPromptAdapted = None,
        vote: VoteParams | None = None,
    ) -> RequestOutputs:
        """Like `generate`, for one or more conversations, each a list of {"role": ..., "content": ...}.

        Content is a text, or a list of {"type": "text", "text": ...}. The template's arguments are those of
        `ChatOptions`. One of ``add_generation_prompt`` and ``continue_final_message`` must be false.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt=False: set it")
        options = ChatOptions(
            tools=tools or (),
            variables=chat_template_kwargs or {},
            template=chat_template,
            begin_answer=add_generation_prompt,
            continue_final=continue_final_message,
            parse_special=parse_special,
        )
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        chats = self._inputs.chats(conversations(messages), options, params)
        return self.generate(
            [prompt for prompt, _ in chats],
            [own for _, own in chats],
            use_tqdm,
            strategy=strategy,
            documents=documents,
            prediction=prediction,
            store=store,
            exactness=exactness,
            lora_request=lora_request,
            vote=vote,
        )

    def token_ids(self, prompt: Prompt | Messages, chat: ChatOptions | None = None) -> tuple[int, ...]:
        """Token ids of a prompt or conversation. Any thread may call this. Raises ValueError if it is too long."""
        return self._inputs.ids(prompt if is_prompt(prompt) else self._inputs.chat(prompt, chat or ChatOptions()))

    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: embedding.Pooling = "last",
        normalize: bool = True,
        lora_request: Adapted = None,
    ) -> list[embedding.EmbeddingRequestOutput]:
        """Embed texts by the hidden states that enter the LM head: the last token's, or their mean over all tokens.

        With ``normalize``, embeddings have length 1. Raises ValueError for a prompt or a pooling that can't be used.
        """
        self._check_open()
        texts, adapter = [self.token_ids(prompt) for prompt in listed(prompts)], self.adapters.of(lora_request)
        with self.call_lock.entered():
            return embedding.embed(self.runner, texts, pooling, adapter, normalize=normalize)

    def score(
        self,
        queries: Prompts,
        documents: Prompts,
        *,
        pooling: embedding.Pooling = "last",
        score_by: ScoreBy = "cosine",
        instruction: str = INSTRUCTION,
        lora_request: Adapted = None,
    ) -> list[embedding.ScoringRequestOutput]:
        """Score how well documents fit queries: in pairs or one query with all, by embeddings or a chat model's yes."""
        one, many = listed(queries), listed(documents)
        pairs = embedding.paired(len(one), len(many))
        self._check_open()
        if by_answer(score_by):
            with self.call_lock.entered():
                return judge(self, [(one[i], many[j]) for i, j in pairs], instruction, self.adapters.of(lora_request))
        outputs = self.embed([*one, *many], pooling=pooling, lora_request=lora_request)
        return embedding.scored(outputs, [(query, len(one) + document) for query, document in pairs])

    suggest, reason_ahead = suggesting.suggest, steps_ahead.reason_ahead

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams, use_tqdm: Progress = False
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, the best first.

        Decodes plainly; raises what `generate` raises.
        """
        return search_beams(self, prompts, params, use_tqdm)

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        strategy: str | StrategySpec | None = None,
        documents: Sequence[Document] | None = None,
        prediction: Document | None = None,
        store: bool = True,
        exactness: str | Allowed | None = None,
        vote: VoteParams | None = None,
    ) -> Stream:
        """Decode one prompt or conversation, and iterate over the tokens and texts of each step as it is committed."""
        options = RequestOptions(strategy=strategy, exactness=exactness, prediction=prediction, store=store, vote=vote)
        job = self.job(prompt, sampling_params, replace(options, documents=documents or ()))
        return Stream(self._run([job]), job)

    def job(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        chat: ChatOptions | None = None,
    ) -> Job:
        """Make a job of a prompt or conversation, ready to run. Any thread may call this.

        ``chat``: how a conversation becomes a prompt. Raises ValueError or ParlayError.
        """
        self._check_open()
        options = options or RequestOptions()
        params = sampling_params or self.get_default_sampling_params()
        if not is_prompt(prompt):
            prompt, params = self._inputs.read_chat(prompt, chat or ChatOptions(), params)
        return self._inputs.single(prompt, params, options)

    def prepare(self) -> None:
        """Load everything that the first request would load, so that no request to a server has to wait."""
        self.vocabulary.prepare()

    def add(self, job: Job) -> None:
        """Add a job's due samples to the engine. If one can't run, raises ValueError, and none of them is added."""
        added: list[str] = []
        try:
            for sample in job.due():
                self.engine.add(sample.request, self._strategies.get(sample.strategy, sample.request.owner))
                added.append(sample.request.id)
        except Exception:
            for name in added:
                self.engine.abort(name)
            raise

    @property
    def strategies(self) -> StrategyCache:
        """The strategies built so far. Callers may build one here before `add` needs it."""
        return self._strategies

    @property
    def draft_models(self) -> tuple[str, ...]:
        """The draft models that strategies have loaded so far."""
        return self._drafts.names

    def offered(self) -> tuple[str, ...]:
        """The catalogue's strategies that this model can run without parameters. Any thread may call this."""
        return offered(self._strategies.resources, self.engine.requests.check_needs)

    @property
    def cache_bytes(self) -> int:
        """Bytes held by caches and drafters' states, for running and finished texts. Any thread may call this."""
        return self._budget.nbytes

    def reset_prefix_cache(self) -> None:
        """Free the cache of finished requests. Later requests compute their whole prompts."""
        self._budget.drop_spare()

    def close(self) -> None:
        """Write the files of drafters, and free models and caches. The LLM can't be used afterwards."""
        if self._closed:
            return
        self._closed = True
        self._strategies.close()
        self.vocabulary.rest()
        close_prefix_cache(self.prefix_cache)
        end_ranks(self.runner)
        self._budget.drop_spare()  # pages refer to each other: only the garbage collector would free them
        del self._strategies, self._drafts, self.engine, self.runner, self.prefix_cache

    @property
    def gate(self) -> CertificateGate:
        return self._inputs.gate

    def __repr__(self) -> str:
        return "LLM(closed)" if self._closed else f"LLM({self.runner.spec.name!r}, strategy={self.strategy!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ParlayError("this LLM is closed: make another one")

    def _run(self, jobs: Sequence[Job]) -> Generator[StreamEvent]:
        """Decode the jobs, then run the audits that are due for them."""
        decode = partial(
            decoded, self.add, self.engine, self.call_lock
        )  # binds no self: a stream may outlive the LLM's close
        yield from decode(jobs)
        audit(jobs, decode)
