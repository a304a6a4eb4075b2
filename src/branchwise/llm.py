"""Load a model and let it write: the interface for most users."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from os import PathLike, cpu_count, fspath
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

import torch

from branchwise.backends import TARGETS, native
from branchwise.backends.base import LARGEST, nodes_for
from branchwise.backends.quantized import FLOAT, Conversion, choose_weights, conversion_of
from branchwise.constrain import Grammar, compiler_for
from branchwise.control.memory import remember_costs
from branchwise.core.sampling import Processor, SamplingParams
from branchwise.core.text import TextStream
from branchwise.draft.base import Drafter
from branchwise.draft.state import check_state, load_state, save_state
from branchwise.engine import Engine, FinishReason, Generation, Piece, Request
from branchwise.engine.explain import Explanation, explain
from branchwise.engine.stats import Stats
from branchwise.engine.warmup import keep_compiled_kernels, warm_up
from branchwise.errors import UsageError
from branchwise.methods import Method, choose_method
from branchwise.models import DEFAULT_MODEL, check_name, load_model
from branchwise.models.place import choose_device, choose_dtype
from branchwise.prompt import Message, Prompt, is_one, messages_of, stop_strings
from branchwise.registry import nearest
from branchwise.verify import VERIFIERS, Verifier

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Options(TypedDict, total=False):
    """What `generate` and `stream` take besides the prompt; the last block is explained at `SamplingParams`."""

    max_new_tokens: int
    stop: str | Sequence[str]
    """texts that end the answer; they are not part of it"""
    logprobs: bool
    """report the log-probability of every token under the unwarped model"""
    top_logprobs: int
    """for each token, report this many of the most probable tokens at its place in `Piece.top`, 20 at most"""
    raw: bool
    """take a text as it is, without the chat template"""
    ignore_eos: bool
    """go on after a token with which the model would end the answer"""
    json_schema: Mapping[str, Any] | str
    """write JSON that follows this schema"""
    regex: str
    """write a text that this regular expression matches as a whole"""
    grammar: str
    """write a text that follows these rules, in llguidance's dialect of Lark; only one of these three may be given"""
    task: str
    """the task of the text, if the draft model is a pack of specialists: the specialist of this task drafts"""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    processors: tuple[Processor, ...]


SAMPLING = frozenset(field.name for field in fields(SamplingParams))


@dataclass(frozen=True)
class Completion:
    text: str
    token_ids: list[int]
    logprobs: list[float] | None
    """the log-probability of each token under the unwarped model, if the request asked for it"""
    finish_reason: str
    """"stop", "length", "cancelled" or "error\""""
    stats: Stats
    prompt_tokens: int
    seed: int
    """the seed that reproduces the text with `match`. With another rule a sampled text depends on its drafts;
    it may differ next time if the drafter has learned meanwhile, or if it was written under a guard without a seed"""
    pieces: list[Piece]
    """the same tokens one by one, with their origin"""
    error: str | None = None
    """why the text ends too early, if it does"""
    model: str = ""
    """the name of the model, and the bits of its weights if they were quantised"""


@dataclass(frozen=True)
class Chunk:
    """What one step added to a streamed text. Prints as its text."""

    text: str
    pieces: list[Piece]
    completion: Completion | None = None
    """the whole answer; only the last chunk has it"""

    def __str__(self) -> str:
        return self.text


