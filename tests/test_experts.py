"""Mixtures with fewer experts: planted useless ones go, what stays is what was, and the folder loads as any other."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from branchwise.backends.transformers.experts import expert_layers, experts_read
from branchwise.backends.transformers.runner import bytes_read
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.cli import app
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.errors import UnsupportedModel, UsageError
from branchwise.train.experts.reduce import check_mixture, check_sizes, grouped, reduced
from branchwise.train.experts.run import reduce_experts, split
from branchwise.train.experts.usage import Text, Usage, acceptance, usage_of
from branchwise.train.folder import whole_folder

WORDS = 48
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QWEN: dict[str, Any] = {"num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": True}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 2}
CONFIGS = {
    "mixtral": lambda: hf.MixtralConfig(**SIZES, num_local_experts=6),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**SIZES, **QWEN, **WINDOW, shared_expert_intermediate_size=16),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**SIZES, **QWEN, head_dim=8),
    "olmoe": lambda: hf.OlmoeConfig(**SIZES, num_experts=6, norm_topk_prob=True),
}
USEFUL = [[0, 2, 5], [1, 2, 4]]
"""of both layers"""


def mixture(family: str = "mixtral") -> Any:
    """A tiny mixture whose experts differ."""
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(CONFIGS[family]()).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "embed" not in name:
            weight.mul_(16.0 if ".experts." in name else 4.0)
    return model


def with_useless_experts(family: str = "mixtral") -> Any:
    """A mixture whose routers never choose any but the useful experts: what all tokens have in common speaks against
    the others. Nothing writes to the first number of a hidden state, so it stays what embeddings made it."""
    model = mixture(family)
    model.get_input_embeddings().weight.normal_()[:, 0] = 3.0
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0
        elif name.endswith("experts.down_proj"):
            weight[:, 0] = 0.0
    for layer, useful in zip(expert_layers(model), USEFUL, strict=True):
        layer.rows.normal_()  # all useful ones are chosen now and then
        layer.rows[:, 0] = 0.0
        for expert in set(range(layer.count)) - set(useful):
            layer.rows[expert] = 0.0
            layer.rows[expert, 0] = -100.0
    return model


def texts(count: int = 8, length: int = 20) -> list[Text]:
    rng = torch.Generator().manual_seed(3)
    return [Text(torch.randint(3, WORDS, (length,), generator=rng).tolist(), 5) for _ in range(count)]


def logits(model: Any, text: Text) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([text.tokens])).logits
    return found


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w2", bos_token="w1", unk_token="w0")


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def task(folder: Path, prompts: int = 6) -> Path:
    file = folder / "task.jsonl"
    lines = [json.dumps({"prompt": " ".join(f"w{3 + (7 * n + k) % 40}" for k in range(4))}) for n in range(prompts)]
    file.write_text("\n".join(lines))
    return file


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["train", "prune-experts", *map(str, words)])


@pytest.mark.parametrize("family", CONFIGS)
def test_exactly_the_useful_experts_are_kept_and_nothing_else_changes(family: str) -> None:
    model, known = with_useless_experts(family), texts()
    found = reduce_experts(model, family, known[:6], known[6:], keep=3)
    assert [layer["kept"] for layer in found.layers] == USEFUL
    assert [layer["used"] for layer in found.layers] == [3, 3]
    assert all(layer["share"] == 1.0 for layer in found.layers)
    torch.testing.assert_close(logits(found.model, known[0]), logits(model, known[0]))
    assert found.chosen.acceptance == pytest.approx(1.0, abs=1e-5)
    assert len(list(expert_layers(found.model))) == 2
    assert all(layer.count == 3 for layer in expert_layers(found.model))


def test_the_fewest_experts_above_the_threshold_are_found_by_measuring() -> None:
    model, known = with_useless_experts(), texts()
    found = reduce_experts(model, "mixture", known[:6], known[6:], keep=None, least=0.99)
    assert {trial.keep for trial in found.trials} == {6, 3, 1}
    assert found.chosen.keep == 3, "one expert cannot do what three do"
    assert min(trial.acceptance for trial in found.trials) < 0.99
    one = reduce_experts(model, "mixture", known[:6], known[6:], keep=None, least=0.01)
    assert one.chosen.keep == 1


def test_all_experts_kept_are_the_model_itself() -> None:
    model, known = mixture(), texts()
    usages = usage_of(model, known)
    for way in ("drop", "cluster", "merge"):
        same = reduced(model, usages, [grouped(usage, 6, way) for usage in usages], way)
        assert torch.equal(logits(same, known[0]), logits(model, known[0]))


def test_usage_is_the_weight_of_answers_without_prompts() -> None:
    model, text = mixture(), texts(1)[0]
    [first, _] = usage_of(model, [text])
    layer = next(expert_layers(model))
    seen: list[Any] = []
    assert layer.router is not None
    hook = layer.router.register_forward_hook(lambda module, inputs, found: seen.append(found))
    logits(model, text)
    hook.remove()
    _, scores, chosen = seen[0]
    wanted = torch.zeros(6, dtype=torch.float64)
    for row in range(text.prompt - 1, len(text.tokens)):
        for score, expert in zip(scores[row], chosen[row], strict=True):
            wanted[expert] += float(score)
    torch.testing.assert_close(first.share, wanted / wanted.sum())


def test_twins_are_one_group_and_their_merger_is_each_of_them() -> None:
    model, known = mixture(), texts()
    layer = next(expert_layers(model))
    for weight in layer.experts.parameters():
        weight[4] = weight[1]
    [usage, _] = usage_of(model, known)
    assert usage.distance[1, 4] == pytest.approx(0.0, abs=1e-3)
    assert usage.distance[1, 2] > 0.1
    groups = grouped(usage, 5, "merge")
    assert {1, 4} in map(set, groups)
    made = reduced(model, usage_of(model, known), [groups, grouped(usage, 5, "drop")], "merge")
    merged = next(expert_layers(made))
    place = next(number for number, group in enumerate(groups) if 1 in group)
    torch.testing.assert_close(
        merged.experts.get_parameter("down_proj")[place], layer.experts.get_parameter("down_proj")[1]
    )


def test_merging_weighs_by_use_and_dropping_keeps_the_most_used() -> None:
    share = torch.tensor([0.6, 0.1, 0.3, 0.0], dtype=torch.float64)
    far = torch.ones(4, 4) - torch.eye(4)
    far[0, 1] = far[1, 0] = 0.1
    usage = Usage("layer", share, far)
    assert grouped(usage, 2, "drop") == [[0], [2]]
    assert grouped(usage, 2, "merge") == [[0, 1], [2]], "an expert that is not used makes no group of its own"
    assert grouped(usage, 3, "cluster") == [[0], [1], [2]]
    assert grouped(usage, 4, "merge") == [[0], [1], [2], [3]]
    from branchwise.train.experts.reduce import _joined

    rows = _joined(torch.tensor([[7.0], [0.0], [5.0], [9.0]]), share, [[0, 1], [2]], "merge")
    torch.testing.assert_close(rows, torch.tensor([[6.0], [5.0]]))


def test_acceptance_is_what_two_distributions_share() -> None:
    model, other, [text] = mixture(), with_useless_experts(), texts(1)
    p, q = (logits(one, text)[0, 4:-1].softmax(dim=-1) for one in (model, other))
    assert acceptance(model, other, [text]) == pytest.approx(
        float((1 - (p - q).abs().sum(dim=-1) / 2).mean()), abs=1e-5
    )


@pytest.mark.parametrize(("rows", "wanted"), [(1, 2.0), (2, 2 + 2 * 2 / 3), (1000, 6.0)])
def test_a_pass_reads_the_experts_that_its_rows_are_sent_to(rows: int, wanted: float) -> None:
    assert experts_read(6, 2, rows) == pytest.approx(wanted)
    model = mixture()
    experts = sum(weight.nbytes for layer in expert_layers(model) for weight in layer.experts.parameters())
    unread = bytes_read(model, nodes=10_000) - bytes_read(model, nodes=rows)
    assert unread == pytest.approx(experts * (1 - wanted / 6), abs=1)


def test_the_cost_of_a_reduced_model_counts_what_a_pass_reads() -> None:
    model, known = with_useless_experts(), texts()
    usages = usage_of(model, known)
    made = reduced(model, usages, [grouped(usage, 3, "drop") for usage in usages], "drop", active=1)
    drafter = ModelDrafter(Weights("reduced", made, None))
    drafter.bind(TransformersTarget(model).info)
    assert drafter.cost == pytest.approx(bytes_read(made) / bytes_read(model))
    expert = sum(weight[0].nbytes for layer in expert_layers(model) for weight in layer.experts.parameters())
    routers = sum(layer.rows.nbytes for layer in expert_layers(model)) // 2
    assert bytes_read(model) - bytes_read(made) == expert + routers, "one expert a layer in place of two"


@pytest.mark.parametrize("family", CONFIGS)
def test_the_folder_is_loaded_by_transformers_and_drafts(family: str, tmp_path: Path) -> None:
    model = with_useless_experts(family)
    whole, out = saved(model, tmp_path / "whole"), tmp_path / "reduced"
    done = run(
        whole, "--task", task(tmp_path), "--keep", 3, "-n", 8, "--out", out, "--device", "cpu", "--dtype", "float32"
    )
    assert done.exit_code == 0, done.output
    assert "kept 0, 2, 5" in done.output
    assert "kept 1, 2, 4" in done.output
    auto: Any = AutoModelForCausalLM
    loaded, info = auto.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    text = texts(1)[0]
    torch.testing.assert_close(logits(loaded, text), logits(model, text))
    config = json.loads((out / "config.json").read_text())
    assert 3 in (config.get("num_experts"), config.get("num_local_experts"))
    with safe_open(out / "model.safetensors", "pt") as file:  # one tensor for every expert, as published mixtures have
        assert sum(".experts.2." in key for key in file.keys()) == 6  # noqa: SIM118
    import branchwise

    llm = branchwise.load(
        whole, draft_model=str(out), draft="model", tree="chain:4", verify="block", device="cpu", dtype="float32"
    )
    plain = llm.with_method("plain").generate("w5 w9", max_new_tokens=12, seed=1, ignore_eos=True)
    drafted = llm.generate("w5 w9", max_new_tokens=12, seed=1, ignore_eos=True)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.accepted_tokens > 6, "it draws what the whole model draws"


def test_a_dense_model_becomes_a_mixture_that_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What benchmarks reduce: as long as its experts are copies, it does not matter who answers."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    making = importlib.import_module("making")
    torch.manual_seed(0)
    dense = hf.LlamaForCausalLM(
        hf.LlamaConfig(**{key: SIZES[key] for key in list(SIZES)[:7]}, tie_word_embeddings=True)
    )
    made, text = making.upcycled(dense.eval(), experts=4, active=2, noise=0.0), texts(1)[0]
    torch.testing.assert_close(logits(made, text), logits(dense, text))
    assert check_mixture(made, "made") == 4
    apart = making.upcycled(dense, experts=4, active=2, noise=0.5)
    before = acceptance(dense, apart, texts())
    losses: list[float] = []
    making.tune(apart, dense, texts(), steps=12, rate=3e-3, balance=0.01, told=lambda step, loss: losses.append(loss))
    assert acceptance(dense, apart, texts()) > before, "it learns what its model finds probable"
    assert losses[-1] < losses[0]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "made"
    (tmp_path / ".made.killed.part").mkdir()

    def interrupted() -> None:
        with whole_folder(out, {}, 1) as folder:
            (folder / "half").write_text("written")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == [], "neither this one nor what another left"

    with pytest.raises(UsageError, match=r"No space left.*Nothing was left"), whole_folder(out, {}, 1) as folder:
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []

    monkeypatch.setattr("branchwise.train.folder.shutil.disk_usage", lambda place: type("usage", (), {"free": 10})())
    with pytest.raises(UsageError, match="make room"), whole_folder(out, {}, 11):
        pass
    assert list(tmp_path.iterdir()) == []
    with whole_folder(out, {"source": "x"}, 1) as folder:
        (folder / "part").write_text("abc")
    assert json.loads((out / "branchwise.json").read_text())["files"] == {"part": 3}
    with pytest.raises(UsageError, match="exists"), whole_folder(out, {}, 1):
        pass


def test_what_cannot_be_reduced_is_refused_with_a_sentence(tmp_path: Path) -> None:
    dense = hf.LlamaForCausalLM(hf.LlamaConfig(**{key: SIZES[key] for key in list(SIZES)[:7]}))
    with pytest.raises(UnsupportedModel, match="is dense"):
        check_mixture(dense, "llama")
    from tests.conformance.architectures import build, served

    deepseek = served()["deepseek-v3"]
    deepseek.update({"first_k_dense_replace": 0})
    with pytest.raises(UnsupportedModel, match="only those of mixtral"):
        check_mixture(build(deepseek), "deepseek")
    with pytest.raises(UsageError, match="at least 1 and at most the 6"):
        check_sizes(6, 2, 7, None)
    with pytest.raises(UsageError, match="--active must be at least 1 and at most 1"):
        check_sizes(6, 2, 1, 2)
    with pytest.raises(UsageError, match="at least two prompts"):
        split(texts(1))

    model = saved(dense, tmp_path / "dense")
    file = task(tmp_path)
    empty, blank = tmp_path / "empty.jsonl", tmp_path / "folder"
    empty.write_text("")
    blank.mkdir()
    (blank / "config.json").write_text("{}")
    ways = "--device", "cpu", "--out", tmp_path / "out"
    for said, words in {
        "is dense": (model, "--task", file),
        "no safetensors beside": (blank, "--task", file),
        "is empty": (model, "--task", empty),
        "auto, not 'some'": (model, "--task", file, "--keep", "some"),
        "Unknown way": (model, "--task", file, "--way", "burn"),
        "above 0 and at most 1": (model, "--task", file, "--least", 2),
    }.items():
        done = run(*words, *ways)
        assert done.exit_code != 0, said
        assert said in " ".join(f"{done.output} {done.exception}".split()), said
    assert not (tmp_path / "out").exists()
