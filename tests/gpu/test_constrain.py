"""Grammars on a device: texts are those of plain constrained decoding there, whoever drafts."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.sampling import SamplingParams
from branchwise.draft import build_drafter
from branchwise.draft.base import Drafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.engine import Engine, FinishReason, Generation, Request
from branchwise.verify import VERIFIERS
from tests.conformance.architectures import COMMON, build
from tests.grammars import byte_compiler, byte_level
from tests.heads import random_head

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCABULARY = len(byte_level()) + 8
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "tags": {"enum": ["poet", "engineer"]}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def write(drafter: str, temperature: float) -> list[Generation]:
    """Two texts of the schema, and a free one that asks for the most probable tokens."""
    config = LlamaConfig(**COMMON | {"vocab_size": VOCABULARY, "head_dim": 16})
    target = TransformersTarget(build(config, device="cuda"), slots=3)
    made: Drafter = HeadDrafter(random_head(target.info)) if drafter == "head" else build_drafter(drafter)
    engine = Engine(target, made, VERIFIERS.build("match"))
    grammar, sampling = byte_compiler(VOCABULARY).compile(json_schema=SCHEMA), SamplingParams(temperature, seed=3)
    ends = frozenset({0, 1})
    requests = [
        Request((5, 6, 7), grammar.applied_to(sampling, 3), 64, ends),
        Request((9,), grammar.applied_to(sampling, 1), 64, ends),
        Request((4, 4, 4), sampling, 24, top_logprobs=4),
    ]
    generations = [engine.submit(request) for request in requests]
    while engine.busy:
        engine.step()
    return generations


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", ["head", "recycle", "memories", "suffix", "ngram"])
def test_texts_are_those_of_plain_constrained_decoding(drafter: str, temperature: float) -> None:
    plain, drafted = write("none", temperature), write(drafter, temperature)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    for generation in drafted[:2]:
        assert generation.finish_reason is FinishReason.STOP
        assert set(json.loads(byte_level().decode(generation.token_ids[:-1]))) == {"name", "tags"}
    for one, other in zip(plain[2].pieces, drafted[2].pieces, strict=True):
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert len(one.top) == 4
