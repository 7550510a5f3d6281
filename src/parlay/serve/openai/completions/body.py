"""The body of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, cast

from pydantic import Discriminator, Field, Tag

from parlay.serve.openai.chat.body import ResponseFormat
from parlay.serve.protocol.body import INT_LIMIT, Count, GenerationBody, TokenIds, conflict
from parlay.serve.protocol.json_values import WHOLE
from parlay.serve.protocol.resuming import Resume
from parlay.serve.protocol.voting import Vote, check_vote

PROMPTS_LIMIT = 1024


def _shape(value: Any) -> str:
    """The kind of a prompt, of four; an invalid prompt gets the kind whose error is clearest."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else ""
    if isinstance(first, list):
        return "token_lists"
    return "tokens" if isinstance(first, int | float) and not isinstance(first, bool) else "texts"


Text = Annotated[str, Field(min_length=1)]
PromptField = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[Text], Field(min_length=1, max_length=PROMPTS_LIMIT, fail_fast=True), Tag("texts")]
    | Annotated[TokenIds, Tag("tokens")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=PROMPTS_LIMIT, fail_fast=True), Tag("token_lists")],
    Discriminator(_shape),
]
"""A text, a list of texts, token ids, or a list of lists of token ids."""


def prompts_of(prompt: PromptField) -> list[str | list[int]]:
    """A list with one entry per prompt."""
    if _shape(prompt) in ("text", "tokens"):
        return [cast(str | list[int], prompt)]
    return cast(list[str | list[int]], prompt)


DEFAULT_TOKENS = 16
"""The default of OpenAI's API; null means the server's."""


class CompletionBody(GenerationBody):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **GenerationBody.unsupported,
        "add_special_tokens": (True,),
    }

    prompt: PromptField
    suffix: str | None = None
    max_tokens: Count | None = DEFAULT_TOKENS
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    best_of: Annotated[int, Field(ge=1, le=INT_LIMIT), WHOLE] | None = None
    response_format: ResponseFormat | None = None
    vote: Vote | None = None
    superposed: bool | None = None
    explain: bool | None = None
    resume: Resume | None = None

    def check(self) -> None:
        super().check()
        check_vote(self.vote, self.n)
        if self.vote is not None and self.best_of is not None:
            raise conflict("best_of and vote are two ways to choose: remove one of them", "best_of")
        if self.superposed:
            self._check_superposed()
        if self.structured_outputs is not None and self.response_format is not None:
            message = "structured_outputs can't be used with response_format: remove one of them"
            raise conflict(message, "structured_outputs")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise conflict(f"best_of must be at least n, which is {self.n or 1}, got {self.best_of}", "best_of")
        if self.stream and self.picks:
            raise conflict("best_of above n can't be streamed: remove stream", "best_of")
        if self.suffix is not None and not isinstance(self.prompt, str):
            raise conflict("suffix works only with a prompt that is one text", "suffix")
        if self.suffix is not None and self.echo:
            raise conflict("suffix can't be used with echo: remove one of them", "suffix")
        if self.stream and self.echo and self.logprobs is not None:
            raise conflict("echo with logprobs can't be streamed: remove stream", "stream")
        if self.resume is not None:
            self.resume.check(choices=len(self.prompts) * (self.n or 1), stream=bool(self.stream))

    def _check_superposed(self) -> None:
        """Raises ApiError for fields that can't be combined with superposed drafts."""
        if self.exactness not in (None, "lossy"):
            raise conflict("superposed drafts are lossy, so exactness must be lossy or missing", "exactness")
        others = ("stream", "strategy", "vote", "best_of", "resume", "echo", "logprobs")
        for name in (*others, "response_format", "structured_outputs"):
            if (value := vars(self)[name]) is not None and value is not False:
                raise conflict(f"superposed can't be used with {name}: remove one of them", name)

    @property
    def structured(self) -> bool:
        """Whether the answer may be held to a form; see `GenerationBody`."""
        return super().structured or self.response_format is not None

    @property
    def picks(self) -> bool:
        """Whether more samples are drawn than returned."""
        return self.best_of is not None and self.best_of > (self.n or 1)

    @property
    def has_list(self) -> bool:
        """Whether the prompt is a list of prompts."""
        return _shape(self.prompt) in ("texts", "token_lists")

    @property
    def prompts(self) -> list[str | list[int]]:
        """A list with one entry per prompt."""
        return prompts_of(self.prompt)
