"""Heads in the layout of vLLM's `speculators`: what a folder says is what is drafted, and what is written is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typer.testing import CliRunner

from branchwise.backends.toy import ToyTarget
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.cli import app
from branchwise.core.sampling import SamplingParams
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.base import Drafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.export import Verifier, export_speculators
from branchwise.draft.head.file import TrainedHead
from branchwise.draft.head.speculators import load_speculators
from branchwise.engine import Engine, Request
from branchwise.errors import BranchwiseError, ModelError, UnknownName, UsageError
from branchwise.train.head.run import FORMS, Sizes, blank_head
from branchwise.verify import VERIFIERS
from tests.test_head_drafter import TAPS, VOCABULARY, WIDTH, Watching, model_of, trained

LAYERS, PROPOSED, MLP, HEADS, KV_HEADS, HEAD_WIDTH = 8, 30, 20, 6, 2, 8
PROMPTS = [(1, 2, 3), (5, 9), tuple(range(20))]
EPSILON = 1e-3
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return model_of(num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def target(model: LlamaForCausalLM) -> TransformersTarget:
    return TransformersTarget(model, slots=3, context=128, max_nodes=32)


# A head as others would write it


def checkpoint(layer: dict[str, Any] | None = None, **settings: Any) -> tuple[dict[str, Any], Weights]:
    """The settings and the random weights of a head, by the layout's own names."""
    torch.manual_seed(2)
    layer = {
        "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_WIDTH,
        "vocab_size": VOCABULARY, "rms_norm_eps": EPSILON, "rope_theta": 500.0,
    } | (layer or {})  # fmt: skip
    verifier = {"name_or_path": "org/verifier", "architectures": ["LlamaForCausalLM"]}
    config: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.7.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": verifier}, "transformer_layer_config": layer,
        "draft_vocab_size": PROPOSED, "norm_before_residual": False,
    } | settings  # fmt: skip
    width, read = layer["hidden_size"], settings.get("target_hidden_size", WIDTH)
    taps = len(settings.get("eagle_aux_hidden_state_layer_ids", "123"))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, taps * read),
        "norm.weight": (width,),
        "lm_head.weight": (config["draft_vocab_size"], width),
        "layers.0.hidden_norm.weight": (width,),
    }
    if settings.get("norm_before_fc"):
        shapes["input_norm.weight"] = (taps * read,)
    if settings.get("fc_norm"):
        shapes |= {f"fc_norm.{number}.weight": (read,) for number in range(taps)}
    for number in range(layer["num_hidden_layers"]):
        inputs = 2 * width if number == 0 else width
        place = f"layers.{number}."
        outputs = {"q": HEADS * HEAD_WIDTH, "k": KV_HEADS * HEAD_WIDTH, "v": KV_HEADS * HEAD_WIDTH}
        shapes |= {f"{place}self_attn.{part}_proj.weight": (rows, inputs) for part, rows in outputs.items()}
        shapes |= {
            f"{place}self_attn.o_proj.weight": (width, HEADS * HEAD_WIDTH),
            f"{place}mlp.gate_proj.weight": (MLP, width),
            f"{place}mlp.up_proj.weight": (MLP, width),
            f"{place}mlp.down_proj.weight": (width, MLP),
            f"{place}input_layernorm.weight": (width,),
            f"{place}post_attention_layernorm.weight": (width,),
        }
        if layer["model_type"] == "qwen3":
            shapes |= {f"{place}self_attn.{part}_norm.weight": (HEAD_WIDTH,) for part in "qk"}
        if layer.get("attention_bias"):
            shapes |= {f"{place}self_attn.{part}_proj.bias": (rows,) for part, rows in outputs.items()}
            shapes[f"{place}self_attn.o_proj.bias"] = (width,)
    weights = {name: 0.3 * torch.randn(shape) + (len(shape) == 1) for name, shape in shapes.items()}
    if config["draft_vocab_size"] < VOCABULARY:
        tokens = torch.randperm(VOCABULARY)[: config["draft_vocab_size"]].sort().values
        weights["d2t"] = tokens - torch.arange(len(tokens))
        weights["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, tokens, True)
    return config, weights


def written(folder: Path, config: dict[str, Any], weights: Weights) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


# The forward pass of EAGLE-3, from the layout's description alone


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPSILON).sqrt() * weight


def turned(x: Tensor, positions: Tensor, frequencies: Tensor, scale: float) -> Tensor:
    """(rows, heads, width): both halves of every head turned by its position."""
    angles = positions[:, None, None] * frequencies
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def decoder(
    number: int, config: dict[str, Any], weights: Weights, state: Tensor, embedded: Tensor, turn: Callable[..., Tensor]
) -> Tensor:
    """One layer over all rows at once; every row sees itself and those before."""

    def weight(name: str) -> Tensor:
        return weights[f"layers.{number}.{name}"]

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weight(f"{name}.weight").T + weights.get(f"layers.{number}.{name}.bias", torch.zeros(()))

    residual = state
    if number == 0:
        hidden = normed(state, weight("hidden_norm.weight"))
        residual = hidden if config["norm_before_residual"] else state
        read = torch.cat([normed(embedded, weight("input_layernorm.weight")), hidden], dim=-1)
    else:
        read = normed(state, weight("input_layernorm.weight"))
    rows = len(state)
    q, k, v = (linear(f"self_attn.{part}_proj", read).view(rows, -1, HEAD_WIDTH) for part in "qkv")
    if f"layers.{number}.self_attn.q_norm.weight" in weights:
        q, k = normed(q, weight("self_attn.q_norm.weight")), normed(k, weight("self_attn.k_norm.weight"))
    q, k = turn(q), turn(k)
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_WIDTH**0.5
    scores = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), -torch.inf)
    found = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(rows, -1)
    state = residual + linear("self_attn.o_proj", found)
    read = normed(state, weight("post_attention_layernorm.weight"))
    gate, up = linear("mlp.gate_proj", read), linear("mlp.up_proj", read)
    return state + linear("mlp.down_proj", gate * gate.sigmoid() * up)


def reference(
    config: dict[str, Any],
    weights: Weights,
    embeddings: Tensor,
    hidden: list[Tensor],
    text: tuple[int, ...],
    drafted: tuple[int, ...],
    frequencies: Tensor,
    scale: float,
) -> Tensor:
    """(draft vocabulary,): the logits after a text and drafted tokens, fed one after another.

    `hidden` are the tapped states (tokens, width) of the text without its last token.
    """
    if config.get("fc_norm"):
        hidden = [normed(state, weights[f"fc_norm.{number}.weight"]) for number, state in enumerate(hidden)]
    taps = torch.cat(hidden, dim=-1)
    if config.get("norm_before_fc"):
        taps = normed(taps, weights["input_norm.weight"])
    features, tokens = taps @ weights["fc.weight"].T, list(text[1:])
    for token in (*drafted, None):
        positions = 1 + torch.arange(len(tokens))  # counted as the token's own: only distances matter
        state = features
        for number in range(config["transformer_layer_config"]["num_hidden_layers"]):
            turn = lambda x, at=positions: turned(x, at, frequencies, scale)  # noqa: E731
            state = decoder(number, config, weights, state, embeddings[tokens], turn)
        final = normed(state, weights["norm.weight"])
        if token is not None:
            carried = final if config.get("norm_output") else state
            features, tokens = torch.cat([features, carried[-1:]]), [*tokens, token]
    return final[-1] @ weights["lm_head.weight"].T


def generated(target: TransformersTarget, drafter: Drafter, length: int = 8) -> list[list[int]]:
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    texts = [engine.submit(Request(prompt, SamplingParams(), max_new_tokens=length)) for prompt in PROMPTS]
    while engine.busy:
        engine.step()
    return [text.token_ids for text in texts]


