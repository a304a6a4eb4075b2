"""The class that vLLM builds for `"method": "custom_class"`: one chain a request, from drafters without a model.

    --speculative-config '{"model": "branchwise.integrations.vllm.Proposer", "num_speculative_tokens": 8}'
    --additional-config '{"branchwise": {"draft": "memories"}}'

Every rank of a tensor-parallel group has its own proposer and drafts for itself, so nothing here depends on time, or on
chance that ranks do not share. Without the hooks a proposer knows rows of a batch instead of requests, and tokens
alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from branchwise.backends.base import Scored, TargetInfo
from branchwise.core.rows import top_tokens
from branchwise.integrations.vllm.hooks import install
from branchwise.integrations.vllm.running import HookedProposer, log
from branchwise.integrations.vllm.settings import Settings
from branchwise.integrations.vllm.texts import TENANT, Asked, Texts

REPORTED = 16
"""the least number of tokens that a device reports after every node"""
LEARNS = {"request": "each request alone", "tenant": "each tenant's requests", "all": "all requests"}
UNKNOWN = Asked(constrained=True)


class Shown:
    """The results of a pass, row by row: n drafts of a request have n + 1 rows."""

    def __init__(self, logits: Tensor, lengths: Sequence[int], drafts: Sequence[int], reported: int) -> None:
        """`lengths` are the numbers of drafts of the requests; `drafts` are all drafts, one request after another."""
        on_host = logits.device.type == "cpu"
        # A copy, because vLLM's samplers write into the logits. A device reports the best tokens of rows instead.
        self.logits = logits.float().clone() if on_host else torch.empty(logits.shape, device="meta")
        self.topk = None if on_host else top_tokens(logits, min(reported, logits.shape[1])).cpu()
        self.lengths, self.drafts = lengths or [0] * len(logits), drafts

    def rows(self) -> list[tuple[list[int], Scored]]:
        """The drafts of every request, and what the pass found for them."""
        found, row, draft = [], 0, 0
        for length in self.lengths:
            own = slice(row, row + length + 1)
            topk = None if self.topk is None else self.topk[None, own]
            found.append((list(self.drafts[draft : draft + length]), Scored(self.logits[None, own], topk=topk)))
            row, draft = own.stop, draft + length
        return found


class Proposer(HookedProposer):
    """Drafts for vLLM."""

    def __init__(self, vllm_config: Any) -> None:
        self.settings = Settings.read(vllm_config.additional_config)
        self.length: int = vllm_config.speculative_config.num_speculative_tokens
        self.context: int = vllm_config.model_config.max_model_len
        target = TargetInfo(
            name=vllm_config.model_config.model,
            vocabulary=vllm_config.model_config.get_vocab_size(),
            context=self.context,
            max_nodes=self.length + 1,
            slots=vllm_config.scheduler_config.max_num_seqs,
        )
        self.texts = Texts(self.settings, target, seed=vllm_config.model_config.seed or 0)
        self.verifies = self.settings.verify == "auto"
        self._reported = max(REPORTED, self.texts.drafters.reported)
        self._most_requests = self.settings.most_requests(vllm_config.device_config.device_type)
        self.hooked = install()
        self._shown: Shown | None = None
        self._names: Sequence[str | int] = ()
        self._requests: Mapping[str, Any] = {}
        self._most = self.length
        log.info(
            "Branchwise drafts chains of up to %d tokens with %s (%s), learning from %s; verification: %s.",
            self.length,
            self.settings.draft,
            self.settings.chain,
            LEARNS[self.settings.share],
            "Branchwise's" if self.hooked and self.verifies else "vLLM's",
        )

    def load_model(self, target_model: Any) -> None:
        """Load nothing; vLLM's CPU runner calls this."""

    # Called by the hooks

    def close(self, names: Iterable[str]) -> None:
        self.texts.close(names)

    def show(self, logits: Tensor, lengths: Sequence[int], drafts: Sequence[int]) -> None:
        self._shown = Shown(logits, lengths, drafts, self._reported)

    def expect(self, names: Sequence[str], requests: Mapping[str, Any], most: int | None) -> None:
        self._names, self._requests = names, requests
        self._most = self.length if most is None else min(most, self.length)

    def has_drawn(self, name: str) -> bool:
        text = self.texts.open.get(name)
        return text is not None and text.laid is not None and text.laid.tree.q is not None

    def q_of(self, names: Sequence[str]) -> Tensor | None:
        if not any(map(self.has_drawn, names)):
            return None
        q = torch.zeros(len(names), self.length, self.texts.drafters.target.vocabulary)
        for row, name in enumerate(names):
            text = self.texts.open.get(name)
            if text is None or text.laid is None:
                continue
            tokens, known = text.laid.tokens, text.laid.tree.q
            if known is not None:
                q[row, : len(known)] = known
            else:
                q[row, torch.arange(len(tokens)), tokens] = 1
        return q

    # Called by vLLM

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """A chain for every row; an empty one if nothing was sampled for the row, or nothing is worth drafting."""
        shown, self._shown = self._shown, None
        names = self._names if self.hooked else range(len(sampled_token_ids))
        if not self.hooked:
            self.texts.keep(names)
        rows = None if shown is None else shown.rows()
        writing = [row for row, sampled in enumerate(sampled_token_ids) if sampled]
        rests = 0 < self._most_requests < len(writing)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row in writing:
            asked = self._asked(names[row])
            if asked is None:
                continue
            tokens = token_ids_cpu[row, : num_tokens_no_spec[row]].tolist()
            verified, scored = ([], None) if rows is None or rests else rows[row]
            text = self.texts.read(names[row], tokens, asked, verified, scored)
            if rests:
                text.laid = None
            else:
                drafts[row] = self.texts.draft(text, self._most)
        return drafts

    def _asked(self, name: str | int) -> Asked | None:
        """The parts of a request that drafting depends on; None if its prompt has no token ids."""
        request = self._requests.get(name) if isinstance(name, str) else None
        if request is None:
            return UNKNOWN
        if request.prompt_token_ids is None:
            return None
        params = request.sampling_params
        most = self.context
        if params.max_tokens is not None:
            most = min(most, len(request.prompt_token_ids) + params.max_tokens)
        tenant = (params.extra_args or {}).get(TENANT)
        return Asked(
            temperature=params.temperature,
            seeded=params.seed is not None,
            constrained=params.structured_outputs is not None,
            tenant=None if tenant is None else str(tenant),
            most=most,
        )
