"""A draft model: its distributions are those of the model on the whole text, at every node and after every
rejection."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from branchwise.backends.transformers.runner import bytes_read
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import Draw
from branchwise.draft import build_drafter
from branchwise.draft.base import Budget, Drafter
from branchwise.draft.builder import NodeProbs, TreeBuilder, TreeCoroutine, TreePolicy, drawable
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import FOR_GREEDY, ModelDrafter
from branchwise.draft.model.reading import sound
from branchwise.draft.model.vocabulary import common, frequent_tokens, save_counts, spellings, table_of
from branchwise.draft.policies.paths import Paths
from branchwise.draft.policies.rsd import Branching
from branchwise.draft.sampler import DraftSampler
from branchwise.draft.tree_drafter import ExpandRequest
from branchwise.engine import Engine, Request
from branchwise.errors import BranchwiseError, ModelError
from branchwise.verify import VERIFIERS

VOCABULARY = 24
PROMPTS = [(1, 2, 3, 4, 5), (6,), tuple(range(1, 24)), (7, 8)]


def tiny(seed: int, layers: int = 2, vocabulary: int = VOCABULARY, **options: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.6,
        **options,
    )
    return LlamaForCausalLM(config).eval()


def target(slots: int = 3, seed: int = 0) -> TransformersTarget:
    return TransformersTarget(tiny(seed), slots=slots)


def weights(seed: int = 1) -> Weights:
    return Weights("tiny draft", tiny(seed, layers=1), None)


class Wild(TreePolicy):
    """Expands drawn nodes in any order, some late, some never: what no policy of ours does, and any may."""

    draw = Draw.WITHOUT_REPLACEMENT

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree, order, waiting = TreeBuilder([root]), random.Random(root), [0]
        while waiting and len(tree) + 3 <= budget.nodes and len(tree) < 14:
            chosen = sorted(order.sample(waiting, order.randint(1, len(waiting))), reverse=len(tree) % 2 == 0)
            waiting = [node for node in waiting if node not in chosen]
            found = yield tree, chosen
            for node, probs in zip(chosen, drawable(found.probs), strict=True):
                tree.probs[node] = probs
                if tree.depths[node] < budget.depth:
                    waiting += [tree.add(node, token) for token in sampler.order(probs, 2, node)]
        return tree.finish(self.draw)


class Checked(ModelDrafter):
    """Compares every distribution with the draft model's own forward pass over the whole text."""

    seen = 0

    def look(self, requests: Sequence[ExpandRequest]) -> list[NodeProbs]:
        found = super().look(requests)
        for request, said in zip(requests, found, strict=True):
            for node, probs in zip(request.nodes, said.probs, strict=True):
                text = [*request.sequence.tokens, *request.tree.path(node)]
                # Rounding alone moves a probability by up to 2e-4 of it; another token far back, mostly by 5e-2.
                assert torch.allclose(probs, self.slow_probs(text, request), rtol=1e-3, atol=1e-5)
                self.seen += 1
        return found

    def slow_probs(self, text: list[int], request: ExpandRequest) -> Tensor:
        with torch.inference_mode():
            logits = self.weights.model(torch.tensor([text])).logits[0, -1]
        return torch.softmax(logits / (request.sequence.sampling.temperature or FOR_GREEDY), dim=-1)


def run(drafter: Drafter, verify: str, sampling: SamplingParams, length: int = 24) -> list[list[int]]:
    engine = Engine(target(), drafter, VERIFIERS.build(verify))
    generations = [engine.submit(Request(prompt, sampling, max_new_tokens=length)) for prompt in PROMPTS]
    while engine.busy:
        engine.step()
    return [generation.token_ids for generation in generations]


