"""Doubles of what Branchwise takes from vLLM 0.32: the same names, the same parameters, and steps of the same order.

`tests/vllm/test_doubles.py` compares them with the real ones where vLLM is installed. The model is a table: what
follows a token depends on that token alone.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

VERSION = "0.32.0"
VOCABULARY = 8
CONTEXT = 64


@dataclass
class SamplingMetadata:
    temperature: Tensor | None
    all_greedy: bool
    all_random: bool
    top_p: Tensor | None
    top_k: Tensor | None
    generators: dict[int, torch.Generator]
    max_num_logprobs: int | None = None


@dataclass
class SpecDecodeMetadata:
    draft_token_ids: Tensor
    num_draft_tokens: list[int]
    cu_num_draft_tokens: Tensor


@dataclass
class CachedRequestState:
    req_id: str
    prompt_token_ids: list[int] | None
    sampling_params: Any
    output_token_ids: list[int] = field(default_factory=list)
    generator: torch.Generator | None = None


def rejection_sample(
    draft_token_ids: Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_logits: Tensor,
    bonus_token_ids: Tensor,
    sampling_metadata: SamplingMetadata,
    synthetic_mode: bool = False,
    synthetic_conditional_rates: Tensor | None = None,
    use_fp64_gumbel: bool = False,
) -> Tensor:
    """Rejects every draft, so that a test sees who verified."""
    out = torch.full((len(num_draft_tokens), max_spec_len + 1), -1, dtype=torch.int32)
    rows = torch.tensor([0, *cu_num_draft_tokens.tolist()[:-1]])
    best = target_logits.argmax(dim=-1)
    for request, length in enumerate(num_draft_tokens):
        out[request, 0] = best[rows[request]] if length else bonus_token_ids[request, 0]
    return out


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """As on the CPU: nothing is written."""
    return torch.full((num_tokens,), torch.nan, dtype=torch.float32)


def apply_sampling_constraints(
    logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: SamplingMetadata
) -> Tensor:
    if sampling_metadata.all_greedy:
        return logits
    module = sys.modules["vllm.v1.sample.rejection_sampler"]
    assert sampling_metadata.temperature is not None
    temperature = module.expand_batch_to_tokens(
        sampling_metadata.temperature, cu_num_draft_tokens, len(logits), replace_from=0, replace_to=1
    )
    logits.div_(temperature[:, None])
    if sampling_metadata.top_k is not None:
        most = int(module.expand_batch_to_tokens(sampling_metadata.top_k, cu_num_draft_tokens, len(logits)).max())
        logits.masked_fill_(logits < logits.topk(most).values[:, -1:], -torch.inf)
    return logits


class Sampler:
    """Tokens of rows that are cut already."""

    def topk_topp_sampler(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, None]:
        noise = torch.empty_like(logits).exponential_()
        for row, generator in generators.items():
            noise[row].exponential_(generator=generator)
        return (logits.softmax(dim=-1) / noise).argmax(dim=-1), None


class GPUModelRunner:
    """The parts of a step that hooks see, in their order."""

    def __init__(self, drafter: Any, table: Tensor) -> None:
        self.drafter, self.table = drafter, table
        self.device = torch.device("cpu")
        self.speculative_config = SimpleNamespace(
            rejection_sample_method="standard", draft_sample_method="greedy", method="custom_class"
        )
        self.requests: dict[str, CachedRequestState] = {}
        self.sampler = Sampler()
        self.input_batch = SimpleNamespace(req_ids=[], num_tokens_no_spec=None, token_ids_cpu=None)
        self._draft_probs: Tensor | None = None
        self._draft_prob_req_ids: list[str] | None = None
        self.drafts: dict[str, list[int]] = {}
        """what the scheduler knows of them"""
        self.seen_q: Tensor | None = None

    def _update_states(self, scheduler_output: Any) -> Any:
        for name in scheduler_output.finished_req_ids:
            self.requests.pop(name, None)

    def _sample(self, logits: Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None) -> Tensor:
        module, metadata = sys.modules["vllm.v1.sample.rejection_sampler"], self.input_batch.sampling_metadata
        assert logits is not None
        assert spec_decode_metadata is not None
        lengths = spec_decode_metadata.num_draft_tokens
        ends = torch.tensor(lengths).add(1).cumsum(0) - 1
        bonus = self._bonus(logits[ends], metadata)
        target = logits[[row for row in range(len(logits)) if row not in set(ends.tolist())]]
        target = module.apply_sampling_constraints(target, spec_decode_metadata.cu_num_draft_tokens, metadata)
        q, self.seen_q = self._q(lengths), None
        self.seen_q = q
        logits.fill_(0)  # as vLLM's samplers may
        found: Tensor = module.rejection_sample(
            spec_decode_metadata.draft_token_ids, lengths, max(lengths), spec_decode_metadata.cu_num_draft_tokens, q,
            target, bonus[:, None], metadata,
        )  # fmt: skip
        return found

    def _bonus(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        if metadata.all_greedy or metadata.temperature is None:
            return logits.argmax(dim=-1)
        warm = metadata.temperature.clone()
        warm[warm == 0] = 1
        drawn, _ = self.sampler.topk_topp_sampler(logits / warm[:, None], metadata.generators, None, None)
        return torch.where(metadata.temperature == 0, logits.argmax(dim=-1), drawn)

    def _q(self, lengths: list[int]) -> Tensor | None:
        if self._draft_probs is None or self._draft_prob_req_ids is None:
            return None
        rows = {name: row for row, name in enumerate(self._draft_prob_req_ids)}
        if any(name not in rows for name, length in zip(self.input_batch.req_ids, lengths, strict=True) if length):
            return None
        parts = [
            self._draft_probs[rows[name], :length]
            for name, length in zip(self.input_batch.req_ids, lengths, strict=True)
            if length
        ]
        return torch.cat(parts) if parts else None

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: SamplingMetadata,
        hidden_states: Any,
        sample_hidden_states: Any,
        aux_hidden_states: Any,
        spec_decode_metadata: SpecDecodeMetadata,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> list[list[int]]:
        self._draft_probs = self._draft_prob_req_ids = None
        drafts: list[list[int]] = self.drafter.propose(
            sampled_token_ids, self.input_batch.num_tokens_no_spec, self.input_batch.token_ids_cpu, slot_mappings=None
        )
        return drafts

    # What a scheduler does

    def add(self, name: str, prompt: list[int], **params: Any) -> None:
        usual = {"temperature": 0.0, "seed": None, "max_tokens": 20, "structured_outputs": None, "extra_args": None}
        self.requests[name] = CachedRequestState(name, prompt, SimpleNamespace(**usual | {"top_k": None} | params))
        if self.requests[name].sampling_params.seed is not None:
            self.requests[name].generator = torch.Generator().manual_seed(0)

    def step(self, names: list[str], finished: tuple[str, ...] = (), most: int = 99) -> dict[str, list[int]]:
        """One pass over these requests, with at most so many drafts of each; what they emit."""
        output = SimpleNamespace(finished_req_ids=set(finished), num_spec_tokens_to_schedule=None)
        self._update_states(output)
        requests = [self.requests[name] for name in names]
        drafts = [self.drafts.pop(name, [])[:most] for name in names]
        texts = [[*(request.prompt_token_ids or []), *request.output_token_ids] for request in requests]
        rows = [self.table[[text[-1], *draft]] for text, draft in zip(texts, drafts, strict=True)]
        params = [request.sampling_params for request in requests]
        warm, batch = torch.tensor([one.temperature for one in params]), self.input_batch
        top_k = torch.tensor([one.top_k or VOCABULARY for one in params])
        batch.req_ids = list(names)
        batch.sampling_metadata = SamplingMetadata(
            warm, bool((warm == 0).all()), bool((warm > 0).all()), None,
            top_k if any(one.top_k for one in params) else None,
            {row: request.generator for row, request in enumerate(requests) if request.generator is not None},
        )  # fmt: skip
        batch.num_tokens_no_spec = np.array([len(text) for text in texts])
        batch.token_ids_cpu = np.zeros((len(names), CONTEXT), dtype=np.int32)
        lengths = [len(draft) for draft in drafts]
        flat = torch.tensor([token for draft in drafts for token in draft], dtype=torch.long)
        metadata = SpecDecodeMetadata(flat, lengths, torch.tensor(lengths).cumsum(0))
        found = self._sample(torch.cat(rows).clone(), metadata)
        sampled = [[token for token in row if token >= 0] for row in found.tolist()]
        for row, (request, text, new) in enumerate(zip(requests, texts, sampled, strict=True)):
            request.output_token_ids += new
            batch.num_tokens_no_spec[row] = len(text) + len(new)
            batch.token_ids_cpu[row, : len(text) + len(new)] = [*text, *new]
        proposed = self.propose_draft_token_ids(
            output, sampled, batch.sampling_metadata, None, None, None, metadata, None, None
        )
        self.drafts.update(zip(names, proposed, strict=True))
        return dict(zip(names, sampled, strict=True))


PARTS: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": VERSION},
    "vllm.v1": {},
    "vllm.v1.sample": {},
    "vllm.v1.worker": {},
    "vllm.v1.spec_decode": {},
    "vllm.v1.sample.metadata": {"SamplingMetadata": SamplingMetadata},
    "vllm.v1.spec_decode.metadata": {"SpecDecodeMetadata": SpecDecodeMetadata},
    "vllm.v1.worker.gpu_input_batch": {"CachedRequestState": CachedRequestState},
    "vllm.v1.sample.rejection_sampler": {
        "rejection_sample": rejection_sample,
        "expand_batch_to_tokens": expand_batch_to_tokens,
        "apply_sampling_constraints": apply_sampling_constraints,
    },
}


def install_doubles(monkeypatch: pytest.MonkeyPatch) -> type[GPUModelRunner]:
    """A fresh vLLM, without hooks; the class of its runner."""
    from branchwise.integrations.vllm import hooks, running

    runner = type("GPUModelRunner", (GPUModelRunner,), dict(vars(GPUModelRunner)))
    for name, parts in (PARTS | {"vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": runner}}).items():
        module = ModuleType(name)
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(hooks, "_installed", None)
    monkeypatch.setattr(running, "_said", set())
    return runner


def config(length: int = 4, **options: Any) -> Any:
    """What vLLM gives a proposer."""
    model = SimpleNamespace(model="double", max_model_len=CONTEXT, seed=0, get_vocab_size=lambda: VOCABULARY)
    return SimpleNamespace(
        additional_config={"branchwise": options},
        speculative_config=SimpleNamespace(num_speculative_tokens=length),
        model_config=model,
        device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )
