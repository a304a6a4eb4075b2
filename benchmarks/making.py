"""What benchmarks of made draft models share: tasks, texts of a target, students of it, and a mixture made of it.

No mixture of experts comes with a target, so one is made: every MLP becomes several experts, copies with a little noise
beside a router, in the layout of Mixtral; then all of it learns from texts of the target, so that experts part ways.

A tiny world needs no model: three languages, each a chain of Markov over words of its own, and a small target that has
learned them.
"""

from __future__ import annotations

import copy
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from branchwise.llm import load
from branchwise.train import prompts
from branchwise.train.experts.usage import Text
from branchwise.train.texts import Writer

TASKS = "code", "math", "chat"
Tuned = Callable[[int, float], None]
"""told the step and its loss"""


@dataclass(eq=False)
class World:
    """A target, and prompts of several tasks, to learn from and to measure with."""

    model: Any
    tokenizer: Any
    learned: dict[str, list[list[int]]]
    measured: dict[str, list[list[int]]]
    length: int
    """tokens of an answer"""

    def answers(self, model: Any, asked: Sequence[Sequence[int]], seed: int, heat: float = 1.0) -> list[Text]:
        """What a dense model answers."""
        with Writer(model, [self.tokenizer.eos_token_id], slots=256) as writer:
            written = writer.write(asked, [heat] * len(asked), self.length, seed)
        return [Text([*prompt, *answer], len(prompt)) for prompt, answer in zip(asked, written, strict=True) if answer]


def real_world(model: str, device: str, dtype: str, texts: int, held_out: int, length: int) -> World:
    llm = load(model, draft="none", device=device, dtype=dtype, warmup=False)
    asked = prompts.asked(12 * texts, seed=1)
    sums = [one for one in asked if len(re.findall(r"\b\d+\b", one)) > 1]
    talk = [one for one in asked if not re.search(r"\d", one)]
    programs = prompts.programming((), 2 * texts, seed=1)
    found = {
        task: [llm.encode(one) for one in every[: texts + held_out]]
        for task, every in zip(TASKS, (programs, sums, talk), strict=True)
    }
    learned = {task: every[held_out:] for task, every in found.items()}
    return World(llm.model, llm.tokenizer, learned, {task: every[:held_out] for task, every in found.items()}, length)


def tiny_world(texts: int, held_out: int, length: int, steps: int = 150) -> World:
    words, each, rng = 4 + 3 * 20, 20, random.Random(0)
    chains = {
        word: rng.sample(range(4 + task * each, 4 + (task + 1) * each), 4)
        for task in range(3)
        for word in range(4 + task * each, 4 + (task + 1) * each)
    }

    def spoken(task: int, count: int) -> list[int]:
        found = [4 + task * each + rng.randrange(each)]
        while len(found) < count:
            found.append(rng.choices(chains[found[-1]], (0.6, 0.2, 0.15, 0.05))[0])
        return found

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    lessons = [Text(spoken(number % 3, 24), 1) for number in range(384)]
    tune(model, None, lessons, steps=steps, rate=3e-3)
    learned, measured = (
        {task: [spoken(number, 4) for _ in range(count)] for number, task in enumerate(TASKS)}
        for count in (texts, held_out)
    )
    return World(model.eval().requires_grad_(False), tiny_tokenizer(words), learned, measured, length)


def tiny_tokenizer(words: int) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{number}": number for number in range(words)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w2", bos_token="w1", unk_token="w0")


# Learning