@pytest.mark.parametrize(
    ("tree", "verify"),
    [
        (Paths("3x4"), "cascade"),
        (Paths("1x5"), "block"),
        (Branching(2, 2, 1), "rrs"),
        (Wild(), "traversal"),
        (Wild(), "match"),
    ],
    ids=["paths", "chain", "rsd-c", "wild", "wild by match"],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_law_is_the_draft_models_own_after_the_whole_text(
    tree: TreePolicy, verify: str, temperature: float
) -> None:
    # Catches rows kept of rejected nodes, rows in the wrong place, wrong positions, a mask that shows a sibling,
    # and slots mixed up when texts end and others join.
    drafter = Checked(weights(), tree=tree)
    run(drafter, verify, SamplingParams(temperature=temperature, seed=5))
    assert drafter.seen > 80


def test_a_draft_model_that_sees_a_window_counts_the_rows_of_a_tree_in_it() -> None:
    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MistralConfig(vocab_size=VOCABULARY, num_hidden_layers=2, sliding_window=2, initializer_range=0.6, **sizes)
    drafter = Checked(Weights("windowed", MistralForCausalLM(config).eval(), None), tree=Branching(2, 2, 1, 1))
    run(drafter, "rrs", SamplingParams(temperature=0.8, seed=5), 12)
    assert drafter.seen > 60


def test_rows_of_a_tree_follow_their_text_when_another_ends() -> None:
    # Every draft is accepted, so that rows of the tree before are read again after slots have moved.
    drafter = Checked(Weights("same", tiny(0), None), tree=Paths("1x4"))
    engine = Engine(target(), drafter, VERIFIERS.build("match"))
    for length, prompt in zip((3, 40, 17), PROMPTS, strict=False):
        engine.submit(Request(prompt, SamplingParams(), max_new_tokens=length))
    while engine.busy:
        engine.step()
    assert drafter.seen > 30


def test_a_text_that_changed_is_read_again_from_where_it_changed() -> None:
    drafter = Checked(weights(), tree=Paths("1x3"))
    drafter.bind(target().info)
    sequence = SequenceState([1, 2, 3, 4, 5, 6])
    for text in ([1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 5, 6, 7], [1, 2, 9, 4], [8]):
        sequence.tokens[:] = text
        drafter.draft([sequence], [Budget(8, 3)])
    assert drafter.seen == 12


@pytest.mark.parametrize("tree", [Paths("2x3"), Branching(3, 1), Wild()], ids=["paths", "rsd-c", "wild"])
@pytest.mark.parametrize("skill", ["another model", "the target itself"])
def test_the_text_is_that_of_plain_decoding(tree: TreePolicy, skill: str) -> None:
    drafter = ModelDrafter(weights() if skill == "another model" else Weights("same", tiny(0), None), tree=tree)
    for temperature in (0.0, 0.9):
        sampling = SamplingParams(temperature=temperature, seed=3)
        assert run(drafter, "match", sampling) == run(build_drafter("none"), "match", sampling)


def test_a_level_is_one_pass_for_all_texts() -> None:
    drafter = ModelDrafter(weights(), tree=Branching(2, 2, 1))
    engine = Engine(target(), drafter, VERIFIERS.build("rrs"))
    for prompt in PROMPTS[:3]:
        engine.submit(Request(prompt, SamplingParams(temperature=1.0, seed=1), max_new_tokens=30))
    engine.step()
    assert drafter.passes == 3
    engine.step()
    assert drafter.passes == 6


def test_what_it_knows_of_a_text_goes_with_the_text() -> None:
    drafter = ModelDrafter(weights(), tree=Paths("1x3"))
    run(drafter, "block", SamplingParams(temperature=1.0, seed=1))
    [(_, slots)] = drafter.weights._idle
    assert slots.free_slots == 3
    assert not drafter._following._texts


def test_drafters_that_take_turns_share_slots_and_others_do_not() -> None:
    """What a device records in slots would be recorded again for every drafter of a contest."""
    shared, here = weights(), target()
    first, second = (Engine(here, ModelDrafter(shared, tree=Paths("1x3")), VERIFIERS.build("block")) for _ in range(2))
    [(_, slots)] = shared._idle
    text = first.submit(Request(PROMPTS[0], max_new_tokens=9))
    first.step()
    assert first.drafter._following.slots is slots  # type: ignore[attr-defined]
    assert not shared._idle
    other = second.submit(Request(PROMPTS[1], max_new_tokens=9))
    second.step()
    assert second.drafter._following.slots is not slots  # type: ignore[attr-defined]
    while not (text.finished and other.finished):
        first.step()
        second.step()
    assert len(shared._idle) == 2
    second.submit(Request(PROMPTS[2], max_new_tokens=9))
    second.step()
    assert second.drafter._following.slots is slots  # type: ignore[attr-defined]


def test_rooms_of_other_sizes_do_not_pile_up() -> None:
    shared = weights()
    for context in range(30, 45):
        shared.release(shared.acquire(1, context))
    assert [slots.context for _, slots in shared._idle] == [41, 42, 43, 44]
    half = shared.acquire(1, 44)
    half.store.open(SequenceState([1]))
    shared.release(half)
    assert len(shared._idle) == 3, "what is not empty is not lent again"


def test_an_interrupted_pass_leaves_no_false_rows() -> None:
    drafter = Checked(weights(), tree=Branching(2, 2, 2))
    engine = Engine(target(), drafter, VERIFIERS.build("rrs"))
    generation = engine.submit(Request(PROMPTS[0], SamplingParams(temperature=1.0, seed=2), max_new_tokens=40))
    [(_, slots)], step = drafter.weights._idle, 0
    whole = slots.sprout

    def broken(*arguments: object) -> Tensor:
        nonlocal step
        step += 1
        if step % 3 == 0:
            raise KeyboardInterrupt
        return whole(*arguments)  # type: ignore[arg-type]

    slots.sprout = broken  # type: ignore[method-assign]
    while not generation.finished:
        try:
            engine.step()
        except KeyboardInterrupt:
            slots.sprout = whole if step > 60 else broken  # type: ignore[method-assign]
    assert drafter.seen > 60


def test_a_text_beyond_the_draft_models_context_is_not_drafted_for() -> None:
    model = tiny(1, layers=1)
    model.config.max_position_embeddings = 32
    drafter = ModelDrafter(Weights("short", model, None), tree=Paths("1x4"))
    sampling = SamplingParams(temperature=0.9, seed=3)
    assert run(drafter, "match", sampling) == run(build_drafter("none"), "match", sampling)


def test_cost_is_what_a_pass_reads_of_the_draft_over_what_it_reads_of_the_target() -> None:
    draft, large = tiny(1, layers=1), tiny(0, layers=4)
    layer = sum(p.numel() for p in draft.model.layers[0].parameters()) * 4
    head, norm = VOCABULARY * 32 * 4, 32 * 4
    assert bytes_read(draft) == layer + norm + head
    assert bytes_read(draft, rows=6) == layer + norm + head // 4
    drafter = ModelDrafter(Weights("tiny", draft, None))
    Engine(TransformersTarget(large, slots=1), drafter, VERIFIERS.build("block"))
    assert drafter.cost == pytest.approx((layer + norm + head) / (4 * layer + norm + head))


def test_hidden_states_are_what_the_head_saw_where_a_policy_wants_them() -> None:
    class Curious(Branching):
        needs_hidden = True
        found: NodeProbs

        def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
            growing, answer = super().grow(root, budget, sampler), None
            while True:
                try:
                    asked = growing.send(answer)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
                answer = yield asked
                if isinstance(answer, NodeProbs):
                    self.found = answer

    tree = Curious(2, 1)
    drafter = ModelDrafter(weights(), tree=tree)
    engine = Engine(target(), drafter, VERIFIERS.build("rrs"))
    engine.submit(Request(PROMPTS[0], SamplingParams(temperature=1.0, seed=2), max_new_tokens=1 + 4))
    engine.step()
    hidden = tree.found.hidden
    assert hidden is not None
    with torch.inference_mode():
        probs = torch.softmax(drafter.weights.model.lm_head(hidden), dim=-1)
    assert torch.allclose(probs, tree.found.probs, atol=1e-6)
    assert len(hidden) == 2


@pytest.mark.parametrize("own", [VOCABULARY - 6, VOCABULARY + 6])
def test_heads_of_one_tokenizer_may_be_padded_differently(own: int) -> None:
    # Catches tokens that only one of the two knows: proposed to a target without them, or fed to a draft model.
    ours = byte_level([*WORDS, *(f"w{n}" for n in range(VOCABULARY - 6 - len(WORDS) - 1))])
    goal = TransformersTarget(tiny(0), slots=3, tokenizer=ours)
    draft = Weights("other", tiny(1, layers=1, vocabulary=own), ours)
    engines = [
        Engine(goal, ModelDrafter(draft, tree=Branching(3, 2)), VERIFIERS.build("rrs")),
        Engine(goal, build_drafter("none"), VERIFIERS.build("match")),
    ]
    for temperature in (0.0, 1.2):
        texts = []
        for engine in engines:
            sampling = SamplingParams(temperature=temperature, seed=3)
            made = [engine.submit(Request(prompt, sampling, max_new_tokens=20)) for prompt in PROMPTS[:3]]
            while engine.busy:
                engine.step()
            texts.append([generation.token_ids for generation in made])
        assert temperature > 0 or texts[0] == texts[1]


def test_a_draft_model_that_overflows_changes_nothing() -> None:
    # A verifier divides by q: with NaN in it every one would write token 0.
    broken = tiny(1, layers=1)
    broken.lm_head.weight.data.fill_(1e38)
    with torch.inference_mode():
        assert not torch.softmax(broken(torch.tensor([PROMPTS[0]])).logits, dim=-1).isfinite().all()
    slots = target()
    drafter = ModelDrafter(Weights("broken", tiny(1, layers=1), None), tree=Paths("2x3"))
    engine = Engine(slots, drafter, VERIFIERS.build("cascade"))
    drafter.weights.model.lm_head.weight.data.fill_(1e38)
    generation = engine.submit(Request(PROMPTS[0], SamplingParams(temperature=0.9, seed=3), max_new_tokens=30))
    while engine.busy:
        engine.step()
    assert len(set(generation.token_ids)) > 5
    probs = torch.tensor([[0.5, 0.5, 0.0], [float("nan")] * 3, [0.0, 0.0, 0.0]])
    assert torch.equal(sound(probs), torch.tensor([[0.5, 0.5, 0.0], [1 / 3] * 3, [1 / 3] * 3]))


def test_engines_that_share_a_draft_model_do_not_take_each_others_slots() -> None:
    shared = weights()
    engines = [Engine(target(), ModelDrafter(shared, tree=Paths("1x3")), VERIFIERS.build("block")) for _ in range(3)]
    for engine in engines:
        for prompt in PROMPTS[:3]:
            engine.submit(Request(prompt, SamplingParams(temperature=1.0, seed=1), max_new_tokens=30))
        engine.step()  # and is left with open texts
    assert [engine.drafter.passes for engine in engines] == [3, 3, 3]  # type: ignore[attr-defined]


# Its own warping


def test_its_own_temperature_and_cut_are_the_law_that_is_recorded() -> None:
    drafter = ModelDrafter(weights(), temperature=0.5, top_k=3, tree=Branching(2))
    engine = Engine(target(), drafter, VERIFIERS.build("rrs"))
    generation = engine.submit(Request(PROMPTS[0], SamplingParams(temperature=1.5, seed=2)))
    engine.scheduler.admit()
    [tree] = drafter.draft([generation.sequence], [Budget(9, 3)])
    with torch.inference_mode():
        logits = drafter.weights.model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    cut = logits.where(logits >= logits.topk(3).values[-1], -torch.inf)
    assert tree.q is not None
    assert torch.allclose(tree.q[0], torch.softmax(cut / 0.5, dim=-1), atol=1e-6)


def test_by_default_it_is_warped_as_the_text_is() -> None:
    drafter = ModelDrafter(weights(), tree=Branching(2))
    engine = Engine(target(), drafter, VERIFIERS.build("rrs"))
    sampling = SamplingParams(temperature=0.7, top_k=4, top_p=0.9, min_p=0.02, logit_bias={3: float("-inf")}, seed=2)
    generation = engine.submit(Request(PROMPTS[0], sampling))
    engine.scheduler.admit()
    [tree] = drafter.draft([generation.sequence], [Budget(9, 3)])
    assert tree.q is not None
    assert 1 <= int((tree.q[0] > 0).sum()) <= 4
    assert tree.q[0, 3] == 0


# Trimmed heads


def test_a_trimmed_head_is_the_full_head_renormalised(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path))
    shared = weights()
    counts = torch.randint(0, 50, (VOCABULARY,), generator=torch.Generator().manual_seed(4))
    trimmed = ModelDrafter(shared, trim=9, tree=Branching(3, 2))
    full = ModelDrafter(shared, tree=Branching(3, 2))
    goal = target()
    save_counts(goal.info, counts, {})
    kept = frequent_tokens(goal.info, 9)
    assert kept.tolist() == sorted(counts.argsort(descending=True, stable=True)[:9].tolist())
    found = []
    for drafter in (trimmed, full):
        engine = Engine(goal, drafter, VERIFIERS.build("rrs"))
        generation = engine.submit(Request(PROMPTS[0], SamplingParams(temperature=1.0, seed=2)))
        engine.scheduler.admit()
        [tree] = drafter.draft([generation.sequence], [Budget(32, 3)])
        found.append(tree)
        engine.cancel(generation)
    q, whole = found[0].q, found[1].q
    assert q is not None
    assert whole is not None
    inside = torch.zeros(VOCABULARY).index_fill_(0, kept, 1.0)
    assert torch.allclose(q[0], whole[0] * inside / (whole[0] * inside).sum(), atol=1e-6)
    assert not set(found[0].tokens[1:].tolist()) - set(kept.tolist())
    assert shared.model.get_output_embeddings().out_features == VOCABULARY, "the model's own head is back in its place"
    assert trimmed.cost is not None
    assert full.cost is not None
    assert trimmed.cost < full.cost


