"""transformers' own `generate` on the same weights: plain, compiled, with prompt lookup, and with an assistant.

Outside its passes our target leaves the model unchanged, so `generate` uses its usual attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import CompileConfig, GenerationConfig, StaticCache

from branchwise.bench.contest import Answer, Asked, Peer, synchronized
from branchwise.errors import PairingError, UsageError
from branchwise.llm import LLM
from branchwise.models import load_model
from branchwise.models.show import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_config: Any = GenerationConfig
NOT_COMPILED = "none"
SHORTEST = 512
"""the fewest tokens that a fixed KV cache holds"""


class Plain(Peer):
    """Writes one token a pass. A batch is padded on the left."""

    def __init__(self, *, name: str, llm: LLM) -> None:
        self.name = name
        self._model: PreTrainedModel = llm.model
        known = (llm.tokenizer.pad_token_id, llm.tokenizer.eos_token_id, 0)
        self._pad = next(token for token in known if token is not None)
        self._options: dict[str, Any] = {}
        """further fields of the generation config"""
        self._helper: dict[str, Any] = {}
        """further arguments of `generate`"""

    def write(self, prompts: Sequence[Sequence[int]], asked: Asked) -> list[Answer]:
        answers = self._generate(prompts, asked)
        for answer in answers:
            tokens = len(answer.ids)
            answer.steps = answer.target_passes = tokens
            answer.drafted = answer.accepted = answer.draft_passes = 0
            answer.by_source = {"target": tokens}
        return answers

    def _generate(self, prompts: Sequence[Sequence[int]], asked: Asked) -> list[Answer]:
        """The answers to a batch, without counts."""
        width = max(map(len, prompts))
        rows = [[self._pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        sampling: dict[str, Any] = {"do_sample": asked.temperature > 0}
        if asked.temperature > 0:
            sampling |= {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k}
        device = self._model.device
        generate: Any = self._model.generate
        helper = self._arguments(len(prompts), width + asked.max_new_tokens)
        with self._generating(asked.seeds):
            start = synchronized(device)
            written = generate(
                torch.tensor(rows, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=_config(
                    max_new_tokens=asked.max_new_tokens,
                    eos_token_id=sorted(asked.stop_tokens) or None,
                    suppress_tokens=sorted(asked.forbidden) or None,
                    pad_token_id=self._pad,
                    **sampling,
                    **self._options,
                ),
                **helper,
            )
            seconds = synchronized(device) - start
        return [_answer(row, asked, seconds) for row in written[:, width:].tolist()]

    def _arguments(self, batch: int, length: int) -> dict[str, Any]:
        """Further arguments of `generate` for `batch` texts of at most `length` tokens, prompt included."""
        return self._helper

    @contextlib.contextmanager
    def _generating(self, seeds: Sequence[int]) -> Iterator[None]:
        """Print nothing, ignore the checkpoint's recommendations, and draw from the first seed, if one is given.

        A checkpoint's generation config may hold penalties and cuts, which `generate` would add to the requested
        sampling.
        """
        recommended = self._model.generation_config
        self._model.generation_config = GenerationConfig()
        devices = [self._model.device] if self._model.device.type == "cuda" else []
        try:
            with quiet(), torch.random.fork_rng(devices, enabled=bool(seeds)):
                if seeds:
                    torch.manual_seed(seeds[0])
                yield
        finally:
            self._model.generation_config = recommended


class Static(Plain):
    """The fast path that transformers recommends: a KV cache of fixed size, and passes that torch compiles.

    By default `generate` compiles on accelerators, where that pays. With `compile=BACKEND` it compiles on every device,
    by that backend of torch.compile, and with `compile=none` on none. The first text of a size compiles, and benchmarks
    do not time it.
    """

    def __init__(self, compile: str = "auto", *, name: str, llm: LLM) -> None:
        super().__init__(name=name, llm=llm)
        if compile == NOT_COMPILED:
            self._options = {"disable_compile": True}
        elif compile != "auto":
            if compile not in (known := torch.compiler.list_backends(exclude_tags=())):
                raise UsageError(f"torch has no compiler {compile!r}; take auto, {NOT_COMPILED} or one of {known}.")
            chosen: Any = CompileConfig(backend=compile, mode="default")
            chosen._compile_all_devices = True
            self._options = {"compile_config": chosen}
        self._caches: dict[tuple[int, int], StaticCache] = {}

    def _arguments(self, batch: int, length: int) -> dict[str, Any]:
        """The same cache for all texts of about this length, because compiled passes are recorded again for another."""
        size = batch, max(SHORTEST, 1 << (length - 1).bit_length())
        if size in self._caches:
            self._caches[size].reset()
        else:
            self._caches[size] = StaticCache(config=self._model.config, max_cache_len=size[1])
        return {"past_key_values": self._caches[size]}


class Drafting(Plain):
    """Writes several tokens a pass. `generate` drafts for one sequence only, so the prompts of a batch are written one
    after another, as its users have to do; each answer reports the time of all of them."""

    source: str
    """the source that proposes tokens"""

    def write(self, prompts: Sequence[Sequence[int]], asked: Asked) -> list[Answer]:
        alone = [replace(asked, seeds=asked.seeds[number : number + 1]) for number in range(len(prompts))]
        answers = [self._write(list(prompt), own) for prompt, own in zip(prompts, alone, strict=True)]
        seconds = sum(answer.seconds for answer in answers)
        for answer in answers:
            answer.seconds = seconds
        return answers

    def _write(self, prompt: list[int], asked: Asked) -> Answer:
        """Write one answer. `generate` does not report what was drafted, but the widths of the passes show it.

        Its first pass takes the prompt and the first draft together, so every pass is a step: it emits the accepted
        tokens of the draft, and one token of the target after them.
        """
        with _widths(self._model) as widths:
            [answer] = self._generate([prompt], asked)
        answer.steps = answer.target_passes = len(widths)
        answer.drafted = sum(widths) - len(prompt) - (len(widths) - 1)
        answer.accepted = len(answer.ids) - len(widths)
        answer.draft_passes = 0
        answer.by_source = {"target": len(widths), self.source: answer.accepted}
        return answer


class Lookup(Drafting):
    """Saxena's prompt lookup, as implemented in transformers."""

    source = "lookup"

    def __init__(self, tokens: int = 10, *, name: str, llm: LLM) -> None:
        super().__init__(name=name, llm=llm)
        if tokens < 1:
            raise UsageError(f"tokens must be at least 1, not {tokens}.")
        self._options = {"prompt_lookup_num_tokens": tokens}


