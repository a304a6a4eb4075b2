"""Branchwise inside transformers' own `generate`.

    model.generate(**inputs, custom_generate=branchwise.hf.generate)

Everything else works as in `generate`: generation config, logits processors, stopping criteria, padding. The model is
left unchanged. Transformers keeps three arguments for itself, so they never reach this function: `streamer` (use
`token_callback`), `assistant_model` (use `drafter`) and `tokenizer`, which a drafter may need:

    model.generate(**inputs, custom_generate=functools.partial(branchwise.hf.generate, tokenizer=tokenizer), …)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from branchwise.backends.base import nodes_for
from branchwise.backends.transformers.target import SHORTEST_CONTEXT, TransformersTarget
from branchwise.core.sampling import Processor, SamplingParams
from branchwise.draft import build_drafter
from branchwise.draft.base import Drafter
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.engine import Engine, Generation, Piece, Request
from branchwise.errors import UsageError
from branchwise.methods import DEFAULT, PRESETS, Method
from branchwise.verify import VERIFIERS

PURE_PROCESSORS = {
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}
"""logits processors that depend only on the tokens before and the scores, so that they can run along any path"""

UNDERSTOOD = {"attention_mask", "cache_position", "inputs_embeds", "logits_to_keep", "past_key_values", "position_ids"}
UNDERSTOOD |= {"output_attentions", "output_hidden_states", "use_cache"}
"""arguments that `generate` itself passes on; unsupported values of them are refused with a specific reason"""

PURE_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)

_drafting: WeakKeyDictionary[PreTrainedModel, dict[str, Any]] = WeakKeyDictionary()
"""The weights of draft models by their specs, kept as long as the model that they drafted for. A drafter itself belongs
to one call, because it knows its target, and threads may share a model."""


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    drafter: str | Drafter | None = None,
    tree: str | None = None,
    verifier: str = "match",
    token_callback: Callable[[int, int], None] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    guard: bool = True,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """The function to pass as `custom_generate`; all rows of the batch are drafted and scored together.

    Without a `drafter`, the drafter of the method `default` is used, which learns within the call. `token_callback(row,
    token)` is called for every token as it is emitted. With sampling, `torch.manual_seed` decides the outcome as usual,
    but the draws are not those of `generate`. A draft model that a spec names is loaded once, and kept as long as the
    model. With a `guard` nothing is drafted while drafting is slower than plain decoding.
    """
    config = generation_config if generation_config is not None else model.generation_config
    processors = list(logits_processor or ())
    criteria = list(stopping_criteria or ())
    _refuse_what_cannot_run(config, processors, criteria, model_kwargs, model.device)

    mask = model_kwargs.get("attention_mask")
    rows = [_strip(row, None if mask is None else mask[i]) for i, row in enumerate(input_ids)]
    width = input_ids.shape[1]
    limits = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
    if not limits:
        raise UsageError("generate needs max_new_tokens or max_length, so that the cache can be laid out.")
    new_tokens = min(limits) - width
    context = max(len(row) for row in rows) + new_tokens
    if drafter is None:
        drafter, tree = PRESETS[DEFAULT].draft, tree or PRESETS[DEFAULT].tree
    drafting = build_drafter(drafter, tree) if isinstance(drafter, str) else drafter
    room, nodes = max(context, SHORTEST_CONTEXT), nodes_for(drafting.largest)
    target = TransformersTarget(model, slots=len(rows), context=room, max_nodes=nodes, tokenizer=tokenizer)
    engine = Engine(target, drafting, VERIFIERS.build(verifier), guard=guard)
    engine.warn()
    Method(drafting.name, drafting.name, tree, verifier).warn_if_lossy()
    for part in (drafting, *drafting.sources):
        if isinstance(drafter, str) and isinstance(part, ModelDrafter):
            _drafting.setdefault(model, {})[drafter] = part.weights
    stop_tokens = {int(token) for c in criteria if isinstance(c, EosTokenCriteria) for token in c.eos_token_id}
    others = StoppingCriteriaList([c for c in criteria if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria))])

    requests = []
    for padded, tokens in zip(input_ids, rows, strict=True):
        padding = padded[: width - len(tokens)]
        seed = int(torch.randint(1 << 62, ()))
        along = (_along_path(LogitsProcessorList(processors), padding),) if processors else ()
        sampling = SamplingParams(temperature=1.0 if config.do_sample else 0.0, seed=seed, processors=along)
        requests.append(
            Request(
                prompt=tuple(tokens),
                sampling=sampling,
                max_new_tokens=new_tokens,
                stop_tokens=frozenset(stop_tokens),
                stop_when=_stop_when(others, padding) if others else None,
            )
        )
    generations: list[Generation] = []

    def report(generation: Generation, pieces: list[Piece]) -> None:
        if token_callback is not None:
            for piece in pieces:
                token_callback(generations.index(generation), piece.token)

    try:
        generations += [engine.submit(request, on_output=report) for request in requests]
        while engine.busy:
            engine.step()
    finally:
        for generation in generations:  # a callback or a processor may have raised
            engine.cancel(generation)
    for generation in generations:
        generation.check()

    longest = max(len(generation.token_ids) for generation in generations)
    filler = config.pad_token_id if config.pad_token_id is not None else _first(config.eos_token_id)
    output = torch.full((len(rows), width + longest), filler, device=input_ids.device)
    output[:, :width] = input_ids
    for row, generation in enumerate(generations):
        output[row, width : width + len(generation.token_ids)] = torch.tensor(generation.token_ids)
    return GenerateDecoderOnlyOutput(sequences=output) if config.return_dict_in_generate else output  # type: ignore[arg-type]


def _padded(padding: Tensor, tokens: Sequence[int]) -> Tensor:
    """(1, length): a row as `generate` passes it; some processors (lengths, penalties) count or see the padding."""
    return torch.cat([padding, torch.tensor(tokens, device=padding.device)])[None]


def _along_path(processors: LogitsProcessorList, padding: Tensor) -> Processor:
    """transformers' logits processors, run on the tokens that lead to one node of a tree."""
    return lambda tokens, logits: processors(_padded(padding, tokens), logits[None])[0]  # type: ignore[arg-type]