def test_a_trimmed_draft_stays_lossless(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path))
    save_counts(target().info, torch.arange(VOCABULARY), {})
    drafter = ModelDrafter(weights(), trim=6, tree=Paths("2x3"))
    sampling = SamplingParams(temperature=0.9, seed=3)
    assert run(drafter, "match", sampling) == run(build_drafter("none"), "match", sampling)


def test_counts_that_are_missing_damaged_or_of_another_target_are_a_sentence(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path))
    goal = target()
    with pytest.raises(ModelError, match="branchwise calibrate vocab"):
        frequent_tokens(goal.info, 4)
    path = save_counts(goal.info, torch.zeros(VOCABULARY), {})
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ModelError, match=r"is damaged .*; count tokens with: branchwise calibrate vocab"):
        frequent_tokens(goal.info, 4)
    save_counts(goal.info, torch.zeros(VOCABULARY - 1), {})
    with pytest.raises(ModelError, match="not of this target"):
        frequent_tokens(goal.info, 4)
    assert table_of(target(seed=0).info) == path
    assert table_of(TransformersTarget(tiny(0, layers=3), slots=1).info) != path


# Two tokenizers

WORDS = ["the", "Ġcat", "Ġsat", "Ġon", "Ġmat", "Ġdog", "Ġran", ".", "Ġ", "a", "b", "c", "Ċ"]
PIECES = ["<unk>", "the", "▁cat", "▁mat", "▁dog", "▁on", ".", "▁", "a", "b", "c", "<0x0A>", "▁bird", "▁sang"]