SPREAD = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 100.0, "original_max_position_embeddings": 64}
STRETCHED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "residual": ({}, {"norm_before_residual": True}),
    "fc norm": ({}, {"fc_norm": True, "norm_output": True}),
    "joined norm": ({}, {"norm_before_fc": True, "norm_before_residual": True}),
    "taps": ({}, {"eagle_aux_hidden_state_layer_ids": [7, 1, 3, 4]}),
    "qwen3": ({"model_type": "qwen3", "attention_bias": True}, {"draft_vocab_size": VOCABULARY}),
    "two layers": ({"num_hidden_layers": 2, "rope_scaling": STRETCHED, "max_position_embeddings": 256}, {}),
    "narrow": ({"hidden_size": 12, "rope_parameters": SPREAD}, {"target_hidden_size": WIDTH}),
    "qwen3 with yarn": ({"model_type": "qwen3", "rope_parameters": SPREAD}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*rope.*")
@torch.no_grad()
def test_a_folder_drafts_what_the_layout_says(
    kind: str, model: LlamaForCausalLM, target: TransformersTarget, tmp_path: Path
) -> None:
    """Roots and levels below, which feed on what rows above carried."""
    layer, settings = KINDS[kind]
    config, weights = checkpoint(layer, **settings)
    embeddings = model.model.embed_tokens.weight
    if kind in ("narrow", "fc norm"):
        embeddings = weights["embed_tokens.weight"] = torch.randn(
            VOCABULARY, config["transformer_layer_config"]["hidden_size"]
        )
    drafter = Watching(str(written(tmp_path, config, weights)), tree=build_policy("topk:7,depth=3,width=2"))
    generated(target, drafter)
    known = {name: value for name, value in config["transformer_layer_config"].items() if name != "model_type"}
    rope = AutoConfig.for_model("llama", **known).rope_parameters
    frequencies, scale = 500.0 ** -(torch.arange(4) / 4), 1.0
    if rope["rope_type"] != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](AutoConfig.for_model("llama", **known), "cpu")
    assert (scale != 1.0) == (rope["rope_type"] == "yarn")
    inputs = sorted(settings.get("eagle_aux_hidden_state_layer_ids", [2, LAYERS // 2, LAYERS - 3]))
    offsets = weights.get("d2t", torch.zeros(VOCABULARY, dtype=torch.long))
    tokens = torch.arange(len(offsets)) + offsets
    depths = set()
    for text, path, probs, extra in drafter.seen[::4]:
        depths.add(len(path))
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        hidden = [states[number][0] for number in inputs]
        logits = reference(config, weights, embeddings, hidden, text, path, frequencies, scale)
        wanted = torch.zeros(VOCABULARY).index_put_((tokens,), logits.softmax(0))
        torch.testing.assert_close(probs, wanted, atol=2e-5, rtol=1e-3)
        assert not len(extra), "tokens without output rows of the head were proposed"
    assert depths == {0, 1, 2}


@torch.no_grad()
def test_the_layout_of_the_authors_is_the_same_head(target: TransformersTarget, tmp_path: Path) -> None:
    config, weights = checkpoint()
    config.pop("norm_before_residual")
    flat = config["transformer_layer_config"] | {
        "draft_vocab_size": PROPOSED,
        "architectures": ["LlamaForCausalLMEagle3"],
    }
    renamed = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
    flat["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "use_aux_hidden_state": True}
    one = load_speculators(written(tmp_path / "flat", flat, renamed))
    two = load_speculators(written(tmp_path / "nested", config | {"norm_before_residual": False}, weights))
    assert one.taps(target.info) == two.taps(target.info)
    assert one.head.config.norm_before_residual is False
    for (name, weight), other in zip(one.head.state_dict().items(), two.head.state_dict().values(), strict=True):
        assert torch.equal(weight, other), name


def test_a_head_without_settings_is_read_as_by_vllm(tmp_path: Path) -> None:
    config, weights = checkpoint()
    del config["norm_before_residual"]
    assert load_speculators(written(tmp_path, config, weights)).head.config.norm_before_residual


def test_texts_are_those_of_the_target(target: TransformersTarget, tmp_path: Path) -> None:
    """With trees that are laid on the device."""
    config, weights = checkpoint()
    folder = written(tmp_path, config, weights)
    plain = generated(target, build_drafter("none"), 16)
    for tree in ("topk:8,depth=3,width=3", "ranks:mcsd"):
        drafter = HeadDrafter(str(folder), tree=build_policy(tree))
        assert generated(target, drafter, 16) == plain
        assert drafter._ahead is not None
        assert torch.equal(drafter._ahead._draft._rows, weights["lm_head.weight"])


# Writing


def exportable(model: LlamaForCausalLM, target: TransformersTarget, form: str) -> TrainedHead:
    torch.manual_seed(3)
    head = blank_head(model, target.info, Sizes(mlp=MLP, **FORMS[form]))
    for weight in head.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.3)
    table = torch.randperm(VOCABULARY)[:PROPOSED]
    return TrainedHead(head.eval().requires_grad_(False), table, target.info.name, target.info.weights)


@pytest.mark.parametrize("form", ["speculators", "eagle"])
def test_what_is_exported_drafts_as_before(
    form: str, model: LlamaForCausalLM, target: TransformersTarget, tmp_path: Path
) -> None:
    head = exportable(model, target, form)
    export_speculators(head, tmp_path / "out", target.info, Verifier("org/model", ("LlamaForCausalLM",), 256))
    tree = build_policy("topk:7,depth=3,width=2")
    before, after = Watching(head, tree=tree), Watching(str(tmp_path / "out"), tree=tree)
    assert generated(target, before) == generated(target, after)
    assert len(before.seen) == len(after.seen) > 30
    for (text, path, probs, extra), (same_text, same_path, same, same_extra) in zip(
        before.seen, after.seen, strict=True
    ):
        assert (text, path) == (same_text, same_path)
        assert sorted(extra.tolist()) == sorted(same_extra.tolist())
        torch.testing.assert_close(same, probs, atol=1e-5, rtol=1e-3)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    inputs = {"speculators": [2, 4, 5], "eagle": [1, 4, 7, 8]}[form]
    assert config["eagle_aux_hidden_state_layer_ids"] == inputs
    assert config["transformer_layer_config"].get("num_aux_hidden_states", 3) == len(inputs)
    assert config["fc_norm"] == (form == "eagle")
    assert config["transformer_layer_config"]["rope_theta"] == 10_000.0
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/model",
        "architectures": ["LlamaForCausalLM"],
    }


def test_the_maps_between_vocabularies(model: LlamaForCausalLM, target: TransformersTarget, tmp_path: Path) -> None:
    head = exportable(model, target, "speculators")
    export_speculators(head, tmp_path / "some", target.info, Verifier("org/model"))
    stored = load_file(tmp_path / "some" / "model.safetensors")
    tokens = torch.arange(PROPOSED) + stored["d2t"]
    assert tokens.tolist() == sorted(head.table.tolist())
    assert stored["t2d"].nonzero().flatten().tolist() == tokens.tolist()
    assert torch.equal(stored["lm_head.weight"], model.lm_head.weight[tokens])
    assert "embed_tokens.weight" not in stored
    whole = TrainedHead(head.head, torch.randperm(VOCABULARY), head.target, head.weights)
    export_speculators(whole, tmp_path / "all", target.info, Verifier("org/model"))
    assert not {"d2t", "t2d"} & load_file(tmp_path / "all" / "model.safetensors").keys()
    assert load_speculators(tmp_path / "all").table.tolist() == list(range(VOCABULARY))


@pytest.mark.parametrize(
    ("form", "option"), [("carry", "carry"), ("fspad-gate", "gate"), ("parallelspec", "masks"), ("two-layers", "carry")]
)
def test_a_form_that_the_layout_cannot_say_is_refused(
    form: str, option: str, model: LlamaForCausalLM, target: TransformersTarget, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=rf"has {option}.*train head --form speculators"):
        export_speculators(exportable(model, target, form), tmp_path / "out", target.info, Verifier("org/model"))
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported_says_why(model: LlamaForCausalLM, target: TransformersTarget, tmp_path: Path) -> None:
    head, verifier = exportable(model, target, "speculators"), Verifier("org/model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("Dear neighbour,")
    with pytest.raises(UsageError, match="exists"):
        export_speculators(head, tmp_path / "full", target.info, verifier)
    head.head.frequencies[1] *= 2
    with pytest.raises(UsageError, match="rotary positions"):
        export_speculators(head, tmp_path / "out", target.info, verifier)
    other = TransformersTarget(model_of(vocab_size=VOCABULARY + 1), slots=1, context=64)
    with pytest.raises(ModelError, match="was trained for"):
        export_speculators(head, tmp_path / "out", other.info, verifier)
    with pytest.raises(UsageError, match="already"):
        export_speculators(
            load_speculators(written(tmp_path / "in", *checkpoint())), tmp_path / "out", target.info, verifier
        )


# Refusals


@pytest.mark.parametrize(
    ("layer", "settings", "match"),
    [
        ({"hidden_size": 12}, {"target_hidden_size": 12}, f"org/verifier.*12 numbers.*which has {WIDTH}"),
        ({"vocab_size": VOCABULARY + 1}, {}, f"org/verifier.*{VOCABULARY + 1} tokens.*which has {VOCABULARY}"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, f"org/verifier.*2, 4, 9.*{LAYERS} layers"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [0, 4, 5]}, f"org/verifier.*0, 4, 5.*{LAYERS} layers"),
    ],
)
def test_a_target_of_other_sizes_is_refused(
    layer: dict[str, Any], settings: dict[str, Any], match: str, target: TransformersTarget, tmp_path: Path
) -> None:
    config, weights = checkpoint(layer, **settings)
    if "t2d" in weights:
        weights["t2d"] = torch.nn.functional.pad(
            weights["t2d"], (0, config["transformer_layer_config"]["vocab_size"] - VOCABULARY)
        )
    weights["embed_tokens.weight"] = torch.randn(
        config["transformer_layer_config"]["vocab_size"], layer.get("hidden_size", WIDTH)
    )
    drafter = HeadDrafter(str(written(tmp_path, config, weights)))
    with pytest.raises(ModelError, match=match) as found:
        drafter.bind(target.info)
    assert target.info.name in str(found.value)


def test_a_target_with_too_few_layers_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, *checkpoint())
    few = TransformersTarget(model_of(num_hidden_layers=4), slots=1, context=64)
    with pytest.raises(ModelError, match=r"n/2, n-3; it cannot draft for .* 4 layers"):
        HeadDrafter(str(folder)).bind(few.info)
    with pytest.raises(ModelError, match="cannot draft for"):
        HeadDrafter(str(folder)).bind(ToyTarget(VOCABULARY).info)


def test_a_share_of_unordered_tokens_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, *checkpoint())
    with pytest.raises(UsageError, match="leave out table=8"):
        build_drafter(f"head:{folder},table=8")