def tune(
    model: Any,
    teacher: Any,
    texts: Sequence[Text],
    *,
    steps: int = 0,
    minutes: float = 0.0,
    rate: float,
    rows: int = 16,
    seed: int = 0,
    balance: float = 0.0,
    told: Tuned = lambda step, loss: None,
) -> int:
    """Let a model learn the answers of texts, by what its teacher finds probable there, or as they are; for so many
    steps or minutes, and returns the steps. `balance` weighs how evenly a mixture is to use its experts."""
    model.train().requires_grad_(True)
    learner = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    rng, start, step = random.Random(seed), time.perf_counter(), 0
    device, half = model.device, model.device.type == "cuda"
    while (share := _share(step, steps, start, minutes)) < 1:
        for group in learner.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * (1 - share)
        tokens, counted = _batch(rng.sample(texts, min(rows, len(texts))), device)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            extra = {"output_router_logits": True} if balance else {}
            found = model(tokens, use_cache=False, **extra)
        logits = found.logits[:, :-1][counted].float()
        if teacher is None:
            loss = functional.cross_entropy(logits, tokens[:, 1:][counted])
        else:
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=half):
                wanted = teacher(tokens, use_cache=False).logits[:, :-1][counted].float().softmax(dim=-1)
            loss = functional.kl_div(logits.log_softmax(dim=-1), wanted, reduction="batchmean")
        if balance:
            loss = loss + balance * _unevenness(model, found.router_logits)
        learner.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        learner.step()
        told(step, float(loss.detach()))
        step += 1
    model.eval().requires_grad_(False)
    return step


def _share(step: int, steps: int, start: float, minutes: float) -> float:
    return step / steps if steps else (time.perf_counter() - start) / (60 * minutes)


def _batch(texts: Sequence[Text], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens (texts, longest), and behind which of them there is a token of an answer."""
    longest = max(len(text.tokens) for text in texts)
    tokens = torch.tensor([text.tokens + [0] * (longest - len(text.tokens)) for text in texts])
    place = torch.arange(1, longest)
    ends = torch.tensor([[text.prompt, len(text.tokens)] for text in texts])
    counted = (place >= ends[:, :1]) & (place < ends[:, 1:])
    return tokens.to(device), counted.to(device)


def _unevenness(model: Any, routed: tuple[Tensor, ...]) -> Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = model.config
    found: Any = load_balancing_loss_func(routed, config.num_local_experts, config.num_experts_per_tok)
    return found  # type: ignore[no-any-return]


# Models


def first_layers(model: Any, layers: Sequence[int]) -> Any:
    """A student that begins as some layers of its target, in float32."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(layers)
    config.layer_types = None
    student = type(model)(config).to(model.device)
    state = {
        name: weight.float() for name, weight in model.state_dict().items() if not name.startswith("model.layers.")
    }
    for place, layer in enumerate(layers):
        prefix = f"model.layers.{layer}."
        own = {name: weight for name, weight in model.state_dict().items() if name.startswith(prefix)}
        state |= {name.replace(prefix, f"model.layers.{place}."): weight.float() for name, weight in own.items()}
    student.load_state_dict(state)
    return student.eval().requires_grad_(False)


def upcycled(model: Any, experts: int, active: int, noise: float = 0.1, seed: int = 0) -> Any:
    """A mixture in the layout of Mixtral whose experts are the MLPs of a Llama, with noise of so much of their own
    spread. What it computes is about what the model computes, because the weights of experts add up to 1."""
    config: Any = model.config
    known = config.to_dict()
    shared = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    )
    shared += " hidden_act max_position_embeddings rms_norm_eps rope_parameters tie_word_embeddings bos_token_id"
    shared += " eos_token_id pad_token_id"
    options = {name: known[name] for name in shared.split() if name in known}
    mixed = MixtralConfig(**options, num_local_experts=experts, num_experts_per_tok=active, sliding_window=None)
    made = MixtralForCausalLM(mixed).to(model.device)
    rng = torch.Generator(device="cpu").manual_seed(seed)
    state = {name: weight.float() for name, weight in model.state_dict().items() if ".mlp." not in name}
    for layer in range(config.num_hidden_layers):
        own, place = model.model.layers[layer].mlp, f"model.layers.{layer}.mlp"
        inputs = torch.cat([own.gate_proj.weight, own.up_proj.weight]).float()
        for name, weight in (("gate_up_proj", inputs), ("down_proj", own.down_proj.weight.float())):
            spread = noise * weight.std() * torch.randn(experts, *weight.shape, generator=rng).to(weight.device)
            state[f"{place}.experts.{name}"] = weight + spread
        state[f"{place}.gate.weight"] = 0.02 * torch.randn(experts, config.hidden_size, generator=rng).to(model.device)
    made.load_state_dict(state)
    made.generation_config = copy.deepcopy(model.generation_config)
    return made.eval().requires_grad_(False)