def load(
    model: str | PathLike[str] = DEFAULT_MODEL,
    *,
    method: str | Method | None = None,
    draft_model: str | None = None,
    index: str | None = None,
    head: str | None = None,
    draft: str | Drafter | None = None,
    tree: str | None = None,
    verify: str | None = None,
    state: str | PathLike[str] | None = None,
    dtype: str | torch.dtype = "auto",
    weights: str = FLOAT,
    device: str = "auto",
    threads: int | None = None,
    context: int | None = None,
    max_batch: int = 8,
    max_nodes: int | None = None,
    compile: bool = False,
    warmup: bool = True,
    guard: bool = True,
    prefix_cache: int | bool = False,
    trust_remote_code: bool = False,
    progress: bool | None = None,
) -> LLM:
    """Load a model by alias, hub id, folder or GGUF file, with a drafter and a verifier.

    Name them by a `method`, with its draft model, index or trained head, or by `draft`, `tree` and `verify`, or load
    the method `default`. `context` limits the tokens of a sequence (by default the model's own limit). `max_batch`
    is how many sequences run together; further ones wait. `max_nodes` is how many nodes of a tree one pass may score,
    the root included: by default 128, or as many as the trees of this method have, at most 1,024. On a CPU `weights`
    may be "int8" or "int4": the quantised model is then the target. "auto" takes int8 if a trial finds that it pays.
    `compile` compiles the parts without kernels of ours before a GPU records them. `warmup` compiles and records at
    load what a request needs, so that the first request runs at the speed of the second; a CPU needs no warm-up. With
    a `guard` nothing is drafted while the method is slower than plain decoding. `prefix_cache` is how many ended texts
    are kept in free slots; True is as many as the slots. A prompt that begins like a kept text, such as the next turn
    of a conversation, is prefilled from the first difference on. A drafter that learns begins with the file `state`, if
    it exists; `LLM.save_state` writes it. A method that changes the output distribution warns (`LossyWarning`), and so
    does a method whose trees are cut (`CutWarning`) or whose draft model is as large as the model itself
    (`LargeDraftWarning`).
    """
    model = fspath(model)
    if draft is None or isinstance(draft, str):
        named = {"draft_model": draft_model, "index": index, "head": head}
        chosen = choose_method(method, draft=draft, tree=tree, verify=verify, **named)
        drafter, verifier = chosen.build()
    elif method or draft_model or index or head or tree:
        raise UsageError(
            "A drafter of your own grows its own trees; leave out method, draft_model, index, head and tree."
        )
    else:
        chosen = Method(draft.name, draft.name, verify=verify or "match")
        drafter, verifier = draft, VERIFIERS.build(chosen.verify)
    if state is not None:
        check_state(drafter, state)
    _check_sizes(max_batch, max_nodes, threads)
    if threads is not None:
        torch.set_num_threads(threads)
    chosen.warn_if_lossy()
    place = choose_device(device)
    bits, number = choose_weights(weights, dtype, place), choose_dtype(dtype, place)
    check_name(model)
    if place == "cpu" and (bits != FLOAT or number == torch.float32):
        native.begin()
    keep_compiled_kernels()
    # Only now, because importing transformers takes seconds, which a misspelt name above should not cost.
    backend = TARGETS.find("transformers")
    network, tokenizer = _network(model, bits, number, place, trust_remote_code=trust_remote_code, progress=progress)
    nodes = max_nodes or nodes_for(drafter.largest)
    target = backend(network, slots=max_batch, context=context, max_nodes=nodes, tokenizer=tokenizer, compile=compile)
    remember_costs(target.info)
    engine = Engine(target, drafter, verifier, guard=guard, prefix_cache=prefix_cache)
    engine.warn()
    if state is not None:
        load_state(drafter, state, target.info)
    if warmup:
        warm_up(engine, progress)
    found = conversion_of(network)
    return LLM(model if found is None else f"{model} {found.scheme}", network, tokenizer, engine, state, source=model)


def _check_sizes(max_batch: int, max_nodes: int | None, threads: int | None) -> None:
    if max_batch < 1:
        raise UsageError(f"max_batch must be at least 1, not {max_batch}.")
    if max_nodes is not None and not 2 <= max_nodes <= LARGEST:
        raise UsageError(f"max_nodes must be at least 2 and at most {LARGEST}, not {max_nodes}.")
    most = 8 * (cpu_count() or 1)
    if threads is not None and not 1 <= threads <= most:
        raise UsageError(f"threads must be at least 1, and at most {most} (8 for each core here), not {threads}.")


def _network(model: str, bits: str, dtype: torch.dtype, device: str, **options: Any) -> tuple[Any, Any]:
    """The model with its tokenizer, quantised if `bits` says so."""
    if bits == FLOAT:
        return load_model(model, dtype=dtype, device=device, **options)
    from branchwise.backends.transformers.converted import load_converted

    return load_converted(model, bits, dtype=dtype, **options)


