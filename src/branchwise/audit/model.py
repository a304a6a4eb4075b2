"""The audit of a loaded model: blocks that its engine samples against their probabilities under the model.

Blocks are sampled through the production engine, each with its own seed. Their exact probabilities come from the
model's own forward pass over plain text, which shares no code with the scoring of trees.

Greedy texts with and without speculation are compared token by token. In float32 they must be equal up to numerical
ties. In bfloat16 a pass over a tree rounds differently from a pass over one token, so differences in bfloat16 are
near-ties: they are reported and decide nothing.
"""

from __future__ import annotations

import copy
import random
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch

from branchwise.audit.blocks import Block, BlockTest, BlockTests, Floats, Partition
from branchwise.audit.findings import INTERRUPTED, Activity, Finding, check_demands, judge, shorten
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.sampling import Context, SamplingParams, adjust, warp
from branchwise.core.sequence import SequenceState
from branchwise.draft import build_drafter
from branchwise.draft.base import Drafter
from branchwise.engine import Engine, Generation, Request
from branchwise.engine.stats import Stats
from branchwise.errors import ModelError, UsageError, first_line
from branchwise.llm import LLM
from branchwise.progress import Progress, silent
from branchwise.verify import VERIFIERS

AHEAD = 64
"""texts may be this many tokens longer than a block, so that trees grow as deep as in real use; the rest is cut off"""
TIE = 1e-3
"""logits closer than this are equal within the precision of float32"""
ROUGH_TIE = 0.05
"""the same for lower precision"""
MOST_ROUNDED = 8
"""the most texts in one batch on the copy in bfloat16"""


@dataclass(frozen=True)
class Plan:
    """How much an audit samples, and its error rates."""

    samples: int = 1000
    """the number of blocks for each prompt"""
    length: int = 3
    """the number of tokens of a block"""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    greedy_tokens: int = 48
    """the number of tokens of each greedy text; 0 compares no greedy texts"""
    near_ties: bool = True
    """whether to compare greedy texts in bfloat16 too, on a copy of the model"""
    false_alarm: float = 1e-3
    """how often a correct decoder may be found NOT LOSSLESS, all tests together"""
    limit: float = 0.1
    """the distance that must be detectable for the finding LOSSLESS"""
    seed: int | None = None
    raw: bool = False
    """whether to take prompts as they are, without the chat template"""

    def __post_init__(self) -> None:
        if self.sampling.greedy:
            raise UsageError("Sampled blocks need a temperature above 0; greedy texts are compared in any case.")
        if self.greedy_tokens < 0:
            raise UsageError(f"greedy_tokens must be at least 0, not {self.greedy_tokens}.")
        check_demands(self.false_alarm, self.limit, samples=self.samples, length=self.length)


@dataclass(frozen=True)
class Difference:
    """Where a greedy text first leaves the text of plain decoding."""

    prompt: str
    position: int
    """the number of tokens of the answer before the difference"""
    plain: str
    speculative: str
    gap: float
    """the distance between the logits of the two tokens in the model's own forward pass"""

    def __str__(self) -> str:
        return (
            f"{shorten(self.prompt)}: greedy float32 text leaves plain decoding after {self.position} tokens, "
            f"{self.speculative!r} in place of {self.plain!r} with logits {self.gap:.3g} apart."
        )


@dataclass(frozen=True)
class Greedy:
    """Greedy texts with and without speculation."""

    dtype: str
    prompts: int
    tokens: int
    """the number of tokens of plain decoding"""
    differences: list[Difference]

    @property
    def decisive(self) -> list[Difference]:
        """Differences that rounding does not explain; only float32 promises equality."""
        return [d for d in self.differences if self.dtype == "float32" and not d.gap < TIE]

    def __str__(self) -> str:
        apart = len(self.differences)
        if self.dtype == "float32":
            ties = apart - len(self.decisive)
            tied = f"; {ties} left it at a numerical tie" if ties else ""
            equal = f"{self.prompts - apart} of {self.prompts} texts ({self.tokens:,} tokens)"
            return f"Greedy in float32: {equal} equal plain decoding{tied}."
        widest = max((difference.gap for difference in self.differences), default=0.0)
        near = f", at near-ties with logits at most {widest:.2g} apart" if apart else ""
        return (
            f"Greedy in {self.dtype}: {apart} of {self.prompts} texts leave plain decoding{near}; this decides nothing."
        )


