"""The hooks in a worker: between a pass and its verdict, and between the verdict and the next drafts.

A runner is ours if its drafter is a `HookedProposer`, or if it was asked for block verification. For all others, and
outside of `_sample`, every function below only calls the original.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from branchwise.integrations.vllm.verify import NO_SEEDS, Seeds, generator_seed, verify

log = logging.getLogger("vllm.branchwise")

Original = Callable[..., Any]


class HookedProposer(ABC):
    """A drafter to which the hooks pass on what vLLM does not."""

    verifies: bool
    """whether Branchwise verifies its chains, or vLLM by its own rule"""

    @abstractmethod
    def close(self, names: Iterable[str]) -> None:
        """Forget these requests, which have ended."""

    @abstractmethod
    def show(self, logits: Tensor, lengths: Sequence[int], drafts: Sequence[int]) -> None:
        """Take the logits (rows, vocabulary) of a pass, before they are sampled from: for every request those after its
        root and after each of its drafts."""

    @abstractmethod
    def expect(self, names: Sequence[str], requests: Mapping[str, Any], most: int | None) -> None:
        """Take the requests of the rows that are drafted for next, and the most drafts for each."""

    @abstractmethod
    def has_drawn(self, name: str) -> bool:
        """Whether the last chain of a request was drawn."""

    @abstractmethod
    def q_of(self, names: Sequence[str]) -> Tensor | None:
        """(requests, drafts, vocabulary): the distributions that chains were drawn from, certain of each token of a
        chain without chance; None if no chain was drawn."""


@dataclass(frozen=True, eq=False)
class Judging:
    """How verification runs while a runner of ours samples."""

    verifies: bool
    """whether Branchwise verifies, or vLLM"""
    sampler: Any = None
    """vLLM's sampler, for rows whose warping is done"""
    drawn: Sequence[bool] | None = None
    """for each request, whether its chain was drawn; None if all chains with a known q were"""
    seeds: Seeds = field(default_factory=lambda: NO_SEEDS)


_judging: Judging | None = None
"""set while a runner of ours samples; a worker runs one step at a time"""
_said: set[str] = set()


def say_once(sentence: str) -> None:
    if sentence not in _said:
        _said.add(sentence)
        log.info(sentence)


def asks_for_block(runner: Any) -> bool:
    config = runner.speculative_config
    return config is not None and config.rejection_sample_method == "block"


def proposer_of(runner: Any) -> HookedProposer | None:
    """The drafter of a runner if it is ours, else None, as on a rank that does not sample."""
    drafter = vars(runner).get("drafter")
    return drafter if isinstance(drafter, HookedProposer) else None


# Hooks of the runner


def update_states(original: Original, runner: Any, scheduler_output: Any) -> Any:
    found = original(runner, scheduler_output)
    if (proposer := proposer_of(runner)) is not None:
        proposer.close(scheduler_output.finished_req_ids)
    return found


