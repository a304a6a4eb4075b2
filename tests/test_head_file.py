"""Files of heads: what was written is read, and nothing else is; a head serves the weights that it was trained for."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.backends.transformers.weights import weights_fingerprint
from branchwise.cli import main
from branchwise.draft import build_drafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.file import FORMAT, TrainedHead
from branchwise.draft.policies.stop import FORMAT as STOP
from branchwise.engine import Engine, Request
from branchwise.errors import ModelError
from branchwise.verify import VERIFIERS
from tests.heads import random_head
from tests.test_head_drafter import VOCABULARY, model_of, trained

REMEDY = "train one with: branchwise train head --model MODEL."


@pytest.fixture
def file(tmp_path: Path) -> Path:
    trained(TransformersTarget(model_of(), slots=1, context=64), "fspad").save(tmp_path / "head")
    return tmp_path / "head"


def test_a_head_is_read_as_it_was_written_up_to_int8(file: Path) -> None:
    head, again = trained(TransformersTarget(model_of(), slots=1, context=64), "fspad"), TrainedHead.load(file)
    assert again.head.config == head.head.config
    assert torch.equal(again.table, head.table)
    assert torch.equal(again.head.frequencies, head.head.frequencies)
    assert (again.target, again.weights) == (head.target, head.weights)
    for name, weight in head.head.state_dict().items():
        torch.testing.assert_close(again.head.state_dict()[name], weight, atol=float(weight.abs().max()) / 250, rtol=0)


def cut(whole: bytes) -> bytes:
    return whole[:-20]


def changed(whole: bytes) -> bytes:
    return whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]


def renamed(whole: bytes) -> bytes:
    """The same weights, said to be those of another model."""
    assert b"LlamaForCausalLM" in whole
    return whole.replace(b"LlamaForCausalLM", b"LlamaForCausalMM")


def newer(whole: bytes) -> bytes:
    return whole.replace(rb"{\"version\": 1,", rb"{\"version\": 2,")


WRONG = {
    "cut": (cut, "The head {} is damaged"),
    "changed": (changed, "The head {} is damaged (its contents are not those that were written)"),
    "renamed": (renamed, "The head {} is damaged (its contents are not those that were written)"),
    "newer": (newer, "The head {} is of a newer Branchwise"),
    "text": (lambda whole: b"no head at all", "The head {} is damaged"),
    "empty": (lambda whole: b"", "The head {} is damaged"),
    "half a header": (lambda whole: whole[:40], "The head {} is damaged"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_not_whole_is_refused_in_one_sentence(name: str, file: Path) -> None:
    change, sentence = WRONG[name]
    whole = file.read_bytes()
    file.write_bytes(change(whole))
    assert file.read_bytes() != whole
    with pytest.raises(ModelError) as refused:
        build_drafter(f"head:{file}")
    assert str(refused.value).startswith(sentence.format(file))
    assert str(refused.value).endswith(REMEDY)
    assert "\n" not in str(refused.value)


def test_a_file_of_another_kind_is_no_head(tmp_path: Path) -> None:
    STOP.write(tmp_path / "stop", {}, {"weight": torch.zeros(3)})
    save_file({"weight": torch.zeros(3)}, tmp_path / "weights")
    for name in ("stop", "weights"):
        with pytest.raises(ModelError, match=f"{name} is no head; train one with"):
            build_drafter(f"head:{tmp_path / name}")
    for name, why in (
        ("missing", "cannot be read: No such file or directory; train one with"),
        (".", "holds no config.json"),
    ):
        with pytest.raises(ModelError, match=why):
            build_drafter(f"head:{tmp_path / name}")


@pytest.mark.parametrize(
    "wrong", [{"config": {}}, {"config": {"gate": "none"}}, {"target": 7, "config": None}, {"other": 1}]
)
def test_a_description_that_is_none_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    """Whole and signed, by a program that writes other things."""
    FORMAT.write(tmp_path / "head", wrong, {"table": torch.arange(3), "frequencies": torch.ones(2)})
    with pytest.raises(ModelError, match="is damaged"):
        TrainedHead.load(tmp_path / "head")


def test_weights_of_another_form_are_refused(file: Path, tmp_path: Path) -> None:
    def parsed(known: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], Any]:
        return known, tensors

    known, tensors = FORMAT.read(file, parsed)
    known = json.loads(json.dumps(known))
    known["config"]["gate"] = "none"
    FORMAT.write(tmp_path / "other", known, tensors)
    with pytest.raises(ModelError, match="is damaged"):
        TrainedHead.load(tmp_path / "other")


def test_the_command_line_says_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "head").write_bytes(b"no head at all")
    monkeypatch.setattr(sys, "argv", ["branchwise", "generate", "Hi", "--head", str(tmp_path / "head")])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert told.err.startswith(f"branchwise: The head {tmp_path / 'head'} is damaged")
    assert told.err.count("\n") == 1


# The weights that a head is for


def tuned(model: LlamaForCausalLM, name: str) -> LlamaForCausalLM:
    """A copy of which one matrix was trained a little."""
    torch.manual_seed(5)
    other = copy.deepcopy(model)
    weight = other.get_parameter(name)
    weight.data *= 1 + 0.02 * torch.randn_like(weight)
    return other


def test_a_head_is_refused_by_other_weights_of_the_same_shape(file: Path) -> None:
    for other in (
        model_of(1),
        model_of(vocab_size=VOCABULARY + 1),
        tuned(model_of(), "model.layers.1.mlp.up_proj.weight"),
    ):
        target = TransformersTarget(other, slots=1, context=64)
        with pytest.raises(ModelError) as refused:
            Engine(target, build_drafter(f"head:{file}"), VERIFIERS.build("match"))
        assert str(refused.value) == (
            f"The head was trained for LlamaForCausalLM, and this LlamaForCausalLM has other weights; {REMEDY}"
        )


def test_every_matrix_counts() -> None:
    model = model_of()
    names = [name for name, weight in model.named_parameters() if weight.ndim == 2]
    found = {weights_fingerprint(tuned(model, name)) for name in names}
    assert len(found | {weights_fingerprint(model)}) == len(names) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_head_trained_in_bfloat16_serves_the_same_weights_in_any_precision(dtype: torch.dtype) -> None:
    low = model_of().to(torch.bfloat16)
    trained_for = TransformersTarget(low, slots=1, context=64, tokenizer=None)
    head = random_head(trained_for.info)
    target = TransformersTarget(copy.deepcopy(low).to(dtype), slots=1, context=64)
    assert target.info.weights == trained_for.info.weights
    drafter = HeadDrafter(head)
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    text = engine.submit(Request((1, 2, 3), max_new_tokens=6))
    while engine.busy:
        engine.step()
    assert len(text.token_ids) == 6
    assert drafter.head.join.weight.dtype == dtype
    assert torch.equal(drafter.head.frequencies, head.head.frequencies), "positions are turned by rounded frequencies"
    assert head.head.join.weight.dtype == torch.float32, "binding a head changed what its file says"


def test_weights_in_float32_are_the_same_in_bfloat16() -> None:
    assert weights_fingerprint(model_of()) == weights_fingerprint(model_of().to(torch.bfloat16))


def test_a_tokenizer_is_part_of_the_fingerprint_and_not_of_the_weights() -> None:
    class Spelling:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    plain, spelled = (
        TransformersTarget(model_of(), slots=1, context=64, tokenizer=one).info
        for one in (None, Spelling())  # type: ignore[arg-type]
    )
    assert plain.fingerprint != spelled.fingerprint
    assert plain.weights == spelled.weights