@dataclass(frozen=True)
class ModelAudit:
    """What the audit of one drafter and one verifier found."""

    model: str
    dtype: str
    draft: str
    tree: str | None
    verify: str
    plan: Plan
    seed: int
    tests: BlockTests
    activity: Activity
    mean_acceptance_length: float
    greedy: Greedy | None
    near_ties: Greedy | None
    finding: Finding
    interrupted: bool = False

    def as_dict(self) -> dict[str, Any]:
        sampling = self.plan.sampling
        return {
            "model": self.model,
            "dtype": self.dtype,
            "draft": self.draft,
            "tree": self.tree,
            "verify": self.verify,
            **self.finding.as_dict(),
            "samples_per_context": self.plan.samples,
            "length": self.plan.length,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "seed": self.seed,
            "limit": self.plan.limit,
            "blocks": self.tests.as_dict(),
            "mean_acceptance_length": self.mean_acceptance_length,
            "drafted_levels": self.activity.drafted,
            "accepted_levels": self.activity.accepted,
            "greedy": None if self.greedy is None else asdict(self.greedy),
            "near_ties": None if self.near_ties is None else asdict(self.near_ties),
        }


class ModelAuditor:
    """Audits drafters and verifiers on one loaded model; what does not depend on them is computed once."""

    def __init__(self, llm: LLM, prompts: Sequence[str], plan: Plan | None = None, progress: Progress = silent) -> None:
        if not prompts:
            raise UsageError("There are no prompts to audit with.")
        if llm.engine.target.free_slots < 2:
            raise UsageError("An audit needs two free slots, one of them for the prompt; load with max_batch=2.")
        self.llm = llm
        self.prompts = list(prompts)
        self.plan = plan or Plan()
        self.seed = secrets.randbits(32) if self.plan.seed is None else self.plan.seed
        self._progress = progress
        self._tokens = [llm.encode(prompt, raw=self.plan.raw) for prompt in self.prompts]
        longest, room = max(map(len, self._tokens)), llm.engine.target.context - self.plan.length
        if longest > room:
            raise UsageError(f"A prompt has {longest} tokens and the context leaves room for {room}; shorten it.")
        self._partitions: dict[int, Partition] = {}
        self._plain: dict[str, list[list[int]]] = {}
        self._rounded: LLM | None = None

    def audit(self, draft: str | Drafter, tree: str | None = None, verify: str = "match") -> ModelAudit:
        """Test whether this drafter with this verifier keeps the distribution. Ctrl-C ends it with what was sampled."""
        llm = self.llm.with_drafter(draft, tree, verify)
        gathered: list[BlockTest] = []
        stats: list[Stats] = []
        greedy = near_ties = None
        doubts: list[str] = []
        notes: list[str] = []
        try:
            for number, prompt in enumerate(self.prompts):
                self._sample(llm, number, f"{verify}: {shorten(prompt)}", gathered, stats)
            if self.plan.greedy_tokens:
                greedy = self._compare(self.llm, draft, tree, verify)
                if self.plan.near_ties and greedy.dtype == "float32":
                    near_ties = self._compare_rounded(draft, tree, verify, notes)
        except KeyboardInterrupt:
            doubts.append(INTERRUPTED)
        if greedy is not None and greedy.dtype != "float32":
            greedy, near_ties = None, greedy
        tests = BlockTests(tuple(gathered), self.plan.false_alarm)
        activity = Activity(
            drafted=sum(sum(text.drafted_per_depth) for text in stats),
            accepted=sum(sum(text.accepted_per_depth) for text in stats),
        )
        whole = Stats(steps=sum(text.steps for text in stats), accepted_tokens=sum(t.accepted_tokens for t in stats))
        return ModelAudit(
            model=self.llm.name,
            dtype=dtype_of(self.llm),
            draft=draft if isinstance(draft, str) else draft.name,
            tree=tree,
            verify=verify,
            plan=self.plan,
            seed=self.seed,
            tests=tests,
            activity=activity,
            mean_acceptance_length=whole.mean_acceptance_length,
            greedy=greedy,
            near_ties=near_ties,
            finding=judge(
                tests,
                activity=activity,
                limit=self.plan.limit,
                proofs=[str(difference) for difference in greedy.decisive] if greedy else [],
                doubts=doubts,
                notes=[*(str(texts) for texts in (greedy, near_ties) if texts), *notes],
            ),
            interrupted=bool(doubts),
        )

    def _sample(self, llm: LLM, number: int, what: str, gathered: list[BlockTest], stats: list[Stats]) -> None:
        """Sample the blocks of one prompt and test them; after Ctrl-C only those that were ready."""
        partition = self._partition(number)
        generations: list[Generation] = []
        try:
            self._run(llm, number, what, generations)
        finally:
            # In the order of their seeds, up to the first that is not ready: texts that are ready early have other
            # tokens.
            ready = list(takewhile(self._ready, generations))
            stats += [generation.stats for generation in ready]
            blocks: list[Block] = [tuple(generation.token_ids[: self.plan.length]) for generation in ready]
            gathered.append(partition.test(blocks, shorten(self.prompts[number])))

    def _run(self, llm: LLM, number: int, what: str, generations: list[Generation]) -> None:
        """Generate the texts of one prompt in a batch; the prompt is prefilled once, and its cache rows are copied."""
        engine, plan = llm.engine, self.plan
        seeds = random.Random(f"{self.seed} {number}")
        source = SequenceState(list(self._tokens[number]))
        engine.target.open(source)
        running: list[Generation] = []
        try:
            room = engine.target.free_slots
            while len(generations) < plan.samples or running:
                while len(running) < room and len(generations) < plan.samples:
                    request = Request(
                        prompt=tuple(source.tokens),
                        sampling=replace(plan.sampling, seed=seeds.getrandbits(63)),
                        max_new_tokens=plan.length + AHEAD,
                        stop_tokens=llm.stop_tokens,
                    )
                    running.append(engine.submit(request, like=source))
                    generations.append(running[-1])
                engine.step()
                for generation in running:
                    generation.check()
                for generation in [generation for generation in running if self._ready(generation)]:
                    engine.cancel(generation)
                    running.remove(generation)
                self._progress(what, len(generations) - len(running), plan.samples)
        finally:
            for generation in running:
                engine.cancel(generation)
            engine.target.close(source)

    def _ready(self, generation: Generation) -> bool:
        """Whether the block of a text is complete: long enough, or ended by a stop token."""
        length = len(generation.token_ids)
        return length >= self.plan.length or bool(length and generation.token_ids[-1] in generation.request.stop_tokens)

    def _partition(self, number: int) -> Partition:
        if number not in self._partitions:
            probs = OwnProbs(self.llm, self._tokens[number], self.plan.sampling)
            what = f"exact distribution: {shorten(self.prompts[number])}"
            self._progress(what, 0, 1)
            self._partitions[number] = Partition(probs, length=self.plan.length, samples=self.plan.samples)
            self._progress(what, 1, 1)
        return self._partitions[number]

    def _compare(self, llm: LLM, draft: str | Drafter, tree: str | None, verify: str) -> Greedy:
        """Greedy texts of plain decoding and of speculation, all prompts in one batch each."""
        dtype = dtype_of(llm)
        if dtype not in self._plain:
            self._plain[dtype] = self._write(llm.with_drafter("none"), f"plain greedy, {dtype}")
        plain = self._plain[dtype]
        speculative = self._write(llm.with_drafter(draft, tree, verify), f"{verify}: greedy, {dtype}")
        differences = [
            first_difference(llm, prompt, tokens, *pair)
            for prompt, tokens, *pair in zip(self.prompts, self._tokens, plain, speculative, strict=True)
            if pair[0] != pair[1]
        ]
        return Greedy(dtype, len(plain), sum(map(len, plain)), differences)

    def _compare_rounded(self, draft: str | Drafter, tree: str | None, verify: str, notes: list[str]) -> Greedy | None:
        """The same in bfloat16. It decides nothing, so a copy that does not fit into memory is only noted."""
        try:
            self._rounded = self._rounded or in_bfloat16(self.llm, slots=min(len(self.prompts), MOST_ROUNDED))
            return self._compare(self._rounded, draft, tree, verify)
        except (ModelError, torch.OutOfMemoryError) as error:
            notes.append(f"bfloat16 was not compared: {first_line(error)}")
            return None

    def _write(self, llm: LLM, what: str) -> list[list[int]]:
        self._progress(what, 0, len(self.prompts))
        completions = llm.generate(self.prompts, max_new_tokens=self.plan.greedy_tokens, raw=self.plan.raw)
        self._progress(what, len(self.prompts), len(self.prompts))
        return [completion.token_ids for completion in completions]


