"""A tiny random model for every family that is served, and for families that are refused."""

from __future__ import annotations

import torch
import transformers as hf
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCABULARY = 96

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SMALL_GPT = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def served() -> dict[str, PreTrainedConfig]:
    """One config per family; windows are shorter than the texts of the tests, so they matter."""
    return {
        "llama": hf.LlamaConfig(**COMMON),
        "llama-wide-heads": hf.LlamaConfig(**COMMON, head_dim=16),
        "qwen2": hf.Qwen2Config(**COMMON),
        "qwen2-window": hf.Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=8, layer_types=MIXED),
        "qwen3": hf.Qwen3Config(**COMMON, head_dim=8),
        "mistral": hf.MistralConfig(**COMMON, sliding_window=8),
        "mistral-narrow": hf.MistralConfig(**COMMON, sliding_window=3),
        "gemma2": hf.Gemma2Config(
            **COMMON, head_dim=8, sliding_window=8, attn_logit_softcapping=5.0, query_pre_attn_scalar=8
        ),
        "gemma3": hf.Gemma3TextConfig(
            **COMMON, head_dim=8, sliding_window=8, layer_types=MIXED, query_pre_attn_scalar=8
        ),
        "gpt2": hf.GPT2Config(**SMALL_GPT, n_embd=32, n_layer=3, n_head=4, n_positions=128),
        "gpt-neox": hf.GPTNeoXConfig(
            **SMALL_GPT,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=128,
        ),
        "opt": hf.OPTConfig(
            **SMALL_GPT,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            word_embed_proj_dim=32,
            max_position_embeddings=128,
        ),
        "smollm3": hf.SmolLM3Config(**COMMON, no_rope_layers=[1, 0, 1]),
        "phi": hf.PhiConfig(**COMMON),
        "phi3": hf.Phi3Config(**COMMON),
        "mixtral": hf.MixtralConfig(**COMMON, num_local_experts=4),
        "qwen2-moe": hf.Qwen2MoeConfig(
            **COMMON,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            use_sliding_window=True,
            sliding_window=8,
            layer_types=MIXED,
        ),
        "deepseek-v3": hf.DeepseekV3Config(
            **(COMMON | {"num_key_value_heads": 4}),
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=16,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=12,
        ),
    }


def refused() -> dict[str, tuple[PreTrainedConfig, str]]:
    """A config and a piece of the sentence with which its model is refused."""
    gpt = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {
        "bloom": (hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4), "AttentionInterface"),
        "falcon": (hf.FalconConfig(**SMALL_GPT, **gpt), "AttentionInterface"),
        "gpt-j": (hf.GPTJConfig(**SMALL_GPT, n_embd=32, n_layer=2, n_head=4, rotary_dim=8), "AttentionInterface"),
        "mamba": (hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2), "state-space"),
        "bamba": (
            hf.BambaConfig(**COMMON, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, attn_layer_indices=[1]),
            "state-space or linear-attention layers",
        ),
        "lfm2": (
            hf.Lfm2Config(**COMMON, layer_types=["conv", "full_attention", "conv"]),
            "state-space or linear-attention layers",
        ),
        "gemma3n": (
            hf.Gemma3nTextConfig(
                **(COMMON | {"num_hidden_layers": 4}),
                head_dim=8,
                num_kv_shared_layers=2,
                hidden_size_per_layer_input=8,
                vocab_size_per_layer_input=VOCABULARY,
                laurel_rank=8,
                layer_types=["sliding_attention", "full_attention"] * 2,
                activation_sparsity_pattern=[0.0] * 4,
            ),
            "share their keys and values",
        ),
        "gpt-oss": (hf.GptOssConfig(**COMMON, num_local_experts=4, head_dim=8), "s_aux"),
        "llama4": (
            hf.Llama4TextConfig(
                **COMMON, head_dim=8, attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=32
            ),
            "neither causal nor a sliding window",
        ),
    }


def build(config: PreTrainedConfig, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    torch.manual_seed(0)
    # Eager attention is the reference: faster ones of transformers 5.17 drop the soft caps of Gemma 2.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    # Fresh models are nearly linear in their attention; larger weights make masks and positions matter.
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "embed" not in name:
            parameter.mul_(4.0)
    return model.to(device, dtype)