def _stop_when(criteria: StoppingCriteriaList, padding: Tensor) -> Callable[[Sequence[int]], bool]:
    """transformers' stopping criteria for one row."""
    return lambda tokens: bool(criteria(_padded(padding, tokens), None).all())


def _first(token: int | list[int] | None) -> int:
    """The token that `generate` pads with if no padding token is set: the first of those that end a text."""
    return token if isinstance(token, int) else (token or [0])[0]


def _strip(row: Tensor, mask: Tensor | None) -> list[int]:
    """The tokens of a row without its left padding."""
    if mask is None:
        return [int(token) for token in row]
    start = int(mask.argmax())
    if mask.ndim != 1 or not bool(mask[start:].all()):
        raise UsageError("Only left padding can be served: pad with padding_side='left'.")
    return [int(token) for token in row[start:]]


def _refuse_what_cannot_run(
    config: GenerationConfig,
    processors: list[Any],
    criteria: list[Any],
    model_kwargs: dict[str, Any],
    device: torch.device,
) -> None:
    if (config.num_beams or 1) > 1:
        raise UsageError("Beam search is not sampling from the model's distribution; use num_beams=1.")
    for request in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, request, None):
            raise UsageError(f"{request} is not available with branchwise.hf.generate; leave it out.")
    if model_kwargs.get("inputs_embeds") is not None:
        raise UsageError("branchwise.hf.generate drafts token ids; give input_ids, not inputs_embeds.")
    if torch.is_autocast_enabled(device.type):
        raise UsageError(
            "Under autocast the distribution depends on what is computed together; load the model in that dtype."
        )
    for name, value in model_kwargs.items():
        if name not in UNDERSTOOD and value is not None:
            raise UsageError(f"{name} would be ignored by branchwise.hf.generate; leave it out.")
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is not None:
        steps = torch.ones_like(positions) if mask is None else mask.long()
        if not torch.equal(positions * steps, (steps.cumsum(-1) - 1) * steps):
            raise UsageError("branchwise.hf.generate counts positions from 0; leave out position_ids.")
    past = model_kwargs.get("past_key_values")
    if past is not None and past.get_seq_length() > 0:
        raise UsageError("branchwise.hf.generate keeps a cache of its own; leave out past_key_values.")
    unknown = [part for part in processors if type(part).__name__ not in PURE_PROCESSORS]
    unknown += [part for part in criteria if not isinstance(part, PURE_CRITERIA)]
    for part in unknown:
        if not getattr(part, "pure", False):
            raise UsageError(
                f"{type(part).__name__} may keep a state or look beyond its row, so it cannot run along the paths of a "
                "tree; leave it out, or set its attribute `pure = True` if it depends on input_ids alone, or as a "
                "logits processor on input_ids and scores alone."
            )
