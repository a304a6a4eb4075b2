"""A tiny Llama, engines of vLLM for it in this process, and the exact law of its texts."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

PROPOSER = "branchwise.integrations.vllm.Proposer"
VOCABULARY = 16
CONTEXT = 256
PROMPT = [1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2, 3]
"""it repeats itself, so every memory has something to draft"""


def write_model(folder: Path, layers: int = 2, vocabulary: int = VOCABULARY) -> Path:
    """Weights so large that some tokens are likely and none is certain. Kernels for the CPU want heads of 32."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.25)
    model.save_pretrained(folder)
    return folder


def arguments(
    model: Path, speculative: dict[str, Any] | None = None, options: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Of an engine in this process; `options` are Branchwise's."""
    settings: dict[str, Any] = {
        "model": str(model), "dtype": "float32", "enforce_eager": True, "max_model_len": CONTEXT, "max_num_seqs": 16,
        "block_size": 32, "skip_tokenizer_init": True, "distributed_executor_backend": "uni",
        "disable_log_stats": False, "num_gpu_blocks_override": 512, "max_num_batched_tokens": 256,
    } | more  # fmt: skip
    if speculative is not None:
        settings["speculative_config"] = {"num_speculative_tokens": 4} | speculative
    if options is not None:
        settings["additional_config"] = {"branchwise": options}
    return settings


def engine(*given: Any, **more: Any) -> Any:
    from vllm import LLM

    return LLM(**arguments(*given, **more))


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def use(llm: Any, **options: Any) -> Any:
    """Let an engine go on with a proposer of other options: as a new engine would, in no time."""
    from branchwise.integrations.vllm import Proposer

    runner = runner_of(llm)
    config = copy.copy(runner.vllm_config)
    config.additional_config = {"branchwise": options}
    runner.drafter = Proposer(config)
    return runner.drafter


def texts(llm: Any, prompts: Sequence[Sequence[int]], sampling: Any) -> list[list[int]]:
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [list(output.outputs[0].token_ids) for output in llm.generate(asked, sampling, use_tqdm=False)]


def params(**given: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**({"temperature": 0.0, "max_tokens": 24, "detokenize": False, "ignore_eos": True} | given))


class Law:
    """The distribution of the first tokens of an answer, from transformers."""

    def __init__(self, folder: Path, prompt: Sequence[int], length: int, warp: Any) -> None:
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.probs: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(length):
            prefixes = list(self.probs)
            with torch.no_grad():
                ids = torch.tensor([[*prompt, *prefix] for prefix in prefixes])
                rows = warp(self.model(ids).logits[:, -1].float()).double()
            self.probs = {
                (*prefix, token): self.probs[prefix] * float(row[token])
                for prefix, row in zip(prefixes, rows, strict=True)
                for token in range(rows.shape[1])
            }

    def p_value(self, found: Sequence[Sequence[int]], least: float = 5.0) -> float:
        """Of a chi-square test, with rare texts counted together."""
        counts = Counter(map(tuple, found))
        assert all(self.probs.get(text, 0.0) > 0 for text in counts), "a text that the target never writes"
        cells, rest, seen = [], 0.0, 0
        for text, share in self.probs.items():
            expected = share * len(found)
            if expected >= least:
                cells.append((counts[text], expected))
            else:
                rest, seen = rest + expected, seen + counts[text]
        if rest >= least:
            cells.append((seen, rest))
        statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
        return float(chi2.sf(statistic, len(cells) - 1))


def warped(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Any:
    def warp(logits: Tensor) -> Tensor:
        logits = logits / temperature
        if top_k:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
        if top_p < 1:
            values, order = logits.sort(descending=True)
            before = values.softmax(dim=-1).cumsum(dim=-1) - values.softmax(dim=-1)
            cut = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, before >= top_p)
            logits = logits.masked_fill(cut, -torch.inf)
        return logits.softmax(dim=-1)

    return warp


@cache
def law(folder: Path, length: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Law:
    return Law(folder, PROMPT, length, warped(temperature, top_k, top_p))


def pairs(*lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    return list(itertools.product(*lists))