def byte_level(words: list[str]) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate([*words, "<end>"])}, unk_token="."))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")


def pieces(words: list[str]) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate([*words, "</s>"])}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    raw.decoder = decoders.Metaspace(prepend_scheme="never")
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>")


def test_tokens_are_matched_by_what_they_spell_whichever_way_they_are_written() -> None:
    found = spellings(byte_level(WORDS))
    assert found[b" cat"] == WORDS.index("Ġcat")
    assert found[b"\n"] == WORDS.index("Ċ")
    assert spellings(pieces(PIECES))[b"\n"] == PIECES.index("<0x0A>")
    vocabulary = common(byte_level(WORDS), len(WORDS) + 1, pieces(PIECES), len(PIECES) + 1, "other")
    assert not vocabulary.same
    assert vocabulary.draft_of[WORDS.index("Ġmat")] == PIECES.index("▁mat")
    assert vocabulary.draft_of[len(WORDS)] == len(PIECES), "the end of a text is the end of a text"
    assert WORDS.index("Ġran") not in vocabulary.draft_of


def test_an_end_of_text_that_is_spelled_alike_in_both_counts_once() -> None:
    # Counted twice, its probability would be lost when the distribution is spread over the target's vocabulary.
    theirs = byte_level([*WORDS[3:], "Ġbird"])
    vocabulary = common(byte_level(WORDS), len(WORDS) + 1, theirs, len(WORDS) - 1, "other")
    probs = torch.softmax(torch.randn(4, len(vocabulary.tokens)), dim=-1)
    assert torch.allclose(vocabulary.spread(probs).sum(dim=-1), torch.ones(4))
    assert vocabulary.draft_of[len(WORDS)] == len(WORDS) - 2


