"""A tiny Llama with a byte-level vocabulary, as a GGUF file and as its converted copy; each test has its own cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from branchwise import models
from branchwise.errors import BranchwiseError, ModelError

HEADS, KV_HEADS, WIDTH, LAYERS = 4, 2, 32, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def byte_alphabet() -> list[str]:
    """The 256 characters in which a byte-level vocabulary spells bytes, in the order of the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte if byte in printable else next(rest)) for byte in range(256)]


TOKENS = [*SPECIAL, *byte_alphabet(), "12", "hi", "<tool>"]


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENS),
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=128,
            tie_word_embeddings=False,
        )
    )


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    q8_0: dict[str, np.ndarray[Any, Any]] | None = None,
    drop: str | None = None,
    theta: float = 10000.0,
) -> dict[str, torch.Tensor]:
    """A tiny Llama as llama.cpp's converter writes it; returns the weights it was made from."""
    state = tiny_llama().state_dict()
    out = gguf.GGUFWriter(path, architecture)
    out.add_context_length(128)
    out.add_embedding_length(WIDTH)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(48)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_dimension_count(WIDTH // HEADS)
    out.add_rope_freq_base(theta)
    out.add_vocab_size(len(TOKENS))
    if pre == "sentencepiece":
        out.add_tokenizer_model("llama")
        out.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "▁h"])
        out.add_token_scores([0.0] * 259 + [-3.0, -2.0, -1.0])
        out.add_token_types([2, 3, 3] + [6] * 256 + [1] * 3)
    else:
        out.add_tokenizer_model("gpt2")
        out.add_tokenizer_pre(pre)
        out.add_token_list(TOKENS)
        out.add_token_types([3] * len(SPECIAL) + [1] * 258 + [4])
        out.add_token_merges(["1 2", "h i"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_chat_template(TEMPLATE)
    for key, value in (metadata or {}).items():
        {bool: out.add_bool, str: out.add_string, int: out.add_uint32}[type(value)](key, value)
    for name, weight in state.items():
        array = weight.numpy()
        for heads, projection in ((HEADS, "q_proj"), (KV_HEADS, "k_proj")):
            if projection in name:  # llama.cpp interleaves the two halves of each rotary pair
                array = array.reshape(heads, 2, -1, WIDTH).swapaxes(1, 2).reshape(array.shape)
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        if name != drop and name not in (q8_0 or {}):
            out.add_tensor(name, np.ascontiguousarray(array))
    for name, array in (extra or {}).items():
        out.add_tensor(name, array)
    for name, blocks in (q8_0 or {}).items():
        out.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return state


def load(name: Path | str) -> tuple[Any, Any]:
    return models.load_model(str(name), dtype=torch.float32, device="cpu")


def refusal(name: Path | str, kind: type[BranchwiseError] = ModelError) -> str:
    """What loading `name` says; one line without a trace of a traceback."""
    with pytest.raises(kind) as caught:
        load(name)
    message = str(caught.value)
    assert message.endswith((".", "login", '"'))
    assert "\n" not in message
    assert "Traceback" not in message
    return message


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file()) if cache.exists() else []


@pytest.fixture(autouse=True, name="cache")
def cache_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for one test; what comes from the user's own cache is loaded before this takes its place."""
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session", name="tiny")
def tiny_fixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The GGUF file, and the weights it was made from."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return path, write_gguf(path)


@pytest.fixture(scope="session", name="tiny_folder")
def tiny_folder_fixture(tiny: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted copy of the tiny GGUF; tests that change it copy it first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRANCHWISE_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = models.resolve(str(tiny[0]))
    assert isinstance(folder, Path)
    return folder