class Assisted(Drafting):
    """A smaller model drafts; transformers and the checkpoint choose the length of its drafts."""

    source = "assistant"
    usage = "transformers-assisted:MODEL"

    def __init__(self, place: str | None, *, name: str, llm: LLM, threads: int | None = None) -> None:
        super().__init__(name=name, llm=llm)
        if place is None:
            raise UsageError(f"Peer 'transformers-assisted' needs a model that drafts; write it as {self.usage}.")
        self._assistant, tokenizer = load_model(place, dtype=llm.model.dtype, device=str(llm.model.device))
        sizes = [model.config.get_text_config().vocab_size for model in (llm.model, self._assistant)]
        if sizes[0] != sizes[1] or tokenizer.get_vocab() != llm.tokenizer.get_vocab():
            raise PairingError(f"{place} has another vocabulary than {llm.name}; take a model with the same tokenizer.")
        self._helper = {"assistant_model": self._assistant}
        self._recommended = self._assistant.generation_config
        self.forget()

    def forget(self) -> None:
        """Reset the assistant's generation config, in which transformers, with some schedules, keeps the latest length
        of its drafts.

        Of the recommendations of its checkpoint only those about the length of drafts stay: penalties would spoil the
        drafts, and an end-of-text token of its own would cut them even if none is asked for.
        """
        about = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
        kept = {name: getattr(self._recommended, name, None) for name in about}
        self._assistant.generation_config = _config(**kept)

    def _write(self, prompt: list[int], asked: Asked) -> Answer:
        with _widths(self._assistant) as widths:
            answer = super()._write(prompt, asked)
        answer.draft_passes = len(widths)
        answer.draft_cost = _bytes(self._assistant) / _bytes(self._model)
        return answer


def _bytes(model: Any) -> int:
    return sum(weights.nbytes for weights in model.parameters())


def _answer(written: list[int], asked: Asked, seconds: float) -> Answer:
    """The tokens of a row up to its first stop token; the rest is padding."""
    end = next((number for number, token in enumerate(written, 1) if token in asked.stop_tokens), None)
    return Answer(written[:end], "length" if end is None else "stop", seconds)


@contextlib.contextmanager
def _widths(model: nn.Module) -> Iterator[list[int]]:
    """How many tokens each pass of the model takes, while the context is open."""
    widths: list[int] = []

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        widths.append(kwargs["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(see, with_kwargs=True)
    try:
        yield widths
    finally:
        handle.remove()