def test_a_draft_model_with_another_tokenizer_keeps_the_text_and_drafts_what_both_can_say() -> None:
    ours, theirs = byte_level(WORDS), pieces(PIECES)
    model = tiny(0, vocabulary=len(WORDS) + 1)
    draft = Weights("other", tiny(1, layers=1, vocabulary=len(PIECES) + 1), theirs)
    prompts = [(0, 1, 2, 3), (5, 6, 7), (4,)]

    def write(drafter: object, verify: str, temperature: float) -> tuple[list[list[int]], int]:
        goal = TransformersTarget(model, slots=2, tokenizer=ours)
        engine = Engine(goal, drafter, VERIFIERS.build(verify))  # type: ignore[arg-type]
        sampling = SamplingParams(temperature=temperature, seed=4)
        made = [engine.submit(Request(prompt, sampling, max_new_tokens=30)) for prompt in prompts]
        while engine.busy:
            engine.step()
        return [generation.token_ids for generation in made], sum(g.stats.accepted_tokens for g in made)

    for temperature in (0.0, 0.9):
        plain, _ = write(build_drafter("none"), "match", temperature)
        drafter = ModelDrafter(draft, tree=Branching(3, 2, 1))
        text, accepted = write(drafter, "match", temperature)
        assert text == plain
        assert accepted > 0
    assert WORDS.index("Ġran") not in drafter.vocabulary.tokens.tolist()


def test_vocabularies_with_too_little_in_common_are_refused_with_the_overlap() -> None:
    other = pieces(["<unk>", *(f"word{n}" for n in range(31)), "a"])
    with pytest.raises(ModelError, match=r"only \d+% of the smaller vocabulary"):
        common(byte_level(WORDS), len(WORDS) + 1, other, 34, "other")


def test_without_a_tokenizer_sizes_must_agree() -> None:
    draft = Weights("other", tiny(1, vocabulary=30), None)
    with pytest.raises(ModelError, match="30 tokens and the target 24"):
        Engine(target(), ModelDrafter(draft), VERIFIERS.build("block"))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("model", "needs 'model'"),
        ("model:smollm2,trim=0", "at least 1 token, not trim=0"),
        ("model:smollm2,top-k=0", "top-k=0"),
        ("model:smollm2,temperature=0", "temperature above 0"),
        ("model:smollm2,heat=1", "no option 'heat'"),
        ("model:nowhere", "Unknown model 'nowhere'"),
        ("model:/no/such/file.gguf", "no file or folder"),
    ],
)
def test_a_bad_spec_is_one_sentence(spec: str, words: str) -> None:
    with pytest.raises(BranchwiseError, match=words):
        build_drafter(spec)
