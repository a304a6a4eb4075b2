"""Peers in this process: the same ids, the same number of tokens, counted honestly."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.bench.contest import Asked, Contestant
from branchwise.bench.peers import PEERS, build_peer
from branchwise.bench.peers.transformers import Static
from branchwise.bench.records import PEER
from branchwise.core.sampling import SamplingParams
from branchwise.draft import build_drafter
from branchwise.engine import Engine, Request
from branchwise.errors import BranchwiseError, ModelError, PairingError, UnknownName, UsageError
from branchwise.llm import LLM
from branchwise.models import ALIASES, cache_dir
from branchwise.verify import VERIFIERS
from tests.conformance.architectures import build, served

END = 2
PROMPTS = [[5, 9, 11, 5, 9], [7, 3, 3, 8, 40, 41, 42, 40, 41], [60]]


def tokenizer_of(size: int) -> PreTrainedTokenizerFast:
    """Words w3, w4, … between blanks, and the usual special tokens."""
    words = ["<pad>", "<s>", "</s>"] + [f"w{number}" for number in range(3, size)]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def llm_of(model: PreTrainedModel) -> LLM:
    target = TransformersTarget(model, slots=4)
    engine = Engine(target, build_drafter("none"), VERIFIERS.build("match"))
    return LLM("tiny", model, tokenizer_of(target.vocabulary), engine)


def counting_model(cycle: int = 8) -> PreTrainedModel:
    """After token t comes t + 1, after the last of a cycle the first: what is drafted right can be counted by hand."""
    size = 32
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=size,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=END,
        bos_token_id=1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.zero_()
    model.get_input_embeddings().weight.copy_(torch.eye(size))
    following = torch.arange(size).roll(-1)
    following[cycle - 1] = 0
    model.lm_head.weight.zero_()
    model.lm_head.weight[following, torch.arange(size)] = 10.0
    return model


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return llm_of(build(served()["llama"]))


@pytest.fixture(scope="module")
def counting() -> LLM:
    return llm_of(counting_model())


@pytest.fixture(scope="module")
def assistant(tiny: LLM, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another random model with the same tokenizer, in a folder whose name needs care."""
    folder = tmp_path_factory.mktemp("models") / "small,v=1"
    config = served()["llama"]
    config.num_hidden_layers = 1
    build(config).save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return str(folder)


def own(llm: LLM, prompt: list[int], asked: Asked) -> list[int]:
    """Our plain decoding of the same request."""
    sampling = SamplingParams(logit_bias=dict.fromkeys(asked.forbidden, float("-inf")))
    request = Request(tuple(prompt), sampling, asked.max_new_tokens, asked.stop_tokens)
    generation = llm.engine.submit(request)
    while not generation.finished:
        llm.engine.step()
    return generation.token_ids


def transformers_specs(assistant: str) -> list[str]:
    return [
        "transformers",
        "transformers-lookup:tokens=4",
        f"transformers-assisted:{assistant}",
        "transformers-static:compile=none",
    ]


@pytest.fixture(params=[0, 1, 2, 3], ids=["plain", "lookup", "assisted", "static"])
def peer(request: pytest.FixtureRequest, tiny: LLM, assistant: str) -> Contestant:
    return build_peer(transformers_specs(assistant)[request.param], tiny, threads=None)


def test_a_peer_is_named_as_it_was_asked_for(tiny: LLM, assistant: str) -> None:
    for spec in [*transformers_specs(assistant), "openai:http://127.0.0.1:1/v1,model=a"]:
        peer = build_peer(spec, tiny, threads=1)
        assert (peer.name, peer.kind, peer.comparable) == (spec, PEER, False)
        peer.forget()


# transformers


def test_greedy_ids_are_those_of_our_plain_decoding(peer: Contestant, tiny: LLM) -> None:
    for ends in (frozenset(), frozenset({END, 40, 77})):
        asked = Asked(24, stop_tokens=ends)
        for prompt in PROMPTS:
            assert peer.write([prompt], asked)[0].ids == own(tiny, prompt, asked)


def test_a_batch_is_written_as_its_prompts_alone(peer: Contestant) -> None:
    asked = Asked(16, stop_tokens=frozenset({END, 40, 77}))
    together = peer.write(PROMPTS, asked)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        [alone] = peer.write([prompt], asked)
        assert (answer.ids, answer.finish_reason) == (alone.ids, alone.finish_reason)
        assert answer.steps == alone.steps
    assert len({answer.seconds for answer in together}) == 1


def test_an_answer_ends_with_the_stop_token_and_says_so(peer: Contestant, tiny: LLM) -> None:
    prompt = PROMPTS[1]
    whole = own(tiny, prompt, Asked(12))
    end = whole[5]
    [answer] = peer.write([prompt], Asked(12, stop_tokens=frozenset({end})))
    assert answer.ids == whole[: whole.index(end) + 1]
    assert answer.finish_reason == "stop"


