"""What a request means to the engine: its prompt in tokens, how tokens are chosen, when the text ends."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from jinja2 import TemplateError

from branchwise.constrain import Grammar
from branchwise.core.sampling import SamplingParams
from branchwise.core.text import TextStream
from branchwise.engine import Request
from branchwise.errors import UsageError
from branchwise.llm import LLM
from branchwise.serve.protocol.calls import CallFormat, CallReader, format_of
from branchwise.serve.protocol.failures import Refusal, refusal_of
from branchwise.serve.protocol.formats import compiled
from branchwise.serve.protocol.schema import Asked, ChatAsked, CompletionAsked, Message
from branchwise.serve.protocol.tools import Tool, grammar_of
from branchwise.serve.settings import Limits

COMPLETION_TOKENS = 16
"""OpenAI's limit of a completion that names none; a chat without a limit goes on to the end of the context"""

MOST_IN_FRONT = 4
"""the most tokens that a tokenizer puts in front of a text"""


@dataclass(frozen=True)
class Order:
    """What one request asks the engine for."""

    requests: list[Request]
    """the choices of the first prompt, then those of the second, and so on"""
    stops: tuple[str, ...]
    choices: int
    """how many choices each prompt gets"""
    echoes: list[str]
    """for each prompt, the text that its answers begin with"""
    spelt: list[list[str]] | None = None
    """for each prompt, what each token adds to that text, if prompt tokens are reported like those of the answer"""
    reading: Callable[[], CallReader] | None = None
    """makes the reader that finds tool calls in an answer; None without tools"""
    decode: Callable[[Sequence[int]], str] | None = None
    """turns tokens into text; None for the model's own way"""

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [request.prompt for request in self.requests[:: self.choices]]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