def first_difference(llm: LLM, prompt: str, tokens: list[int], plain: list[int], speculative: list[int]) -> Difference:
    """Where two continuations of a prompt part; `tokens` are those of the prompt."""
    position = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(plain, speculative, strict=False))))
    gap = float("inf")  # if one text ends and the other goes on after the same tokens
    if position < min(len(plain), len(speculative)):
        logits = own_logits(llm, tokens + plain[:position])
        gap = abs(float(logits[plain[position]] - logits[speculative[position]]))
    own, other = (llm.decode(text[position : position + 1]) for text in (plain, speculative))
    return Difference(prompt, position, own, other, gap)


def own_logits(llm: LLM, tokens: list[int]) -> torch.Tensor:
    """(vocabulary,) float32: the logits after these tokens."""
    target = llm.engine.target
    assert isinstance(target, TransformersTarget), "an LLM runs on a model of transformers"
    return target.own_logits(torch.tensor([tokens], device=target.device))[0, -1].float()


def in_bfloat16(llm: LLM, slots: int) -> LLM:
    """A copy of the model as if loaded in bfloat16: weights are rounded, position tables are not."""
    model = copy.deepcopy(llm.model)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)
    target = llm.engine.target
    rounded = TransformersTarget(
        model, slots=slots, context=target.context, max_nodes=target.max_nodes, tokenizer=llm.tokenizer
    )
    return LLM(llm.name, model, llm.tokenizer, Engine(rounded, build_drafter("none"), VERIFIERS.build("match")))


