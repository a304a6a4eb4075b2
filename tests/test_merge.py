"""Packs of specialists: the equations by hand, bits that come back, and a drafter that is the specialist it says."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from branchwise.audit.findings import Word
from branchwise.audit.model import ModelAuditor, Plan
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.cli import app
from branchwise.control.bandit import Bandit
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.draft import build_drafter
from branchwise.draft.auto import AutoDrafter
from branchwise.draft.base import Budget
from branchwise.draft.model.ahead import ModelAhead
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.draft.model.pack import FILE, Pack, load_specialist, packed, unpacked
from branchwise.draft.model.specialists import MOST_OPEN, Specialists
from branchwise.engine import Engine, Request
from branchwise.errors import BranchwiseError, UnknownName, UsageError
from branchwise.llm import LLM
from branchwise.models.cache import bytes_in
from branchwise.train.merge import elect, in_eight_bits, merge, named, pack_of
from branchwise.verify import VERIFIERS
from tests import attention_twins
from tests.test_experts import tokenizer
from tests.test_inflight import Watched

WORDS = 48
PROMPTS = [(5, 6, 7, 8), (9,), (11, 12, 13)]


def tiny(seed: int = 0, *, width: int = 32, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def tuned(base: Any, seed: int, far: float = 0.1) -> Any:
    """Another model near the base: all its weights a little changed, norms included."""
    other = tiny()
    other.load_state_dict(base.state_dict())
    rng = torch.Generator().manual_seed(seed)
    for weight in other.parameters():
        weight.add_(far * torch.randn(weight.shape, generator=rng))
    return other


def saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, four specialists, and the pack of all of them."""
    folder, base = tmp_path_factory.mktemp("made"), tiny()
    saved(base, folder / "base")
    for seed, task in enumerate(("code", "math", "chat", "law"), start=1):
        saved(tuned(base, seed), folder / task)
    merge(
        str(folder / "base"),
        {task: str(folder / task) for task in ("code", "math", "chat", "law")},
        folder / "pack",
        "int8",
    )
    return folder


def logits(model: Any, tokens: Sequence[int]) -> Tensor:
    found: Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return found


# The equations


def test_what_is_elected_by_hand() -> None:
    changes = torch.tensor([[[2.0, -1.0, 0.0, 3.0]], [[4.0, 3.0, -1.0, -3.0]], [[-1.0, -5.0, -2.0, 0.0]]])
    unified, masks, rescale = elect(changes)
    # sums 5, -3, -3, 0: of a positive sum the largest positive change, and so on; where nothing is elected, nothing is
    assert unified.tolist() == [[4.0, -5.0, -2.0, 0.0]]
    assert masks.tolist() == [[[True, True, False, False]], [[True, False, True, False]], [[False, True, True, False]]]
    assert rescale.tolist() == pytest.approx([6 / 9, 11 / 6, 8 / 7])


def test_the_order_of_specialists_changes_nothing() -> None:
    changes = torch.randn(3, 5, 7)
    first, other = elect(changes), elect(changes[[2, 0, 1]])
    assert torch.equal(first.unified, other.unified)
    assert torch.equal(first.masks[[2, 0, 1]], other.masks)
    torch.testing.assert_close(first.rescale[[2, 0, 1]], other.rescale)


def test_rescaled_changes_are_as_large_as_those_of_the_specialist() -> None:
    base = {"weight": torch.randn(6, 9)}
    own = {task: {"weight": base["weight"] + 0.1 * torch.randn(6, 9)} for task in ("a", "b", "c")}
    for kind in ("exact", "int8"):
        pack, _ = pack_of(base, own, kind)
        for number, task in enumerate(own):
            change = pack.weight("weight", number, base["weight"]) - base["weight"]
            wanted = (own[task]["weight"] - base["weight"]).abs().mean()
            assert float(change.abs().mean()) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 100])