def test_forbidden_ends_give_answers_of_full_length_without_them(peer: Contestant, tiny: LLM) -> None:
    prompt = PROMPTS[0]
    forbidden = frozenset(own(tiny, prompt, Asked(6)))
    asked = Asked(20, forbidden=forbidden)
    for answer in peer.write([prompt, PROMPTS[2]], asked):
        assert len(answer.ids) == 20
        assert answer.finish_reason == "length"
        assert not forbidden & set(answer.ids)
    assert peer.write([prompt], asked)[0].ids == own(tiny, prompt, asked)


def test_the_models_own_end_does_not_end_what_is_to_have_full_length(tiny: LLM) -> None:
    """A checkpoint's end of text comes back through the defaults unless it is kept out."""
    peer = build_peer("transformers", tiny, threads=None)
    first = own(tiny, PROMPTS[0], Asked(4))[0]
    before = tiny.model.generation_config.eos_token_id
    tiny.model.generation_config.eos_token_id = first
    try:
        assert len(peer.write([PROMPTS[0]], Asked(9))[0].ids) == 9
        assert tiny.model.generation_config.eos_token_id == first
    finally:
        tiny.model.generation_config.eos_token_id = before


def test_penalties_that_a_checkpoint_recommends_do_not_apply(tiny: LLM) -> None:
    peer = build_peer("transformers", tiny, threads=None)
    before = peer.write([PROMPTS[1]], Asked(16))[0].ids
    tiny.model.generation_config.repetition_penalty = 5.0
    try:
        assert peer.write([PROMPTS[1]], Asked(16))[0].ids == before
    finally:
        tiny.model.generation_config.repetition_penalty = None


def test_a_seed_writes_the_same_again_and_leaves_torchs_own_draws_alone(peer: Contestant) -> None:
    asked = Asked(16, temperature=1.0, top_p=0.9, top_k=30, seeds=(3,))
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    one, again, other = (peer.write([PROMPTS[1]], a)[0].ids for a in (asked, asked, replace(asked, seeds=(4,))))
    assert torch.equal(torch.rand(4), expected)
    assert one == again != other


def test_sampling_keeps_to_the_most_probable_tokens(tiny: LLM) -> None:
    peer = build_peer("transformers", tiny, threads=None)
    asked = Asked(12, temperature=1.5, top_k=1, seeds=(1, 2))
    for prompt, answer in zip(PROMPTS[:2], peer.write(PROMPTS[:2], asked), strict=True):
        assert answer.ids == own(tiny, prompt, Asked(12))


def test_peers_between_our_own_runs_change_nothing_on_either_side(peer: Contestant, tiny: LLM) -> None:
    asked = Asked(12)
    attention = tiny.model.config._attn_implementation
    ours, theirs = own(tiny, PROMPTS[1], asked), peer.write([PROMPTS[1]], asked)[0].ids
    for _ in range(2):
        assert own(tiny, PROMPTS[1], asked) == ours
        assert peer.write([PROMPTS[1]], asked)[0].ids == theirs
    assert tiny.model.config._attn_implementation == attention
    assert not tiny.model._forward_pre_hooks


def test_nothing_is_written_to_the_screen(peer: Contestant, capfd: pytest.CaptureFixture[str]) -> None:
    import transformers

    transformers.logging.set_verbosity_warning()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            peer.write(PROMPTS[:1], Asked(8, temperature=0.7, top_k=5, seeds=(1,), forbidden=frozenset({END})))
            peer.write(PROMPTS[:1], Asked(8, stop_tokens=frozenset({END})))
    finally:
        transformers.logging.set_verbosity_error()
    assert capfd.readouterr() == ("", "")


def test_lookup_counts_passes_as_done_by_hand(counting: LLM) -> None:
    """Two cycles of eight stand in the prompt: the first pass drafts the eight tokens behind the first cycle and emits
    nine, the second drafts ten and emits eleven."""
    peer = build_peer("transformers-lookup", counting, threads=None)
    [answer] = peer.write([[*range(8), *range(8)]], Asked(20))
    assert answer.ids == [number % 8 for number in range(20)]
    assert (answer.steps, answer.target_passes, answer.drafted, answer.accepted) == (2, 2, 18, 18)
    assert (answer.draft_passes, answer.by_source) == (0, {"target": 2, "lookup": 18})


def test_lookup_without_a_repeat_is_one_token_a_pass(counting: LLM) -> None:
    [answer] = build_peer("transformers-lookup", counting, threads=None).write([[0, 1, 2]], Asked(5))
    assert answer.ids == [3, 4, 5, 6, 7]
    assert (answer.steps, answer.drafted, answer.accepted) == (5, 0, 0)