def dtype_of(llm: LLM) -> str:
    return str(llm.model.dtype).removeprefix("torch.")


class OwnProbs:
    """The distribution after a prompt and the first tokens of an answer, by the model's own forward pass."""

    def __init__(self, llm: LLM, prompt: list[int], sampling: SamplingParams) -> None:
        self.llm = llm
        self.prompt = prompt
        self.sampling = sampling
        self.tie = TIE if dtype_of(llm) == "float32" else ROUGH_TIE

    def __call__(self, prefix: Block) -> Floats | None:
        """(vocabulary,), or None after the end of a text, or if rounding decides which tokens a cut keeps."""
        if prefix and prefix[-1] in self.llm.stop_tokens:
            return None
        tokens = [*self.prompt, *map(int, prefix)]
        logits = own_logits(self.llm, tokens)[None]
        context = [Context(tokens, len(self.prompt))]
        probs = warp(logits, [self.sampling], context)[0]
        if self._rounding_decides(logits, context, probs > 0):
            return None
        found: Floats = probs.double().cpu().numpy()
        return found

    def _rounding_decides(self, logits: torch.Tensor, context: list[Context], kept: torch.Tensor) -> bool:
        """Whether rounding decides which tokens a cut keeps; the engine may then round the other way."""
        if kept.all():
            return False
        row = adjust(logits, [self.sampling], context)[0]
        if row[kept].min() - row[~kept].max() < self.tie:
            return True
        p, least = self.sampling.top_p, self.sampling.min_p
        for factor in (1 - self.tie / 100, 1 + self.tie / 100):
            nearby = replace(self.sampling, top_p=min(1.0, p * factor) if p < 1 else p, min_p=min(1.0, least * factor))
            if not torch.equal(warp(logits, [nearby], context)[0] > 0, kept):
                return True
        return False