class Prompts:
    """Reads requests for one model."""

    def __init__(self, llm: LLM, limits: Limits) -> None:
        self.llm = llm
        self.limits = limits
        self.context = llm.engine.target.info.context

    def order(self, asked: Asked, who: Hashable = None) -> Order:
        """What a request asks for; raises a `Refusal` if the model cannot do it. Takes a while for long texts. Cached
        rows of another text are reused only if that text is of the same `who`."""
        echoes, scored = [""], False
        wanted, reading = asked.wanted, None
        if isinstance(asked, ChatAsked):
            prompts, usual = [self.conversation(asked.messages, asked.offered)], self.context
            if asked.offered:
                names = [tool.function.name for tool in asked.offered]
                reading = partial(CallReader, self.calls, names, several=asked.several)
            if asked.must_call:
                tokens = self.llm.tokenizer.get_added_vocab()
                wanted = grammar_of(asked.must_call, self.calls, tokens, several=asked.several)
        else:
            assert isinstance(asked, CompletionAsked)
            prompts, usual = (
                [self.tokens(prompt, asked.add_special_tokens) for prompt in asked.prompts],
                COMPLETION_TOKENS,
            )
            echoes = [self._echoed(prompt) if asked.echo else "" for prompt in asked.prompts]
            scored = bool(asked.echo) and (asked.wants_logprobs or asked.max_tokens == 0)
        choices = asked.n or 1
        if len(prompts) * choices > self.limits.queue:
            said = f"The request asks for {len(prompts) * choices} texts, and {self.limits.queue} may wait here."
            raise Refusal(400, said, param="n", code="limit_exceeded")
        asked_for = usual if asked.wanted_tokens is None else asked.wanted_tokens
        most = min(asked_for, self.limits.new_tokens or self.context, self.context)
        stop_tokens = frozenset[int]() if asked.ignore_eos else self.llm.stop_tokens
        grammar = None if wanted is None else compiled(self.llm, wanted, self.limits.grammar)
        try:
            requests = [
                Request(
                    tuple(prompt),
                    self._sampling(asked, choice, grammar, len(prompt)),
                    most,
                    stop_tokens,
                    logprobs=asked.wants_logprobs,
                    top_logprobs=asked.alternatives,
                    prompt_logprobs=scored,
                    scope=who,
                    trace=bool(asked.trace),
                    task=asked.task,
                )
                for prompt in map(self._checked, prompts)
                for choice in range(choices)
            ]
        except UsageError as error:
            raise refusal_of(error) from None
        spelt = [self._spelt(*pair) for pair in zip(prompts, echoes, strict=True)] if scored else None
        return Order(requests, asked.stops, choices, echoes, spelt, reading, self._with_tags if reading else None)

    @cached_property
    def calls(self) -> CallFormat:
        """How the model calls tools; refused if it calls none, or in a form that we cannot read."""
        template = self.llm.tokenizer.chat_template or ""
        if isinstance(template, dict):  # several templates by name
            template = template.get("tool_use", template.get("default", ""))
        if (found := format_of(str(template))) is None:
            said = "The chat template of this model knows no tools, or a form of calls that this server does not read."
            raise Refusal(400, said, param="tools", code="unsupported_value")
        return found

    @cached_property
    def _silent(self) -> frozenset[int]:
        """Special tokens that are neither text nor tags of calls."""
        tokenizer, tags = self.llm.tokenizer, {self.calls.opening, self.calls.closing}
        special = {token: tokenizer.convert_ids_to_tokens(token) for token in tokenizer.all_special_ids}
        return frozenset(token for token, name in special.items() if name not in tags)

    def _with_tags(self, tokens: Sequence[int]) -> str:
        return self.text([token for token in tokens if token not in self._silent])

    def conversation(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        if tools or any(message.tells_of_tools for message in messages):
            _ = self.calls  # refuses a model whose calls cannot be read
        try:
            said = [message.as_dict() for message in messages]
            return self.llm.encode(said, tools=[tool.as_dict() for tool in tools])
        except UsageError as error:
            raise refusal_of(error, "messages") from None
        except TemplateError as error:  # for instance because roles must alternate
            raise Refusal(400, f"The chat template refuses these messages: {error}.", param="messages") from None

    def tokens(self, prompt: str | list[int], special: bool | None = None) -> list[int]:
        """The tokens of a prompt that is taken as it is; a text gets the special tokens that its tokenizer adds."""
        if isinstance(prompt, str):
            return list(self.llm.tokenizer(prompt, add_special_tokens=special is not False, verbose=False)["input_ids"])
        return prompt

    def text(self, tokens: Sequence[int]) -> str:
        """All of these tokens as text, special tokens included."""
        self._check_vocabulary(tokens)
        found = self.llm.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(found)

    def _echoed(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        self._check_vocabulary(prompt)
        return self.llm.decode(prompt)

    def _spelt(self, prompt: list[int], echo: str) -> list[str]:
        """What each token of a prompt adds to the text that is echoed."""
        plain = TextStream(self.llm.decode)  # the same decoding as for echoed token ids
        whole = TextStream(self.text)
        for stream in (plain, whole):
            found = [stream.push(token) for token in prompt]
            found[-1] += stream.finish()
            # The tokenizer may put tokens in front of a text that are no part of it.
            places = range(min(len(found), MOST_IN_FRONT))
            first = next((place for place in places if "".join(found[place:]) == echo), None)
            if first is not None:
                return [""] * first + found[first:]
        return found

    def _checked(self, prompt: list[int]) -> list[int]:
        most = (
            self.context - 1 if self.limits.prompt_tokens is None else min(self.limits.prompt_tokens, self.context - 1)
        )
        if len(prompt) > most:
            said = f"The prompt has {len(prompt)} tokens, and it may have {most} of a context of {self.context}."
            raise Refusal(400, said, param="prompt", code="context_length_exceeded")
        self._check_vocabulary(prompt)
        return prompt

    def _check_vocabulary(self, tokens: Sequence[int]) -> None:
        size = self.llm.engine.target.info.vocabulary
        if tokens and not 0 <= min(tokens) <= max(tokens) < size:
            raise Refusal(400, f"The prompt holds token ids outside the vocabulary of {size}.", param="prompt")

    def _sampling(self, asked: Asked, choice: int, grammar: Grammar | None, prompt_length: int) -> SamplingParams:
        """A request without a temperature samples at 1, as with OpenAI. Every choice has its own seed and its own place
        in the grammar."""
        vocabulary = self.llm.engine.target.info.vocabulary
        top_k = asked.top_k or 0
        found = SamplingParams(
            temperature=_said(asked.temperature, 1.0),
            top_k=0 if top_k < 0 or top_k >= vocabulary else top_k,
            top_p=_said(asked.top_p, 1.0),
            min_p=_said(asked.min_p, 0.0),
            repetition_penalty=_said(asked.repetition_penalty, 1.0),
            presence_penalty=_said(asked.presence_penalty, 0.0),
            frequency_penalty=_said(asked.frequency_penalty, 0.0),
            logit_bias=asked.biases,
            seed=None if asked.seed is None else asked.seed + choice,
        )
        found.check_vocabulary(vocabulary)
        return found if grammar is None else grammar.applied_to(found, prompt_length)


def _said(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