def sample(original: Original, runner: Any, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
    global _judging
    proposer = proposer_of(runner)
    if (proposer is None and not asks_for_block(runner)) or logits is None:
        return original(runner, logits, spec_decode_metadata)
    lengths = [] if spec_decode_metadata is None else list(spec_decode_metadata.num_draft_tokens)
    seeds = seeds_of(runner, lengths)
    drawn = None
    if proposer is not None:
        drafts = [] if spec_decode_metadata is None else spec_decode_metadata.draft_token_ids.tolist()
        proposer.show(logits, lengths, drafts)
        drawn = [proposer.has_drawn(name) for name in runner.input_batch.req_ids]
    verifies = proposer is None or proposer.verifies
    _judging = Judging(verifies, runner.sampler.topk_topp_sampler, drawn, seeds if verifies else NO_SEEDS)
    try:
        return original(runner, logits, spec_decode_metadata)
    finally:
        _judging = None


class HostGenerator(torch.Generator):
    """A generator that can be wound back without effect. vLLM winds a generator back if it sampled after a part of a
    prompt, which fails on the CPU and ends the engine. Here generators are set before every draw, so winding back is
    not needed."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self


def seeds_of(runner: Any, lengths: Sequence[int]) -> Seeds:
    """The seed of each seeded request and the position of its next token. Also sets its generator for the token after
    its drafts, which vLLM draws first."""
    batch, seeds = runner.input_batch, {}
    generators = batch.sampling_metadata.generators
    for request, generator in list(generators.items()):
        state = runner.requests[batch.req_ids[request]]
        seed = state.sampling_params.seed
        position = int(batch.num_tokens_no_spec[request])
        behind = position + (lengths[request] if lengths else 0)
        if seed is not None:
            if generator.device.type == "cpu" and not isinstance(generator, HostGenerator):
                say_once("Branchwise lets prompts of seeded requests be read in chunks, where vLLM on the CPU fails.")
                generator = generators[request] = state.generator = HostGenerator()
            generator.manual_seed(generator_seed(seed, behind))
            seeds[request] = seed, position
    return seeds


def propose(
    original: Original, runner: Any, scheduler_output: Any, sampled_token_ids: Any, *rest: Any, **named: Any
) -> Any:
    proposer = proposer_of(runner)
    if proposer is None:
        if asks_for_block(runner) and "_enable_probabilistic_draft_probs" in vars(runner.drafter):
            # V1 keeps q only for its own rule.
            runner.drafter._enable_probabilistic_draft_probs = (
                runner.speculative_config.draft_sample_method == "probabilistic"
            )
        return original(runner, scheduler_output, sampled_token_ids, *rest, **named)
    names = list(runner.input_batch.req_ids)
    proposer.expect(names, runner.requests, scheduler_output.num_spec_tokens_to_schedule)
    drafts = original(runner, scheduler_output, sampled_token_ids, *rest, **named)
    q = proposer.q_of(names)
    if q is not None:
        runner._draft_probs, runner._draft_prob_req_ids = q.to(runner.device), names
    return drafts


# Hooks of the sampler


def rejection_sample(
    original: Original,
    draft_token_ids: Tensor,
    num_draft_tokens: Sequence[int],
    max_spec_len: int,
    cu_num_draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_logits: Tensor,
    bonus_token_ids: Tensor,
    sampling_metadata: Any,
    synthetic_mode: bool = False,
    synthetic_conditional_rates: Tensor | None = None,
    use_fp64_gumbel: bool = False,
) -> Tensor:
    judging = _judging
    if judging is None or not judging.verifies or synthetic_mode:
        found: Tensor = original(
            draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits,
            bonus_token_ids, sampling_metadata, synthetic_mode, synthetic_conditional_rates, use_fp64_gumbel,
        )  # fmt: skip
        return found
    greedy: Tensor | bool = sampling_metadata.all_greedy
    if not sampling_metadata.all_greedy and not sampling_metadata.all_random:
        greedy = sampling_metadata.temperature == 0
    drawn = [draft_probs is not None] * len(num_draft_tokens) if judging.drawn is None else judging.drawn
    return verify(
        draft_token_ids,
        num_draft_tokens,
        target_logits,
        bonus_token_ids[:, 0],
        q=draft_probs,
        drawn=drawn,
        greedy=greedy,
        seeds=judging.seeds,
        draws=lambda logits, generators: _drawn_by(judging.sampler, logits, generators),
    )


def _drawn_by(sampler: Any, logits: Tensor, generators: Mapping[int, torch.Generator]) -> Tensor:
    tokens: Tensor = sampler(logits, generators, None, None)[0]
    return tokens


# What vLLM 0.32 gets wrong on the CPU


def expand_batch_to_tokens(
    original: Original, x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """The value of every request, repeated for each of its drafts. On the CPU vLLM's kernel writes into a copy, so
    temperature, top-k and top-p of drafts would be whatever was in memory."""
    if _judging is None or x.device.type != "cpu":
        found: Tensor = original(x, cu_num_tokens, num_tokens, replace_from, replace_to)
        return found
    say_once("Branchwise sets temperature, top-k and top-p of drafts, which vLLM's kernel for the CPU never writes.")
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
    value = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return value.repeat_interleave(counts)


def apply_sampling_constraints(
    original: Original, logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any
) -> Tensor:
    """vLLM asks for the largest top-k of the drafts of a step, which fails if the step has no drafts."""
    if _judging is not None and not len(logits):
        say_once("Branchwise skips top-k and top-p in steps without drafts, where vLLM on the CPU fails.")
        return logits
    found: Tensor = original(logits, cu_num_draft_tokens, sampling_metadata)
    return found