def test_bits_come_back(count: int) -> None:
    bits = torch.rand(3, count, generator=torch.Generator().manual_seed(count)) < 0.5
    stored = packed(bits)
    assert stored.dtype is torch.uint8
    assert stored.shape == (3, -(-count // 8))
    assert torch.equal(unpacked(stored, count), bits)
    assert packed(torch.tensor([True, False, True])).tolist() == [5]


def test_eight_bits_are_at_most_half_a_step_off() -> None:
    unified = torch.randn(4, 33) * torch.tensor([[1.0], [0.01], [0.0], [100.0]])
    steps, scale = in_eight_bits(unified)
    assert steps.dtype is torch.int8
    assert (steps * scale[:, None] - unified).abs().le(0.5001 * scale[:, None]).all()
    assert steps.abs().amax(dim=1).tolist() == [127, 127, 0, 127]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pack_of_one_specialist_is_that_specialist(dtype: torch.dtype, tmp_path: Path) -> None:
    base = tiny().to(dtype)
    one = tuned(tiny(), 1, far=1.0).to(dtype)  # as far as its weights are large, so that nothing is exact by luck
    merge(saved(base, tmp_path / "base"), {"one": saved(one, tmp_path / "one")}, tmp_path / "pack", "exact")
    found, _ = load_specialist(str(tmp_path / "pack"), task="one", dtype=dtype, device="cpu")
    for name, weight in one.named_parameters():
        assert torch.equal(found.get_parameter(name), weight), name
    merge(str(tmp_path / "base"), {"one": str(tmp_path / "one")}, tmp_path / "small", "int8")
    near, _ = load_specialist(str(tmp_path / "small"), task="one", dtype=torch.float32, device="cpu")
    for name, weight in one.named_parameters():
        assert (near.get_parameter(name) - weight.float()).abs().max() < 0.05, name


def test_specialists_that_agree_come_back_and_what_nobody_changed_takes_no_room() -> None:
    base = {"same": torch.ones(2, 2), "norm": torch.ones(3), "weight": torch.zeros(2, 2)}
    own = {"a": base | {"weight": torch.full((2, 2), 0.5)}, "b": base | {"norm": torch.tensor([1.0, 2.0, 3.0])}}
    pack, told = pack_of(base, own, "exact")
    assert {key.partition(":")[0] for key in pack.tensors} == {"norm", "weight"}
    for number, weights in enumerate(own.values()):
        for name in ("norm", "weight"):
            torch.testing.assert_close(pack.weight(name, number, base[name]).float(), weights[name])
    assert told["a"].distance == 0.0
    assert told["b"].agreement == 1.0


# The folder


def test_a_pack_of_four_is_smaller_than_two_specialists(made: Path) -> None:
    weights = {
        name: sum(file.stat().st_size for file in (made / name).glob("*.safetensors")) for name in ("code", "pack")
    }
    assert weights["pack"] < 2 * weights["code"]
    assert bytes_in(made / "pack") < 2 * bytes_in(made / "code")


def test_other_programs_load_the_base(made: Path) -> None:
    auto: Any = LlamaForCausalLM
    base = auto.from_pretrained(made / "pack")
    assert torch.equal(logits(base, range(3, 20)), logits(auto.from_pretrained(made / "base"), range(3, 20)))


def test_the_command_writes_a_pack_and_tells_what_it_is(made: Path, tmp_path: Path) -> None:
    words = [
        "train",
        "merge",
        str(made / "base"),
        str(made / "code"),
        f"sums={made / 'math'}",
        "--out",
        str(tmp_path / "p"),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "code: " in done.output
    assert "sums: " in done.output
    assert Pack.read(tmp_path / "p").tasks == ("code", "sums")
    again = CliRunner().invoke(app, [*words[:-1], str(tmp_path / "q"), "--json"])
    told = json.loads(again.output)
    assert told["bytes"] == bytes_in(tmp_path / "q")
    assert 0.5 < told["tasks"]["sums"]["agreement"] < 1
    about = json.loads((tmp_path / "q" / "branchwise.json").read_text())
    assert str(made) not in json.dumps(about), "no folder of this machine"


def test_what_cannot_be_merged_is_refused_with_a_sentence(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    wide = saved(tiny(width=64), tmp_path / "wide")
    foreign = saved(tiny(), tmp_path / "foreign")
    other = json.loads(Path(foreign, "tokenizer.json").read_text())
    words = other["model"]["vocab"]
    words["w5"], words["w6"] = words["w6"], words["w5"]
    Path(foreign, "tokenizer.json").write_text(json.dumps(other))
    blank = tmp_path / "blank"
    blank.mkdir()
    (blank / "config.json").write_text((made / "base" / "config.json").read_text())
    base = str(made / "base")
    for said, given in {
        "another tokenizer": {"a": foreign},
        "is not of the shape": {"a": wide},
        "no safetensors beside": {"a": str(blank)},
        "no file or folder": {"a": str(tmp_path / "nothing")},
    }.items():
        with pytest.raises(BranchwiseError, match=said):
            merge(base, given, out, "int8")
    with pytest.raises(UsageError, match="Two specialists are called 'code'"):
        named(["a/code", "b/code"])
    with pytest.raises(UsageError, match="plain name"):
        named(["my task=folder"])

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(UsageError, match="No space left"):
        merge(base, {"code": str(made / "code")}, out, "int8")
    assert not out.exists()
    assert not list(tmp_path.glob(".out*")), "nothing half-written"


def test_a_damaged_pack_is_refused(made: Path, tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(made / "pack", broken)
    (broken / "branchwise.json").unlink()
    stored = bytearray((broken / FILE).read_bytes())
    stored[-5] ^= 255
    (broken / FILE).write_bytes(stored)
    with pytest.raises(BranchwiseError, match="damaged"):
        load_specialist(str(broken), task="code", dtype=torch.float32, device="cpu")
    (broken / FILE).write_bytes(b"nothing")
    with pytest.raises(BranchwiseError, match="damaged"):
        build_drafter(f"model:{broken}")


# Drafting


def test_a_task_by_name_is_an_ordinary_draft_model(made: Path) -> None:
    drafter = build_drafter(f"model:{made / 'pack'},task=math", "chain:3")
    assert isinstance(drafter, ModelDrafter)
    drafter.bind(TransformersTarget(tiny(7), tokenizer=tokenizer()).info)
    wanted, _ = load_specialist(str(made / "pack"), task="math", dtype=torch.float32, device="cpu")
    assert torch.equal(logits(drafter.weights.model, PROMPTS[0]), logits(wanted, PROMPTS[0]))
    assert not torch.equal(logits(wanted, PROMPTS[0]), logits(tiny(), PROMPTS[0]))
    with pytest.raises(UnknownName, match=r"Unknown task 'maths'\. Did you mean 'math'"):
        build_drafter(f"model:{made / 'pack'},task=maths")
    with pytest.raises(BranchwiseError, match="not a pack of specialists"):
        build_drafter(f"model:{made / 'base'},task=math")


def test_q_is_that_of_the_specialist_that_drafted(made: Path) -> None:
    drafter = build_drafter(f"model:{made / 'pack'}", "rsd-c:2,1,1")
    assert isinstance(drafter, Specialists)
    target = TransformersTarget(tiny(7), slots=3, tokenizer=tokenizer())
    drafter.bind(target.info)
    own = {
        task: load_specialist(str(made / "pack"), task=task, dtype=torch.float32, device="cpu")[0]
        for task in drafter.tasks
    }
    sampling = SamplingParams(temperature=1.0, seed=3)
    texts = [SequenceState(list(prompt), sampling) for prompt in PROMPTS]
    for sequence, task in zip(texts[:2], ("chat", "law"), strict=True):
        drafter.assign(sequence, task)
    rng = random.Random(0)
    for _ in range(3):
        trees = drafter.draft(texts, [Budget(9, 3)] * 3)
        for sequence, tree, task in zip(texts, trees, ("chat", "law", "code"), strict=True):
            assert tree.q is not None
            for node in set(tree.parents[1:]):
                path = [int(tree.tokens[one]) for one in tree.path(node)][1:]
                wanted = logits(own[task], [*sequence.tokens, *path])[-1].softmax(dim=-1)
                torch.testing.assert_close(tree.q[node], wanted, atol=1e-5, rtol=1e-4)
        for sequence in texts:
            sequence.tokens += [rng.randrange(3, WORDS), rng.randrange(3, WORDS)]


@pytest.mark.parametrize("verify", ["match", "token", "cascade"])
def test_texts_of_different_tasks_run_together_and_are_those_of_plain_decoding(verify: str, made: Path) -> None:
    tree = "paths:2x3" if verify == "cascade" else "chain:3"
    sampling = SamplingParams(temperature=0.0 if verify != "match" else 0.9, seed=5)

    def written(
        draft: str, tasks: Sequence[str | None], tree: str | None = None, rule: str = "match"
    ) -> list[list[int]]:
        target = TransformersTarget(tiny(7), slots=2, tokenizer=tokenizer())
        engine = Engine(target, build_drafter(draft, tree), VERIFIERS.build(rule))
        requests = [Request(p, sampling, 18, task=task) for p, task in zip(PROMPTS, tasks, strict=True)]
        found = [engine.submit(request) for request in requests]
        while engine.busy:
            engine.step()
        return [generation.token_ids for generation in found]

    plain = written("none", [None] * 3)
    for tasks in (["code", "math", None], [None] * 3, ["law"] * 3):
        assert written(f"model:{made / 'pack'}", tasks, tree, verify) == plain


def test_a_seed_writes_the_same_text_whatever_runs_beside_it(made: Path) -> None:
    """With a verifier that reads q the text depends on who drafts, and that depends on the text alone."""
    sampling = SamplingParams(temperature=1.0, seed=8)

    def written(prompts: Sequence[tuple[int, ...]]) -> list[int]:
        target = TransformersTarget(tiny(7), slots=3, tokenizer=tokenizer())
        engine = Engine(target, build_drafter(f"model:{made / 'pack'}", "chain:3"), VERIFIERS.build("token"))
        found = [engine.submit(Request(prompt, sampling, 36)) for prompt in prompts]
        while engine.busy:
            engine.step()
        return found[-1].token_ids

    assert written([PROMPTS[0]]) == written([PROMPTS[1], PROMPTS[2], PROMPTS[0]])


@pytest.mark.parametrize("tasks", [(None,), ("code",) * 3, ("code", "law", None)], ids=["found", "one", "mixed"])
def test_drafts_ahead_of_the_host_are_those_of_the_host(
    tasks: tuple[str | None, ...], made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a verifier that reads q: the text would be another if any tree or distribution were."""
    attention_twins.install(monkeypatch)
    ahead = []
    own = ModelAhead.draft_next
    monkeypatch.setattr(ModelAhead, "draft_next", lambda *given: ahead.append(own(*given)) or ahead[-1])

    def written(*, kernels: bool) -> list[list[int]]:
        form: Any = {"slots": 3, "context": 96, "max_nodes": 32, "kernels": kernels, "tokenizer": tokenizer()}
        engine = Engine(
            Watched(near, **form), build_drafter(f"model:{made / 'pack'}", "chain:3"), VERIFIERS.build("block")
        )
        sampling = SamplingParams(temperature=1.0, seed=6)
        found = [
            engine.submit(Request(prompt, sampling, 30 + 8 * row, task=task))
            for row, (prompt, task) in enumerate(zip(PROMPTS, tasks, strict=False))
        ]
        while engine.busy:
            engine.step()
        return [generation.token_ids for generation in found]

    near = tuned(tiny(), 1, far=0.08)
    by_host = written(kernels=False)
    assert not ahead
    assert written(kernels=True) == by_host
    assert any(trees is not None for trees in ahead)


def test_specialists_that_no_text_needs_are_let_go(made: Path, tmp_path: Path) -> None:
    names = [f"task-{number}" for number in range(MOST_OPEN + 2)]
    places = {name: str(made / "code") for name in names}
    merge(str(made / "base"), places, tmp_path / "pack", "int8")
    drafter = build_drafter(f"model:{tmp_path / 'pack'}", "chain:2")
    assert isinstance(drafter, Specialists)
    drafter.bind(TransformersTarget(tiny(7), slots=len(names), tokenizer=tokenizer()).info)
    texts = [SequenceState([5, 6, 7]) for _ in names]
    for sequence, name in zip(texts, names, strict=True):
        drafter.assign(sequence, name)
    drafter.draft(texts, [Budget(3, 2)] * len(texts))
    assert list(drafter._open) == names
    passes = drafter.passes
    drafter.finish(texts[-1])
    assert list(drafter._open) == names[:-1], "the others are in use"
    for sequence in texts:
        drafter.finish(sequence)
    assert len(drafter._open) == MOST_OPEN
    assert drafter.passes == passes > 0


def test_a_request_may_say_what_it_is_about(made: Path) -> None:
    model = tiny(7)
    target = TransformersTarget(model, slots=2, tokenizer=tokenizer())
    llm = LLM(
        "tiny", model, tokenizer(), Engine(target, build_drafter(f"model:{made / 'pack'}"), VERIFIERS.build("match"))
    )
    llm.generate("w5 w6 w7", task="law", max_new_tokens=12)
    assert [reason.split()[1] for reason in llm.engine.drafter.reasons(1)] == ["law"]
    with pytest.raises(UnknownName, match="Unknown task 'laws'"):
        llm.generate("w5", task="laws")
    with pytest.raises(UsageError, match="no specialists"):
        llm.with_method("plain").generate("w5", task="law")


def test_the_default_method_takes_a_pack(made: Path) -> None:
    drafter = AutoDrafter(f"model({made / 'pack'})")
    assert drafter.tasks == ("code", "math", "chat", "law")
    target = TransformersTarget(tiny(7), slots=2, tokenizer=tokenizer())
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    found = [engine.submit(Request(PROMPTS[0], max_new_tokens=40, task=task)) for task in ("law", None)]
    while engine.busy:
        engine.step()
    assert found[0].token_ids == found[1].token_ids
    assert any(isinstance(source, Specialists) for source in drafter.sources)
    one = AutoDrafter(f"model({made / 'pack'},task=law)")
    assert one.tasks == ()
    assert isinstance(one._model, ModelDrafter)
    assert one._model.task == "law"


def test_a_pack_is_lossless_by_the_audit(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One specialist after the other drafts for every text."""
    monkeypatch.setattr("branchwise.control.bandit.STINT", 1)
    model = tiny(7)
    target = TransformersTarget(model, slots=33, max_nodes=32, tokenizer=tokenizer())
    llm = LLM("tiny", model, tokenizer(), Engine(target, build_drafter("none"), VERIFIERS.build("match")))
    plan = Plan(samples=400, length=2, seed=5, greedy_tokens=8, near_ties=False, limit=0.25)
    drafter = build_drafter(f"model:{made / 'pack'}", "paths:2x2")
    found = ModelAuditor(llm, ["w5 w6 w7"], plan).audit(drafter, verify="cascade")
    assert found.finding.word is Word.LOSSLESS, found.finding.evidence
    assert isinstance(drafter, Specialists)
    assert min(steps for steps, _ in drafter._seen.values()) >= 1
    assert drafter._seen["math"][0] > 20, "texts that need a second step have it from the second specialist"


# The bandit


def drawn(worth: Sequence[Sequence[float]], steps: int, seed: int = 0) -> list[int]:
    """The arms that are chosen while each gives a mean of `worth`, one row for each part of the steps."""
    bandit, rng, chosen = Bandit(len(worth[0])), random.Random(seed), []
    for part in worth:
        for _ in range(steps):
            chosen.append(bandit.arm)
            bandit.record(sum(rng.random() < part[bandit.arm] for _ in range(6)) / 6)
    return chosen


@pytest.mark.parametrize("seed", range(5))
def test_the_bandit_finds_the_better_arm_and_follows_when_it_changes(seed: int) -> None:
    chosen = drawn([(0.4, 0.8, 0.4), (0.4, 0.4, 0.8)], 200, seed)
    assert chosen[:12] == [0] * 4 + [1] * 4 + [2] * 4, "each is tried first"
    assert chosen[40:200].count(1) > 0.75 * 160
    assert chosen[280:].count(2) > 0.7 * 120


def test_the_bandit_says_before_a_step_whether_it_stays() -> None:
    bandit, rng = Bandit(3), random.Random(1)
    stayed = 0
    for _ in range(300):
        arm, stays = bandit.arm, bandit.stays
        bandit.record(rng.random())
        assert not stays or bandit.arm == arm
        stayed += stays
    assert stayed == 225
    assert Bandit(1).stays


def test_the_bandit_of_a_text_finds_its_specialist(made: Path, tmp_path: Path) -> None:
    """The target is one of the specialists, so this one drafts all that it writes."""
    merge(str(made / "base"), {"math": str(made / "math"), "code": str(made / "code")}, tmp_path / "pack", "exact")
    model, _ = load_specialist(str(tmp_path / "pack"), task="code", dtype=torch.float32, device="cpu")
    target = TransformersTarget(model, slots=1, tokenizer=tokenizer())
    drafter = build_drafter(f"model:{tmp_path / 'pack'}", "chain:3")
    assert isinstance(drafter, Specialists)
    engine = Engine(target, drafter, VERIFIERS.build("token"))
    engine.submit(Request(PROMPTS[0], SamplingParams(temperature=1.0, seed=4), max_new_tokens=110))
    while engine.busy:
        engine.step()
    steps = {task: count for task, (count, _) in drafter._seen.items()}
    assert steps["code"] > 3 * steps["math"]
    assert drafter._seen["code"][1] == pytest.approx(steps["code"], rel=0.02), "all that it drafts is accepted"
