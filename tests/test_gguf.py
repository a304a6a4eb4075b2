"""GGUF files: the weights and the tokenizer come out as they went in, and what cannot be read is refused."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import random
import shutil
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from branchwise import models
from branchwise.errors import ModelError, UnsupportedModel
from branchwise.models import convert
from branchwise.models.gguf import _SPLITS, _byte_level, read_header
from tests.tiny_gguf import (
    TOKENS,
    WIDTH,
    cache_fixture,  # noqa: F401
    leftovers,
    load,
    refusal,
    tiny_fixture,  # noqa: F401
    tiny_folder_fixture,  # noqa: F401
    tiny_llama,
    write_gguf,
)

# ------------------------------------------------------------------------------------------------------------
# What is read


def test_converted_weights_are_exactly_those_of_the_file(
    tiny: tuple[Path, dict[str, torch.Tensor]], tiny_folder: Path
) -> None:
    model, _ = load(tiny_folder)
    state = model.state_dict()
    assert state.keys() == tiny[1].keys()
    for name, weight in tiny[1].items():
        assert torch.equal(state[name], weight), name


def test_converted_model_computes_what_the_original_does(tiny_folder: Path) -> None:
    model, _ = load(tiny_folder)
    ids = torch.arange(20)[None]
    original = tiny_llama().eval()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, original(ids).logits)


def test_quantised_weights_become_what_gguf_says(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(48, WIDTH)).astype(np.float32)
    blocks = gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    write_gguf(tmp_path / "q.gguf", q8_0={"blk.1.ffn_up.weight": blocks})
    model, _ = load(tmp_path / "q.gguf")
    converted = model.model.layers[1].mlp.up_proj.weight.numpy()
    assert np.array_equal(converted, gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
    assert not np.array_equal(converted, weight)


def test_a_file_is_parsed_once_and_afterwards_everybody_reads_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed, own = [], gguf.GGUFReader.__init__

    def init(self: gguf.GGUFReader, path: str, *given: str) -> None:
        parsed.append(str(path))
        own(self, path, *given)

    monkeypatch.setattr(gguf.GGUFReader, "__init__", init)
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    write_gguf(tmp_path / "x.gguf")
    load(tmp_path / "x.gguf")
    assert parsed == [str(tmp_path / "x.gguf")]
    write_gguf(tmp_path / "y.gguf", extra={"blk.9.nonsense.weight": np.ones((2, 2), dtype=np.float32)})
    with pytest.raises(ModelError, match="parameters"):
        load(tmp_path / "y.gguf")
    assert before == (gguf.GGUFReader, gguf.get_tensor_name_map)


def test_tokenizer_of_a_gguf_keeps_text_and_special_tokens(tiny_folder: Path) -> None:
    model, tokenizer = load(tiny_folder)
    for text in ("hi  12\n\n\tx = 'é🙂世'  ", "<|im_start|>user\nhi<|im_end|>", "<tool>", " "):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("<|im_start|>hi<|im_end|>")["input_ids"] == [1, TOKENS.index("hi"), 2]
    assert tokenizer("<tool>")["input_ids"] == [TOKENS.index("<tool>")]
    assert tokenizer.decode([1, TOKENS.index("hi"), 2], skip_special_tokens=True) == "hi"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 128
    message = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert model.generation_config.eos_token_id == [2, 0]  # <|im_end|> as stated, <|endoftext|> by its name


@pytest.mark.parametrize(("pre", "split"), [("smollm", True), ("gpt-2", False), ("llama-bpe", False)])
def test_numbers_are_split_as_the_vocabulary_was_trained(pre: str, split: bool) -> None:
    backend = _byte_level(
        {
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.token_type": [3] * 3 + [1] * 258 + [4],
            "tokenizer.ggml.merges": ["1 2", "h i"],
        },
        _SPLITS[pre],
    )
    assert (backend.encode("12").tokens == ["1", "2"]) is split


def test_beginning_of_text_is_added_only_where_the_file_says_so(tmp_path: Path, tiny_folder: Path) -> None:
    assert load(tiny_folder)[1]("hi")["input_ids"] == [TOKENS.index("hi")]
    path = tmp_path / "bos.gguf"
    write_gguf(path, metadata={"tokenizer.ggml.add_bos_token": True})
    assert load(path)[1]("hi")["input_ids"] == [1, TOKENS.index("hi")]


def test_sentencepiece_tokenizer_comes_with_its_special_tokens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", pre="sentencepiece")
    tokenizer = load(tmp_path / "x.gguf")[1]
    assert tokenizer("h h")["input_ids"] == [1, 261, 261]
    assert tokenizer.decode([261, 261, 3 + 0x0A, 3 + 0xC3, 3 + 0xA9, 2], skip_special_tokens=True) == "h h\né"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "</s>")


def test_a_file_of_the_same_name_in_the_working_directory_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "x.gguf").write_bytes(b"another file")
    weights = write_gguf(tmp_path / "x.gguf")
    assert torch.equal(load(tmp_path / "x.gguf")[0].lm_head.weight, weights["lm_head.weight"])


def test_llama3_frequencies_survive(tmp_path: Path) -> None:
    """transformers drops the tensor that holds them; the settings it was made from must come back."""
    theta = 500000.0
    turns = 8192 / (2 * np.pi * theta ** (np.arange(4) / 4))
    smooth = np.clip((turns - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    assert factors[0] == 1
    assert factors[-1] == 8
    write_gguf(tmp_path / "x.gguf", theta=theta, extra={"rope_freqs.weight": factors})
    model, _ = load(tmp_path / "x.gguf")
    plain = 1 / theta ** (torch.arange(4) / 4)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, plain / torch.from_numpy(factors))


def test_frequencies_of_another_kind_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", extra={"rope_freqs.weight": np.arange(1, 5, dtype=np.float32)})
    assert "not Llama 3's" in refusal(tmp_path / "x.gguf", UnsupportedModel)


# ------------------------------------------------------------------------------------------------------------
# What is refused


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, cache: Path) -> None:
    for content in (b"", b"GGU", os.urandom(1000)):
        (tmp_path / "x.gguf").write_bytes(content)
        assert "is not a GGUF file" in refusal(tmp_path / "x.gguf")
    assert leftovers(cache) == []


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.2, 0.9, 0.9999])
def test_truncated_gguf_is_refused(share: float, tiny: tuple[Path, Any], tmp_path: Path, cache: Path) -> None:
    whole = tiny[0].read_bytes()
    (tmp_path / "x.gguf").write_bytes(whole[: max(5, int(len(whole) * share))])
    assert "is truncated" in refusal(tmp_path / "x.gguf")
    assert leftovers(cache) == []


def test_flipped_bytes_in_a_header_are_never_a_crash(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    whole, chance = tiny[0].read_bytes(), random.Random(0)
    path = tmp_path / "x.gguf"
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(4, 6000)] = chance.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(ModelError):
            read_header(path)


def test_unknown_gguf_version_is_refused(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    whole = bytearray(tiny[0].read_bytes())
    whole[4:8] = struct.pack("<I", 9)
    (tmp_path / "x.gguf").write_bytes(whole)
    assert "is GGUF version 9" in refusal(tmp_path / "x.gguf")


def test_unreadable_architecture_is_named_with_the_readable_ones(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", architecture="rwkv7")
    message = refusal(tmp_path / "x.gguf", UnsupportedModel)
    assert "'rwkv7'" in message
    assert "qwen2" in message
    assert "general" not in message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pre": "homemade"}, "the splitting rule 'homemade'"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "scales its positions (yarn)"),
        ({"extra": {"blk.0.novelty.weight": np.zeros(3, dtype=np.float32)}}, "places for"),
        ({"drop": "blk.1.ffn_up.weight"}, "places for"),
        ({"drop": "output_norm.weight", "extra": {"x.weight": np.zeros(WIDTH, dtype=np.float32)}}, "places for"),
    ],
    ids=["tokenizer", "rope", "tensor-too-many", "tensor-too-few", "tensor-renamed"],
)
def test_what_transformers_would_drop_in_silence_is_refused(
    options: dict[str, Any], said: str, tmp_path: Path, cache: Path
) -> None:
    write_gguf(tmp_path / "x.gguf", **options)
    assert said in refusal(tmp_path / "x.gguf", UnsupportedModel)
    assert leftovers(cache) == ["digests.json"]


def test_one_part_of_a_split_gguf_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", metadata={"split.count": 3})
    assert "one of 3 parts" in refusal(tmp_path / "x.gguf")


def test_missing_package_prints_the_install_line(tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert 'gguf and accelerate. Install with "pip install gguf accelerate"' in refusal(tiny[0])


# ------------------------------------------------------------------------------------------------------------
# The converted copy: all or nothing, made once


def test_second_resolve_neither_converts_nor_hashes(tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first = models.resolve(str(tiny[0]))

    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(convert, "_write_safetensors", never)
    monkeypatch.setattr(hashlib, "file_digest", never)
    assert models.resolve(str(tiny[0])) == first


def test_a_changed_file_is_converted_anew(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(tiny[0], path)
    first = models.resolve(str(path))
    write_gguf(path, metadata={"general.name": "another"})
    assert models.resolve(str(path)) != first


def test_damaged_converted_copy_says_which_folder_to_delete(tiny: tuple[Path, Any]) -> None:
    folder = models.resolve(str(tiny[0]))
    assert isinstance(folder, Path)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    assert f"The converted copy {folder} is damaged (model.safetensors)" in refusal(tiny[0])
    weights.write_bytes(b"\xff" * len(content))
    assert f"The converted copy {folder} is damaged. Delete that folder" in refusal(tiny[0])
    shutil.rmtree(folder)
    load(tiny[0])


def test_disk_that_fills_up_while_writing_leaves_nothing(
    tiny: tuple[Path, Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    assert "No space left on device" in refusal(tiny[0])
    assert leftovers(cache) == ["digests.json"]


def test_interrupted_conversion_leaves_nothing(
    tiny: tuple[Path, Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, header: object, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "_write_safetensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.resolve(str(tiny[0]))
    assert leftovers(cache) == ["digests.json"]
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


def test_two_processes_converting_at_once_both_succeed(tiny: tuple[Path, Any], cache: Path) -> None:
    code = textwrap.dedent(f"""
        from branchwise import models
        from branchwise.models import convert

        write = convert._write_safetensors

        def announced(*args):
            print("converting", flush=True)
            write(*args)

        convert._write_safetensors = announced
        print(models.resolve({str(tiny[0])!r}))
    """)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "converting\n"
        ours = models.resolve(str(tiny[0]))
        theirs = other.communicate(timeout=120)[0].strip()
    assert other.returncode == 0
    assert [str(ours), theirs] == [str(path) for path in (cache / "converted").iterdir()] * 2
    assert not list(cache.glob("tmp-*"))


def test_a_copy_that_appears_meanwhile_is_taken(
    tiny: tuple[Path, Any], tiny_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(path: Path, header: object, folder: Path) -> None:
        shutil.copytree(tiny_folder, folder)
        shutil.copytree(tiny_folder, cache / "converted" / tiny_folder.name)

    monkeypatch.setattr(convert, "_write_safetensors", overtaken)
    assert models.resolve(str(tiny[0])) == cache / "converted" / tiny_folder.name
    assert not list(cache.glob("tmp-*"))