def test_the_length_of_a_lookup_is_as_asked(counting: LLM) -> None:
    peer = build_peer("transformers-lookup:tokens=3", counting, threads=None)
    [answer] = peer.write([[*range(8), *range(8)]], Asked(20))
    assert (answer.steps, answer.accepted) == (5, 15)


def test_an_assistants_passes_are_counted_as_done_by_hand(counting: LLM, tmp_path: Path) -> None:
    """An assistant that is always right drafts nineteen tokens in as many passes, and one pass takes them all."""
    counting_model().save_pretrained(tmp_path)
    counting.tokenizer.save_pretrained(tmp_path)
    peer = build_peer(f"transformers-assisted:{tmp_path}", counting, threads=None)
    [answer] = peer.write([[0, 1, 2]], Asked(20))
    assert answer.ids == [number % 8 for number in range(3, 23)]
    assert (answer.steps, answer.drafted, answer.accepted, answer.draft_passes) == (1, 19, 19, 19)
    assert answer.by_source == {"target": 1, "assistant": 19}


def test_plain_generate_takes_one_pass_for_every_token(counting: LLM) -> None:
    answers = build_peer("transformers", counting, threads=None).write([[0], [3, 4]], Asked(6))
    assert [(a.steps, a.target_passes, a.drafted, a.accepted) for a in answers] == [(6, 6, 0, 0)] * 2


def test_the_static_peer_compiles_its_passes_where_asked_and_writes_the_same(tiny: LLM) -> None:
    """`eager` compiles nothing, so that it is quick, but takes the way of every compiler."""
    peer = build_peer("transformers-static:compile=eager", tiny, threads=None)
    try:
        for _ in range(2):  # the second text finds the cache of the first, which must be empty again
            answers = peer.write(PROMPTS[:2], Asked(12))
            for prompt, answer in zip(PROMPTS[:2], answers, strict=True):
                assert answer.ids == own(tiny, prompt, Asked(12))
                assert answer.steps == answer.target_passes == 12
        assert "_compiled_call" in vars(tiny.model)
    finally:
        vars(tiny.model).pop("_compiled_call", None)
        torch._dynamo.reset()


def test_a_static_cache_serves_all_texts_of_about_its_length(tiny: LLM) -> None:
    peer = build_peer("transformers-static", tiny, threads=None)
    assert isinstance(peer, Static)
    first, same, longer = (peer._arguments(1, length)["past_key_values"] for length in (100, 512, 513))
    assert first is same is not longer
    assert "_compiled_call" not in vars(tiny.model)  # transformers compiles on accelerators only, unless told to


def test_an_assistant_forgets_how_long_its_drafts_were(counting: LLM, tmp_path: Path) -> None:
    model = counting_model()
    model.generation_config.num_assistant_tokens = 4
    model.generation_config.num_assistant_tokens_schedule = "heuristic"
    model.save_pretrained(tmp_path)
    counting.tokenizer.save_pretrained(tmp_path)
    peer = build_peer(f"transformers-assisted:{tmp_path}", counting, threads=None)
    runs = []
    for _ in range(2):
        peer.forget()
        runs.append([peer.write([[0, 1, 2]], Asked(20))[0].steps for _ in range(2)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]  # it had something to forget


def test_an_assistant_with_another_vocabulary_is_refused(tiny: LLM, counting: LLM, tmp_path: Path) -> None:
    counting.model.save_pretrained(tmp_path)
    counting.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(PairingError, match="another vocabulary"):
        build_peer(f"transformers-assisted:{tmp_path}", tiny, threads=None)


# Specs


def test_an_unknown_peer_is_told_the_nearest_name(tiny: LLM) -> None:
    with pytest.raises(UnknownName, match=r"Did you mean 'llama\.cpp'"):
        build_peer("llamacpp", tiny, threads=None)
    hugging = {"transformers", "transformers-static", "transformers-lookup", "transformers-assisted"}
    assert set(PEERS) == {*hugging, "llama.cpp", "openai"}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("transformers:3", "at most 0 values"),
        ("transformers-lookup:tokens=0", "at least 1"),
        ("transformers-static:compile=soon", "torch has no compiler 'soon'"),
        ("transformers-lookup:tokens=many", "as int"),
        ("transformers-lookup:length=3", "no option 'length'"),
        ("transformers-assisted", "transformers-assisted:MODEL"),
        ("transformers-assisted:", "transformers-assisted:MODEL"),
        ("transformers-assisted:/no/such", "no file or folder"),
        ("openai", "openai:URL"),
        ("openai:localhost:8000", "not the address of a server"),
        ("openai:http://", "not the address of a server"),
        ("openai:,model=x", "not the address of a server"),
    ],
)
def test_a_wrong_spec_is_explained_in_a_sentence(tiny: LLM, spec: str, says: str) -> None:
    with pytest.raises(BranchwiseError, match=says):
        build_peer(spec, tiny, threads=None)


