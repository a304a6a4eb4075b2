"""The token that a kernel draws behind every node is the one that warping the row and racing its tokens gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from branchwise.core.batch import PadShape, TreeBatch
from branchwise.core.rng import SeededChance
from branchwise.core.sampling import Context, SamplingParams, Warp
from branchwise.core.sequence import SequenceState
from branchwise.core.target_probs import WarpedProbs
from branchwise.core.tree import DraftTree
from branchwise.cuda.counts import counted, since
from branchwise.cuda.verify_graph import CapturedVerifier, as_program
from branchwise.draft import build_drafter
from branchwise.engine import Engine, Request
from branchwise.testing import RandomDrafter, ToyTarget
from branchwise.verify import VERIFIERS, Verdicts, Verifier
from branchwise.verify.match import Match
from tests.doubles import PipelinedToy
from tests.hopper import Compiled, compiled_by, interpreted
from tests.strategies import trees
from tests.test_verify_batches import Launching

pytestmark = pytest.mark.usefixtures("interpreter")


DTYPES = [torch.float32, torch.bfloat16]


class Case(NamedTuple):
    """Trees behind texts, and what a model says of their nodes (batch, nodes, vocabulary)."""

    batch: TreeBatch
    texts: Sequence[SequenceState]
    logits: Tensor
    seeds: Tensor
    roots: Tensor

    def drawn_by_kernel(self) -> Tensor:
        from branchwise.cuda.choices import Choices
        from branchwise.cuda.draw import draw_tokens

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        choices = Choices(len(self.texts), self.logits.shape[-1], device)
        choices.bring(self.texts)
        tables = (wider(table, more) for more, table in enumerate(self.tables))
        return draw_tokens(*(part.to(device) for part in (self.logits, *tables, *self[3:])), choices).cpu()  # type: ignore[no-any-return]

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return self.batch.tokens, self.batch.parents, self.batch.depths

    def drawn_in_full(self) -> tuple[Tensor, Tensor]:
        """The tokens, and the logits after penalties and bias."""
        sampling = [text.sampling for text in self.texts]
        warp = Warp(sampling, self.logits.shape[-1], "cpu")
        contexts = self.contexts() if warp.looks_back else None
        drawn = SeededChance(self.seeds, self.roots).tokens(warp(self.logits, contexts), self.batch.depths)
        greedy = torch.tensor([params.greedy for params in sampling])
        adjusted = warp.adjust(self.logits, contexts)
        return torch.where(greedy[:, None], adjusted.argmax(dim=-1), drawn), adjusted

    def contexts(self) -> list[Context]:
        return [
            Context(text.tokens + tree.tokens[tree.path(min(node, len(tree) - 1))[1:]].tolist(), text.prompt_length)
            for text, tree in zip(self.texts, self.batch.trees, strict=True)
            for node in range(self.batch.nodes)
        ]

    def check(self) -> Tensor:
        """Both ways draw the same, but that a cut at the very edge may fall either way. Returns what they draw."""
        found, (wanted, adjusted) = self.drawn_by_kernel(), self.drawn_in_full()
        nodes = torch.tensor([[node < len(tree) for node in range(self.batch.nodes)] for tree in self.batch.trees])
        assert not found[~nodes].any()
        for text, node in ((found != wanted) & nodes).nonzero().tolist():
            assert near_the_edge(adjusted[text, node], self.texts[text].sampling)
        return found


def wider(table: Tensor, more: int) -> Tensor:
    """The same as a part of a table with more columns, as a pass leaves it."""
    return torch.nn.functional.pad(table, (0, more), value=7)[:, : table.shape[1]]


def near_the_edge(adjusted: Tensor, params: SamplingParams) -> bool:
    """Whether tokens together have the share that is wanted but for rounding, or one of them the least that is kept."""
    kept = SamplingParams(temperature=params.temperature, top_k=params.top_k)
    whole = Warp([kept], len(adjusted), "cpu")(adjusted[None])[0].double()
    masses = whole.sort(descending=True).values.cumsum(0)
    close = (masses - params.top_p).abs().min() < 1e-5
    least = (whole / whole.max() - params.min_p).abs().min() < 1e-6
    return bool(close or least)


NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def choices_of(vocabulary: int) -> st.SearchStrategy[SamplingParams]:
    penalties = st.fixed_dictionaries(
        {
            "repetition_penalty": st.sampled_from([1.0, 0.6, 1.3, 8.0]),
            "presence_penalty": st.sampled_from([0.0, 1.1, -0.7]),
            "frequency_penalty": st.sampled_from([0.0, 0.9, -0.4]),
        }
    )
    return st.builds(
        lambda others, penalties: SamplingParams(**others, **penalties),
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]),
                "top_k": st.sampled_from([0, 1, 2, 7, vocabulary, vocabulary + 9]),
                "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
                "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
                "logit_bias": st.dictionaries(
                    st.integers(0, vocabulary - 1), st.sampled_from([-torch.inf, -3.0, 0.5, 12.0]), max_size=3
                ),
            }
        ),
        st.just(NO_PENALTIES) | penalties,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Few tokens come often, in texts, on paths and in several branches: the first and last of all and of a block."""
    vocabulary = draw(st.sampled_from([5, 256, 300, 9000]))
    likely = torch.tensor([0, vocabulary - 1, vocabulary // 256 * 256 - 1, draw(st.integers(0, vocabulary - 1))]).abs()
    drafted = draw(st.lists(trees(vocabulary=4, max_depth=3, max_width=2), min_size=1, max_size=3))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    texts = []
    for tree in drafted:
        prompt, output = (draw(st.lists(st.sampled_from(likely.tolist()), max_size=4)) for _ in range(2))
        texts.append(SequenceState([*prompt, 1], draw(choices_of(vocabulary))))
        texts[-1].tokens += [*output, int(likely[tree.tokens[0]])]
    named = [DraftTree(likely[tree.tokens], tree.parents) for tree in drafted]
    batch = TreeBatch(named, pad_shape=PadShape(nodes=draw(st.sampled_from([0, 9]))))
    logits = 3 * torch.randn(len(batch), batch.nodes, vocabulary, generator=rng)
    logits[:, :, likely] += draw(st.sampled_from([0.0, 6.0, -6.0]))  # where penalties decide
    seeds, roots = torch.randint(1 << 40, (2, len(batch)), generator=rng)
    return Case(batch, texts, logits.to(draw(st.sampled_from(DTYPES))), seeds, roots)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_a_kernel_draws_what_warping_and_racing_give(case: Case) -> None:
    pytest.importorskip("triton")
    case.check()


@pytest.mark.parametrize("top_k", [0, 3000])
def test_flat_rows_are_cut_as_they_would_be_whole(top_k: int) -> None:
    """Caught here: masses left out of what is gathered although a cut needs them, of rows that have too many to gather
    all of them."""
    pytest.importorskip("triton")
    heats, shares = [0.7, 1.0, 1.5, 2.0, 3.0], [0.5, 0.9, 0.99]
    ways = [SamplingParams(heat, top_p=share, top_k=top_k) for heat in heats for share in shares]
    tree = DraftTree(torch.tensor([3]), (-1,))
    rng = torch.Generator().manual_seed(8)
    logits = 3 * torch.randn(len(ways), 1, 9000, generator=rng)
    texts = [SequenceState([8, 3], way) for way in ways]
    seeds, roots = torch.randint(1 << 40, (2, len(ways)), generator=rng)
    Case(TreeBatch([tree] * len(ways)), texts, logits, seeds, roots).check()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_each_node_is_penalised_for_its_own_path(temperature: float) -> None:
    """Caught here: tokens of other branches, the root counted twice, an ancestor left out, a token of a later block."""
    pytest.importorskip("triton")
    a, b, c, d = 300, 8800, 5, 70
    tree = DraftTree(torch.tensor([c, a, b, a, a, b, a, a]), (-1, 0, 0, 1, 2, 3, 3, 5))
    params = SamplingParams(temperature, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=1.5, seed=1)
    texts = [SequenceState([8, 8]), SequenceState([d, 8], params)]
    texts[1].tokens += [c]
    logits = torch.full((2, 8, 9000), -9.0)
    logits[..., [a, b, c, d]] = torch.tensor([17.0, 9.0, 13.6, 8.5])
    found = Case(TreeBatch([tree] * 2), texts, logits, torch.tensor([5, 6]), torch.tensor([2, 2])).check()
    if not temperature:
        assert found[0].tolist() == [a] * 8
        # From the start c is worth 4.8 and d 4.25; on the path once a is worth 6.5, twice 5, three times 3.5, b 2.5.
        assert found[1].tolist() == [a, b, a, b, a, a, b, c]


def test_padding_is_left_alone() -> None:
    pytest.importorskip("triton")
    logits = torch.randn(2, 3, 40)
    batch = TreeBatch([DraftTree.chain([1, 2]), DraftTree.root(1)], pad_shape=PadShape(nodes=3))
    case = Case(batch, [SequenceState([1]), SequenceState([1])], logits, torch.zeros(2).long(), torch.zeros(2).long())
    best = logits.argmax(dim=-1).tolist()
    assert case.drawn_by_kernel().tolist() == [[*best[0][:2], 0], [best[1][0], 0, 0]]


def test_of_equal_logits_the_first_is_the_best() -> None:
    pytest.importorskip("triton")
    logits = torch.zeros(1, 1, 40_000)
    logits[0, 0, [34_321, 17, 16_400]] = 2.0
    for penalties in ({}, {"presence_penalty": 1.0}):
        text = SequenceState([4], SamplingParams(**penalties))
        case = Case(TreeBatch([DraftTree.root(4)]), [text], logits, torch.zeros(1).long(), torch.zeros(1).long())
        assert case.drawn_by_kernel().tolist() == [[17]]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_match_gives_the_same_verdict_on_drawn_tokens_as_on_distributions(data: st.DataObject) -> None:
    pytest.importorskip("triton")
    from branchwise.cuda.choices import Choices
    from branchwise.cuda.draw import judge

    vocabulary = 6
    drafted = data.draw(st.lists(trees(vocabulary=vocabulary, max_depth=3, max_width=3), min_size=2, max_size=2))
    batch = TreeBatch(drafted)
    penalty = data.draw(st.sampled_from([0.0, 0.5]))
    sampling = [
        SamplingParams(temperature=data.draw(st.sampled_from([0.0, 1.0])), seed=1, frequency_penalty=penalty * row)
        for row in range(2)
    ]
    texts = [SequenceState([int(tree.tokens[0])], params) for tree, params in zip(drafted, sampling, strict=True)]
    logits = torch.randn(2, batch.nodes, vocabulary, generator=torch.Generator().manual_seed(batch.nodes))
    chance = SeededChance(torch.tensor([3, 4]), torch.tensor([5, 6]))
    choices = Choices(2, vocabulary, torch.device("cpu"))
    choices.bring(texts)
    tables, with_tokens = (batch.tokens, batch.parents, batch.depths), data.draw(st.booleans())
    rows = judge(logits, *tables, chance.seeds, chance.roots, choices, with_tokens=with_tokens)
    found = Verdicts.written(rows, with_tokens=with_tokens).read()
    wanted = Match()(batch, WarpedProbs(logits, batch, texts), chance).read()
    assert found == wanted
    kept = [verdict.kept_of(tree) for verdict, tree in zip(wanted, drafted, strict=True)]
    assert [verdict.kept_of(tree) for verdict, tree in zip(found, drafted, strict=True)] == kept


# Recorded


class RecordingToy(PipelinedToy):
    """Verdicts are recorded as on a device: what a graph would replay is run again, at the same places."""

    def capture(self, verifier: Verifier) -> Verifier:
        self.captured = CapturedVerifier(verifier, compile=False, texts=8)
        return self.captured


WAYS = [
    SamplingParams(seed=1),
    SamplingParams(temperature=0.8, seed=2, logit_bias={1: 1.0}),
    SamplingParams(repetition_penalty=1.4, seed=3),
    SamplingParams(temperature=0.9, presence_penalty=0.8, frequency_penalty=0.3, seed=4),
    SamplingParams(temperature=1.1, repetition_penalty=0.8, frequency_penalty=1.5, logit_bias={2: -2.0}, seed=5),
]


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("branchwise.cuda.verify_graph.Pool", Launching)
    monkeypatch.setattr("branchwise.cuda.verify_graph.have_kernels", lambda device: True)


def written(engine: Engine, *, cancel: bool = False) -> list[list[int]]:
    """Texts of all kinds that join one by one, each in another place of the batch; one more may leave early."""
    requests = [Request((1, 2, 1 + n % 3), way, max_new_tokens=4 + n) for n, way in enumerate(WAYS)]
    made = []
    while requests or engine.busy:
        if requests:
            made.append(engine.submit(requests.pop(0)))
        if cancel:
            passing = engine.submit(Request((4, 4), WAYS[2], max_new_tokens=9))
            engine.step()
            engine.cancel(passing)
            cancel = len(made) < 3
        engine.step()
    return [one.token_ids for one in made]


@pytest.mark.usefixtures("recording")
def test_texts_with_penalties_are_judged_by_the_graphs_of_all_others() -> None:
    """Whoever joins or leaves, in padded batches; each text is that of plain decoding on the host."""
    before = counted()
    target = RecordingToy(6, padded=True)
    texts = written(Engine(target, RandomDrafter(6, nodes=4), VERIFIERS.build("match")), cancel=True)
    assert "eager" not in since(before)
    assert texts == written(Engine(ToyTarget(6), build_drafter("none"), VERIFIERS.build("match")))
    sizes = {recording.inputs.logits.shape[:2] for recording in target.captured._graphs.values()}
    assert len(target.captured._graphs) == len(sizes), "one graph for a size"


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize(
    ("verifier", "sampling", "eager"),
    [
        ("match", WAYS[3], False),
        ("rrs", WAYS[2], False),  # which leaves greedy texts to match
        ("rrs", WAYS[3], True),
        ("match", SamplingParams(processors=(lambda tokens, row: row,)), True),
    ],
    ids=["match", "greedy texts of another rule", "sampled texts of another rule", "a processor"],
)
def test_what_looks_back_is_recorded_where_the_kernel_draws(
    verifier: str, sampling: SamplingParams, eager: bool
) -> None:
    before, rule = counted(), VERIFIERS.build(verifier)
    found = []
    for judge in (rule, CapturedVerifier(rule, compile=False)):
        batch, text = TreeBatch([DraftTree.root(1)]), SequenceState([2, 1], sampling)
        probs = WarpedProbs(torch.arange(6.0).sin()[None, None], batch, [text])
        probs.lazy = False  # as on a device
        found.append(judge(batch, probs, SeededChance(torch.tensor([4]), torch.tensor([1]))).read())
    assert found[0] == found[1]
    assert ("eager" in since(before)) == eager


def test_paths_are_read_in_tables_that_a_draft_left_on_the_device() -> None:
    """Parts of longer tables, in the numbers of whoever laid them."""
    pytest.importorskip("triton")
    from branchwise.cuda.choices import Choices

    shape = (-1, 0, 0, 1, 1, 3)
    drafted = [DraftTree(torch.tensor(tokens), shape) for tokens in ([1, 2, 3, 2, 4, 2], [4, 0, 2, 0, 1, 0])]
    texts = [SequenceState([int(tree.tokens[0])], params) for tree, params in zip(drafted, WAYS[2:4], strict=True)]
    batch, match = TreeBatch(drafted), Match()
    choices, numbers = Choices(2, 6, torch.device("cpu")), torch.tensor([3, 4, 5, 6])
    choices.bring(texts)
    program = as_program(match, batch, choices, match.reads, match.reads)
    tables = [wider(batch.host(name).int(), 3) if name in match.reads[:3] else batch.host(name) for name in match.reads]
    lengths = set()
    for likely in torch.eye(6):
        logits = 3 * likely.expand(2, 6, 6) + torch.arange(72.0).sin().view(2, 6, 6)
        found = Verdicts.written(program(numbers, logits, None, *tables)).read()
        chance = SeededChance(*numbers.view(2, 2))
        assert found == match(batch, WarpedProbs(logits, batch, texts), chance).read()
        lengths |= {len(verdict.path) for verdict in found}
    assert max(lengths) > 2


@interpreted
def test_the_kernel_compiles_for_a_hopper_gpu(tmp_path: Path) -> None:
    assert compiled_by("tests.test_draw", tmp_path) == ["_draw", "_walk"] * 2


def compile_all() -> None:
    """Few rows of SmolLM2 and many of Qwen2.5-Coder."""
    from branchwise.cuda import draw
    from branchwise.cuda.choices import Choices

    draw._draw, draw._walk = Compiled(draw._draw), Compiled(draw._walk)
    for vocabulary, nodes in ((49_152, 16), (151_936, 128)):
        logits = torch.zeros(2, nodes, vocabulary, dtype=torch.bfloat16)
        table, numbers = torch.zeros(2, nodes, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        choices = Choices(2, vocabulary, torch.device("cpu"))
        draw.judge(logits, table, table, table, numbers, numbers, choices, with_tokens=True)
