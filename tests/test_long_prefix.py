"""Long prefixes on a host: attended to apart from the tree, and found to be what one masked softmax finds."""

from __future__ import annotations

import pytest
import torch

from branchwise.backends.transformers import kv_cache
from branchwise.backends.transformers.attention import attend, attend_apart, masks_behind, tree_mask
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.sequence import SequenceState
from tests.conformance import test_target
from tests.conformance.architectures import build, served

PLAIN = ("llama", "qwen2", "gpt2", "phi3")
"""families whose layers all see the whole text"""
OTHERS = ("qwen2-window", "gemma2", "deepseek-v3")
"""with windows, soft caps, or values of another width than keys"""


@pytest.mark.parametrize(
    ("dtype", "off"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
def test_two_parts_are_one_softmax(heads: tuple[int, int], dtype: torch.dtype, off: float) -> None:
    """Texts of different lengths with trees of different rows, as in a batch."""
    torch.manual_seed(heads[0])
    lengths, nodes, rows, width = [37, 5, 64], 6, 9, 16
    keys = max(lengths) + rows - 2  # the last rows of the longest text's tree are nobody's
    query = torch.randn(3, heads[0], nodes, width, dtype=dtype)
    key, value = (torch.randn(3, heads[1], keys, width, dtype=dtype) for _ in range(2))
    seen = torch.rand(3, nodes, rows) < 0.4
    seen[:, :, rows - 2 :] = False
    seen[:, torch.arange(nodes), torch.arange(nodes)] = True
    depths, key_depths = torch.zeros(3, nodes, dtype=torch.long), torch.zeros(3, rows, dtype=torch.long)
    mask = tree_mask(torch.tensor(lengths), depths, seen, keys, None, dtype, key_depths)
    expected = attend(query, key, value, mask, causal=False, scale=0.3, softcap=None)
    masks = masks_behind(lengths, seen, keys, heads[0] // heads[1], dtype)
    assert max(one.shape[1] for one in masks) <= rows
    found = attend_apart(query, key, value, lengths, masks, 0.3)
    assert (found - expected).abs().max() < off


def test_a_part_that_outweighs_the_other_by_far_is_no_matter() -> None:
    key = torch.zeros(1, 1, 5, 2, dtype=torch.float64)
    value = torch.arange(10.0, dtype=torch.float64).view(1, 1, 5, 2)
    query = torch.full((1, 1, 1, 2), 300.0, dtype=torch.float64)
    masks = masks_behind([4], torch.ones(1, 1, 1, dtype=torch.bool), 5, 1, torch.float64)
    for row in (0, 4):
        key.zero_()[:, :, row] = 300.0
        assert torch.equal(attend_apart(query, key, value, [4], masks, 1.0)[0, 0, 0], value[0, 0, row])


@pytest.fixture
def all_prefixes_are_long(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prefixes were attended to apart."""
    calls = []

    def counted(*args: object) -> torch.Tensor:
        calls.append(len(args[3]))  # type: ignore[arg-type]
        return attend_apart(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(kv_cache, "LONG_PREFIX", 1)
    monkeypatch.setattr(kv_cache, "attend_apart", counted)
    return calls


@pytest.mark.parametrize("family", [*PLAIN, *OTHERS])
def test_trees_behind_long_prefixes_score_as_the_model_does(family: str, all_prefixes_are_long: list[int]) -> None:
    test_target.test_tree_scores_equal_the_models_own_forward_before_and_after_commits(family)
    assert bool(all_prefixes_are_long) is (family not in ("gemma2", "deepseek-v3"))


@pytest.mark.parametrize("family", ["llama", "qwen2-window"])
def test_batches_and_chunks_of_prompts_behind_long_prefixes_do_too(
    family: str, all_prefixes_are_long: list[int]
) -> None:
    test_target.test_a_batch_scores_like_its_sequences_alone(family)
    assert max(all_prefixes_are_long) > 1
    test_target.test_prefill_gives_the_same_law_in_chunks_of_any_size(family, 3)


def test_no_mask_is_as_long_as_a_long_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        raise AssertionError("a dense mask was made")

    target = TransformersTarget(build(served()["llama"]), slots=1, context=96, max_nodes=8, prefill_chunk=16)
    monkeypatch.setattr(kv_cache, "LONG_PREFIX", 16)
    monkeypatch.setattr(kv_cache, "tree_mask", refused)
    target.open(SequenceState(list(range(1, 90))))