# llama.cpp

needs_llama = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
GGUF = cache_dir() / "gguf" / ALIASES["smollm2"].member
needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None or not GGUF.is_file(),
    reason="xllamacpp is not installed, or the GGUF file of smollm2 is not in the cache",
)


def test_without_xllamacpp_the_install_line_is_shown(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(UsageError, match=r"needs the package xllamacpp.*pip install 'branchwise\[peers\]'"):
        build_peer("llama.cpp", tiny, threads=1)


@needs_llama
def test_llama_cpp_says_which_file_it_cannot_read(tiny: LLM, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"give one as llama\.cpp:PATH\.gguf"):
        build_peer("llama.cpp", tiny, threads=1)
    with pytest.raises(ModelError, match="There is no file"):
        build_peer(f"llama.cpp:{tmp_path}/a,b=c.gguf", tiny, threads=1)
    broken = tmp_path / "broken,v=1.gguf"
    broken.write_bytes(b"GGUF and no more")
    with pytest.raises(ModelError, match=r"GGUF version|truncated|damaged"):
        build_peer(f"llama.cpp:{broken}", tiny, threads=1)


@pytest.fixture(scope="module")
def llama(smollm2: LLM) -> Contestant:
    return build_peer("llama.cpp", smollm2, threads=1)


@pytest.fixture(scope="module")
def prompts(smollm2: LLM) -> list[list[int]]:
    return [smollm2.encode(text) for text in ("What is the capital of France?", "Write a haiku about rivers.")]


@needs_gguf
def test_another_models_file_is_refused(tiny: LLM) -> None:
    with pytest.raises(PairingError, match="vocabulary of 49152 tokens and tiny one of 96"):
        build_peer(f"llama.cpp:{GGUF}", tiny, threads=1)


@needs_gguf
def test_greedy_answers_are_the_models_own_up_to_rounding_and_have_the_length_asked_for(
    llama: Contestant, smollm2: LLM, prompts: list[list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    """llama.cpp rounds activations to eight bits, so near-ties fall the other way; no token is far from the best."""
    asked = Asked(12, forbidden=smollm2.stop_tokens)
    answers = llama.write(prompts, asked)
    assert capfd.readouterr() == ("", "")
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.ids) == 12
        assert answer.finish_reason == "length"
        assert answer.counted_by == "ids"
        assert answer.text == smollm2.decode(answer.ids)
        assert set(answer.phases) == {"prefill", "decode"}
        assert sum(answer.phases.values()) <= answer.seconds + 0.05
        logits = smollm2.model(torch.tensor([prompt + answer.ids[:-1]])).logits[0, len(prompt) - 1 :]
        logits[:, list(asked.forbidden)] = -torch.inf
        gaps = logits.amax(dim=-1) - logits.gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
        assert gaps.max() < 0.5
        assert gaps.median() == 0


@needs_gguf
def test_an_answer_ends_where_the_model_ends_it(llama: Contestant, smollm2: LLM, prompts: Any) -> None:
    paris = [*prompts[0], *smollm2.tokenizer("The capital of France is", add_special_tokens=False)["input_ids"]]
    [answer] = llama.write([paris], Asked(12, stop_tokens=smollm2.stop_tokens))
    assert answer.text == " Paris."
    assert answer.ids == own(smollm2, paris, Asked(12, stop_tokens=smollm2.stop_tokens))
    assert (answer.finish_reason, answer.ids[-1]) == ("stop", 2)


@needs_gguf
def test_a_stop_token_that_llama_cpp_does_not_know_ends_an_answer_too(
    llama: Contestant, prompts: list[list[int]]
) -> None:
    whole = llama.write(prompts[:1], Asked(6))[0].ids
    [answer] = llama.write(prompts[:1], Asked(6, stop_tokens=frozenset({whole[3]})))
    assert answer.ids == whole[: whole.index(whole[3]) + 1]
    assert answer.finish_reason == "stop"


@needs_gguf
def test_a_seed_writes_the_same_again(llama: Contestant, prompts: list[list[int]]) -> None:
    found = [llama.write(prompts[1:], Asked(8, temperature=1.0, seeds=(seed,)))[0].ids for seed in (1, 1, 1 << 40 | 2)]
    assert found[0] == found[1] != found[2]


@needs_gguf
def test_a_longer_prompt_and_a_larger_batch_get_the_room_that_they_need(
    smollm2: LLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("branchwise.bench.peers.llamacpp.SHORTEST_CONTEXT", 16)
    llama = build_peer("llama.cpp", smollm2, threads=1)
    for batch in ([prompts[0]], [prompts[0] * 3], [prompts[0], prompts[1] * 4, prompts[0]]):
        assert [len(answer.ids) for answer in llama.write(batch, Asked(2))] == [2] * len(batch)