def _layer(**changes: Any) -> Callable[[dict[str, Any], Weights], None]:
    return lambda config, weights: config["transformer_layer_config"].update(changes)


def _config(**changes: Any) -> Callable[[dict[str, Any], Weights], None]:
    return lambda config, weights: config.update(changes)


def _weight(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any], Weights], None]:
    return lambda config, weights: weights.update({name: change(weights[name])})


DAMAGE: dict[str, tuple[Callable[[dict[str, Any], Weights], Any], str]] = {
    "another kind": (_config(speculators_model_type="dflash"), "dflash"),
    "another family": (_layer(model_type="gemma2"), "gemma2"),
    "a window": (_layer(layer_types=["sliding_attention"]), "sliding"),
    "biases in the mlp": (_layer(mlp_bias=True), "biases"),
    "another activation": (_layer(hidden_act="gelu"), "gelu"),
    "scaled logits": (_layer(logit_scale=2.0), "scaled"),
    "moving positions": (_layer(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "dynamic"),
    "turned in part": (_layer(partial_rotary_factor=0.5), "part"),
    "turned in half": (_layer(rope_parameters=SPREAD | {"partial_rotary_factor": 0.5}), "part"),
    "no layer": (lambda config, weights: config.pop("transformer_layer_config"), "damaged"),
    "a layer of text": (_config(transformer_layer_config="llama"), "damaged"),
    "a width of text": (_layer(hidden_size="wide"), "damaged"),
    "no heads": (_layer(num_attention_heads=0), "damaged"),
    "uneven heads": (_layer(num_key_value_heads=4), "4 keys"),
    "both norms": (_config(fc_norm=True, norm_before_fc=True), "damaged"),
    "more layers": (_layer(num_hidden_layers=2), "has no layers.1"),
    "fewer taps": (_config(eagle_aux_hidden_state_layer_ids=[2, 4]), r"fc.weight is \(24, 72\).*\(24, 48\)"),
    "taps of text": (_config(eagle_aux_hidden_state_layer_ids=["a"]), "damaged"),
    "another width": (_layer(hidden_size=48), "config.json asks for"),
    "no weight": (lambda config, weights: weights.pop("layers.0.mlp.up_proj.weight"), "has no layers.0.mlp.up_proj"),
    "a weight too many": (lambda config, weights: weights.update({"fc.weight_scale": torch.ones(3)}), "weight_scale"),
    "a cut weight": (_weight("layers.0.self_attn.k_proj.weight", lambda weight: weight[1:].clone()), "asks for"),
    "no number": (_weight("norm.weight", lambda weight: weight * torch.nan), "no number"),
    "whole numbers": (_weight("fc.weight", lambda weight: weight.to(torch.int8)), "no number"),
    "no map": (lambda config, weights: weights.pop("d2t"), "no d2t"),
    "a short map": (_weight("d2t", lambda offsets: offsets[1:].clone()), "d2t"),
    "moved tokens": (_weight("d2t", lambda offsets: offsets - offsets), "contradict"),
    "a token twice": (lambda config, weights: (weights["d2t"].sub_(torch.arange(PROPOSED)), weights.pop("t2d")), "d2t"),
    "no such token": (_weight("d2t", lambda offsets: offsets + VOCABULARY), "d2t"),
    "another map": (_weight("t2d", lambda listed: ~listed), "contradict"),
    "fewer rows": (_config(draft_vocab_size=8), "lm_head.weight"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.filterwarnings("ignore:.*rope.*")
def test_a_folder_that_cannot_draft_is_refused(kind: str, tmp_path: Path) -> None:
    config, weights = checkpoint()
    change, match = DAMAGE[kind]
    change(config, weights)
    with pytest.raises(ModelError, match=match):
        build_drafter(f"head:{written(tmp_path, config, weights)}")


def test_files_that_are_no_head_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        load_speculators(tmp_path)
    folder = written(tmp_path, *checkpoint())
    whole = (folder / "model.safetensors").read_bytes()
    for damaged in (whole[:-20], b"", b"no weights at all"):
        (folder / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ModelError, match="damaged"):
            load_speculators(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no safetensors"):
        load_speculators(folder)
    (folder / "model.safetensors").write_bytes(whole)
    for text in ("{", "[]", "\x00", '{"model_type": "llama", "hidden_size": 24}'):
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelError, match="damaged"):
            load_speculators(folder)
    written(folder, {"model_type": "llama"}, {"model.embed_tokens.weight": torch.zeros(2, 2)})
    with pytest.raises(ModelError, match="no EAGLE-3 head"):
        load_speculators(folder)


# The command


def export(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["train", "export", *arguments])


def test_the_command_writes_a_folder(
    model: LlamaForCausalLM, target: TransformersTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def load(model_name: str = "", **options: Any) -> SimpleNamespace:
        loaded.append(options["model"])
        return SimpleNamespace(
            name="tiny", model=model, conversion=None, engine=SimpleNamespace(target=target, pipelined=False)
        )

    monkeypatch.setattr("branchwise.llm.load", load)
    file, out = tmp_path / "tiny.head", tmp_path / "tiny-eagle3"
    exportable(model, target, "speculators").save(file)
    said = export("--format", "speculators", str(file), "--model", "org/tiny", "--out", str(out), "--json")
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout) == {
        "folder": str(out), "format": "speculators", "verifier": "org/tiny", "tokens": PROPOSED,
    }  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    assert config["transformer_layer_config"]["max_position_embeddings"] == 256
    HeadDrafter(str(out)).bind(target.info)
    assert loaded == ["org/tiny"]

    trained(target, "fspad").save(tmp_path / "fspad.head")
    for arguments, error in (
        ([str(tmp_path / "fspad.head"), "--out", str(tmp_path / "new")], UsageError),
        ([str(file), "--out", str(out)], UsageError),
        ([str(out), "--out", str(tmp_path / "new")], UsageError),
        ([str(tmp_path / "none.head")], ModelError),
        ([str(file), "--format", "gguf"], UnknownName),
    ):
        wrong = export(*arguments)
        assert isinstance(wrong.exception, error)
        assert issubclass(error, BranchwiseError)
    assert loaded == ["org/tiny"], "a model was loaded in vain"


def test_the_form_for_export_is_one_of_the_forms(target: TransformersTarget, model: LlamaForCausalLM) -> None:
    head = exportable(model, target, "speculators").head
    assert head.config.taps == ("model.layers.1", "model.layers.3", "model.layers.4")
    assert head.config.tap_norms == "none"
    small = TransformersTarget(model_of(), slots=1, context=64)
    assert blank_head(model_of(), small.info, Sizes(mlp=8, **FORMS["speculators"])).config.taps[-1] == TAPS[-1]