@dataclass(eq=False, repr=False)
class LLM:
    """A model with its tokenizer, a drafter and a verifier."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    engine: Engine
    state: str | PathLike[str] | None = None
    """the file in which the drafter keeps what it learns"""
    last: Completion | None = None
    """the answer that was written last"""
    source: str = ""
    """the alias, id or path by which the model was loaded; `name` also says to what it was quantised"""

    @property
    def conversion(self) -> Conversion | None:
        """How the model was quantised, and how far it is from floating point; None if it was not quantised."""
        return conversion_of(self.model)

    def with_drafter(
        self, draft: str | Drafter, tree: str | None = None, verify: str = "match", *, guard: bool = False
    ) -> LLM:
        """The same weights and cache with another drafter and verifier; only one of the two LLMs may run at a time.
        Without a `guard` it drafts even if that is slow, so that methods can be compared."""
        if isinstance(draft, str):
            return self.with_method(Method(draft, draft, tree, verify), guard=guard)
        return self._with(Method(draft.name, draft.name, tree, verify), draft, VERIFIERS.build(verify), guard)

    def with_method(
        self,
        method: str | Method,
        draft_model: str | None = None,
        index: str | None = None,
        head: str | None = None,
        *,
        guard: bool = False,
    ) -> LLM:
        """Like `with_drafter`, with a method by name or as a spec draft/tree/verify. A method that changes the
        distribution warns (`LossyWarning`)."""
        chosen = choose_method(method, draft_model=draft_model, index=index, head=head)
        return self._with(chosen, *chosen.build(), guard)

    def _with(self, method: Method, drafter: Drafter, verifier: Verifier, guard: bool) -> LLM:
        engine = Engine(self.engine.target, drafter, verifier, guard=guard)
        engine.warn()
        method.warn_if_lossy()
        return LLM(self.name, self.model, self.tokenizer, engine, source=self.source)

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion: ...
    @overload
    def generate(self, prompt: list[str] | list[list[Message]], **options: Unpack[Options]) -> list[Completion]: ...
    def generate(self, prompt: Any, **options: Unpack[Options]) -> Completion | list[Completion]:
        """Write the answer to a prompt, or the answers to a list of prompts, which run as one batch. The default is
        greedy, 256 tokens at most; see `Options`."""
        return self._complete([prompt], options)[0] if is_one(prompt) else self._complete(prompt, options)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Chunk]:
        """Write the answer step by step. Leaving the loop early cancels the rest."""
        reported, completion = 0, None
        with self._running([prompt], options, streaming=True) as [generation]:
            while completion is None:
                # Another stream may have stepped this one too, and a step may report its tokens with the next step.
                while reported == len(generation.pieces) and not generation.finished:
                    self.engine.step()
                over = generation.finished  # read first: tokens that another thread adds come with a later chunk
                pieces = generation.pieces[reported:]
                reported += len(pieces)
                completion = self._completion(generation) if over else None
                yield Chunk("".join(piece.text for piece in pieces), pieces, completion)

    def explain(self, completion: Completion | None = None, plain: Completion | None = None) -> Explanation:
        """Where the time of an answer went (by default of the last one), what nodes cost and earned, and what would
        help. `plain` is the same answer by plain decoding, if it was written for comparison."""
        completion = completion or self.last
        if completion is None:
            raise UsageError("Nothing was written yet that could be explained; generate something first.")
        stats, engine = completion.stats, self.engine
        reasons = engine.reasons(stats.each[-1].batch) if stats.each else []
        return explain(stats, engine.target.info, engine.drafter.name, None if plain is None else plain.stats, reasons)

    def save_state(self, path: str | PathLike[str] | None = None) -> None:
        """Write what the drafter has learned to a file, by default to the `state` with which the model was loaded.

        A file is replaced as a whole: if several processes share it, it holds the state that was saved last.
        """
        place = self.state if path is None else path
        if place is None:
            raise UsageError("There is no file for the state yet; name one, as in save_state('drafter.state').")
        with self.engine.turn:  # no step of another thread may change the state meanwhile
            save_state(self.engine.drafter, place, self.engine.target.info)

    def encode(self, prompt: Prompt, *, raw: bool = False, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The token ids of a prompt as the model will see it, with the chat template. The template also shows `tools`:
        a JSON schema for each function, as transformers describes them."""
        messages = messages_of(prompt)
        if not any(message["content"].strip() for message in messages):
            raise UsageError("The prompt is empty; there is nothing to continue.")
        if raw and not isinstance(prompt, str):
            raise UsageError("raw takes one text, not a conversation.")
        if not raw and self.tokenizer.chat_template:
            told: Any = {"tools": list(tools) or None, "add_generation_prompt": True, "tokenize": False}
            text = self.tokenizer.apply_chat_template(messages, **told)
            return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if not isinstance(prompt, str):
            raise UsageError(f"{self.name} has no chat template; give the prompt as one text.")
        return list(self.tokenizer(prompt, verbose=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The tokens with which the model itself ends an answer."""
        stated = self.model.generation_config.eos_token_id if self.model.generation_config else None
        ends = [stated] if isinstance(stated, int) else list(stated or ())
        return frozenset(token for token in (*ends, self.tokenizer.eos_token_id) if token is not None)

    def grammar(self, options: Options) -> Grammar | None:
        """The grammar that `json_schema`, `regex` or `grammar` of the options describes, in the tokens of the model."""
        given: Any = {name: options.get(name) for name in ("json_schema", "regex", "grammar")}
        if all(source is None for source in given.values()):
            return None
        if options.get("ignore_eos"):
            raise UsageError("A text that follows a grammar ends with it; leave out ignore_eos.")
        return compiler_for(self.tokenizer, self.engine.target.info.vocabulary, self.stop_tokens).compile(**given)

    def _complete(self, prompts: Sequence[Prompt], options: Options) -> list[Completion]:
        with self._running(prompts, options, streaming=False) as generations:
            while not all(generation.finished for generation in generations):
                self.engine.step()
            return [self._completion(generation) for generation in generations]

    @contextmanager
    def _running(self, prompts: Sequence[Prompt], options: Options, *, streaming: bool) -> Iterator[list[Generation]]:
        """The prompts as requests of the engine; requests that are unfinished at the end are cancelled."""
        for name in options:
            if name not in Options.__annotations__:
                raise UsageError(f"generate has no option {name!r}.{nearest(name, Options.__annotations__)}")
        sampling = SamplingParams(**{key: value for key, value in options.items() if key in SAMPLING})  # type: ignore[arg-type]
        stop = stop_strings(options.get("stop"))
        grammar = self.grammar(options)
        encoded = [tuple(self.encode(prompt, raw=options.get("raw", False))) for prompt in prompts]
        requests = [
            Request(
                prompt=prompt,
                sampling=sampling if grammar is None else grammar.applied_to(sampling, len(prompt)),
                max_new_tokens=options.get("max_new_tokens", 256),
                stop_tokens=frozenset() if options.get("ignore_eos") else self.stop_tokens,
                logprobs=options.get("logprobs", False),
                top_logprobs=options.get("top_logprobs", 0),
                task=options.get("task"),
            )
            for prompt in encoded
        ]
        generations: list[Generation] = []
        try:
            for request in requests:
                text = TextStream(self.decode, stop) if streaming or stop else None
                generations.append(self.engine.submit(request, text))
            yield generations
        finally:
            for generation in generations:
                self.engine.cancel(generation)

    def _completion(self, generation: Generation) -> Completion:
        assert generation.finish_reason is not None
        tokens = generation.token_ids
        ended = generation.finish_reason is FinishReason.STOP  # the stop token itself is not part of the text
        text = self.decode(tokens[:-1] if ended else tokens) if generation.text is None else generation.text.text
        logprobs = [piece.logprob for piece in generation.pieces if piece.logprob is not None]
        found = Completion(
            text=text,
            token_ids=tokens,
            logprobs=logprobs if generation.request.logprobs else None,
            finish_reason=generation.finish_reason.value,
            stats=generation.stats,
            prompt_tokens=generation.sequence.prompt_length,
            seed=generation.sequence.seed,
            pieces=generation.pieces,
            error=generation.error,
            model=self.name,
        )
        self.last = found
        return found
