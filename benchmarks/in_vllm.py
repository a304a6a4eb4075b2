"""vLLM with its own ways of speculation and with ours: tokens per pass, tokens per second, and what drafting costs.

Every method is an engine of its own in one process, and writes the same prompts at the same temperature. Prompts are
read in the first passes and are not timed. Seconds of the processor are those of all threads of the process: on
a machine that others use too they say more than the clock.

    python benchmarks/in_vllm.py --model FOLDER --prompts spec_bench.jsonl --out vllm.jsonl

It runs in the environment that `make test-vllm` builds.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure import kept, provenance

from branchwise.bench.prompts import load_items

OURS = "branchwise.integrations.vllm.Proposer"
METHODS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "vllm ngram": ({"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}, {}),
    "vllm suffix": ({"method": "suffix"}, {}),
    "ours": ({"model": OURS}, {"share": "all"}),
    "ours, per request": ({"model": OURS}, {"share": "request"}),
    "ours, block": ({"model": OURS}, {"share": "all", "chain": "drawn"}),
    "ours, drawn, vllm's rule": ({"model": OURS}, {"share": "all", "chain": "drawn", "verify": "vllm"}),
    "head": ({"method": "eagle3"}, {}),
}
"""`head` is one that `branchwise train export` wrote, in the folder of --head"""


class Timed:
    """What the methods of a drafter take."""

    def __init__(self, drafter: Any, *names: str) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(drafter, name, self._around(getattr(drafter, name)))

    def _around(self, method: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def written(llm: Any, prompts: list[list[int]], sampling: Any, name: str) -> tuple[dict[str, Any], list[list[int]]]:
    """Write the prompts together; passes and seconds are those after the first token of the last."""
    engine, tokens = llm.llm_engine, dict[str, list[int]]()
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{name}-{number}", {"prompt_token_ids": prompt}, sampling)
    found = dict.fromkeys(("tokens", "passes", "seconds", "cpu_seconds"), 0.0)
    while engine.has_unfinished_requests():
        before, clock, cpu = sum(map(len, tokens.values())), time.perf_counter(), time.process_time()
        reading = len(tokens) < len(prompts) or not all(tokens.values())
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        if not reading:
            found["seconds"] += time.perf_counter() - clock
            found["cpu_seconds"] += time.process_time() - cpu
            found["passes"] += 1
            found["tokens"] += sum(map(len, tokens.values())) - before
    return found, list(tokens.values())


def counters(llm: Any) -> dict[str, int]:
    names = {"draft": "num_draft_tokens", "accepted": "num_accepted_tokens", "steps": "num_drafts"}
    values = {metric.name: metric for metric in llm.get_metrics()}
    found = {key: values.get(f"vllm:spec_decode_{name}") for key, name in names.items()}
    return {key: 0 if metric is None else int(metric.value) for key, metric in found.items()}


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from transformers import AutoTokenizer

    from vllm import LLM, SamplingParams, __version__

    named = {key: value.name if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    about = provenance(torch.device("cpu"), argparse.Namespace(**named))
    yield {"record": "provenance", **about, "vllm": __version__}
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    prompts = []
    for item in load_items([arguments.prompts]):
        chat = [{"role": "user", "content": item.turns[0]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        if len(ids) <= arguments.longest and len(prompts) < arguments.limit * arguments.every:
            prompts.append(list(ids))
    prompts = prompts[:: arguments.every]
    sampling = SamplingParams(
        temperature=arguments.temperature, max_tokens=arguments.max_new_tokens, detokenize=False, ignore_eos=True
    )
    truth: list[list[int]] | None = None
    for name in arguments.methods.split(";"):
        speculative, ours = METHODS[name]
        if speculative is not None:
            speculative = {**speculative, "num_speculative_tokens": arguments.length}
            if name == "head":
                speculative["model"] = str(arguments.head)
        llm = LLM(
            str(arguments.model), dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=arguments.batch,
            distributed_executor_backend="uni", disable_log_stats=False, enable_prefix_caching=False,
            speculative_config=speculative, additional_config={"branchwise": ours | arguments.options} if ours else {},
        )  # fmt: skip
        drafting = (
            Timed(runner_of(llm).drafter, "propose", *(["show", "q_of"] if ours else [])) if speculative else None
        )
        written(llm, [prompts[0][:16]], SamplingParams(temperature=0, max_tokens=4), "warm")
        warm, totals, texts = counters(llm), dict.fromkeys(("tokens", "passes", "seconds", "cpu_seconds"), 0.0), []
        if drafting is not None:
            drafting.seconds = 0.0
        for start in range(0, len(prompts), arguments.batch):
            found, answers = written(llm, prompts[start : start + arguments.batch], sampling, str(start))
            totals = {key: totals[key] + found[key] for key in totals}
            texts += answers
        counts = {key: value - warm[key] for key, value in counters(llm).items()}
        truth = texts if name == "plain" and arguments.temperature == 0 else truth
        yield {
            "record": "method", "method": name, "batch": arguments.batch, "temperature": arguments.temperature,
            "prompts": len(prompts), **totals, **counts,
            "tokens_per_pass": totals["tokens"] / totals["passes"] / min(arguments.batch, len(prompts)),
            "tokens_per_second": totals["tokens"] / totals["seconds"],
            "tokens_per_cpu_second": totals["tokens"] / totals["cpu_seconds"],
            "drafting_seconds": 0.0 if drafting is None else drafting.seconds,
            "equal": None if truth is None else sum(a == b for a, b in zip(texts, truth, strict=True)),
        }  # fmt: skip
        del llm, drafting
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--head", type=Path, help="folder of an exported head, for the method head")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--every", type=int, default=8, help="take every so many-th of the prompts that are short")
    parser.add_argument("--longest", type=int, default=300, help="tokens of a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--length", type=int, default=8, help="tokens of a chain")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--methods", default="plain;vllm ngram;ours;ours, block")
    parser.add_argument("--floor", type=float, help="in place of the usual one")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.options = {} if arguments.floor is None else {"floor": arguments.floor}
    for record in kept(measured(arguments), arguments.out):
        if record["record"] == "method":
            shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in record.items()}
            print(shown, flush=True)


if __name__ == "__main__":
    main()
