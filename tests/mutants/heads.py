# ruff: noqa: E501  (texts of the source stay in one piece)
"""Mutants of trained heads: what they draft and how they learn."""

from __future__ import annotations

from tests.mutants.family import Family

FAMILIES = [
    Family("head", ["tests/test_head_drafter.py", "tests/test_head_ahead.py"], {
        "draft/head/trees/device.py": [
            ("lengths[:, None] + behind.depths, attend, look)", "lengths[:, None] + 1 + behind.depths, attend, look)"),
            ("end, every = (kept - 1).clamp_min(0), ", "end, every = kept.clamp_max(steps - 1), "),
            ("after = torch.where(last, following[:, None], ", "after = torch.where(last & False, following[:, None], "),
            ("own = (rows <= rows[:, None]) & (real", "own = (rows >= 0) & (real"),
            ("depths = torch.cat([depths, kept[:, None] + ", "depths = torch.cat([depths, 0 * kept[:, None] + steps + "),
            ("foreseen[slots, min(depth, masks) - 1]", "foreseen[slots, min(depth, masks - 1)]"),
        ],
        "draft/head/trees/best_first.py": [
            ("own = own[every, above]", "own = own[every, above * 0]"),
            ("carry[every, above], tokens, cell, own, depth)", "carry[every, above * 0], tokens, cell, own, depth)"),
            ("value = (values[..., None] + likely.logprobs).flatten(1)", "value = likely.logprobs.flatten(1)"),
            ("bits[:nodes, : words_for(nodes)])", "bits[:nodes])"),
        ],
        "draft/head/trees/catching_up.py": [
            ("self._cache.lengths[sequence] += len(verdict.path)", "self._cache.lengths[sequence] += len(verdict.path) - 1"),
            ("return self._expected == [Expected.of(sequence, 0) for sequence in sequences]", "return bool(self._expected)"),
        ],
        "draft/head/drafter.py": [
            ("self.head.frequencies = self.trained.head.frequencies.float().to(target.device)", "pass"),
        ],
        "draft/head/following.py": [
            ("self.unread.cut(before - lengths[sequence])", "pass"),
            ("self.whole &= lengths[sequence] + len(self.unread) == before", "pass"),
        ],
    }),
    Family("waiting", [
        "tests/test_head_ahead.py::test_prompts_share_a_pass_while_there_is_room_for_it",
        "tests/test_head_ahead.py::test_what_waits_of_texts_is_read_by_what_is_recorded",
    ], {
        "draft/head/trees/waiting.py": [
            ("= tokens[:-1], range(count)", "= tokens[1:], range(count)"),
            ("cache.slot[sequence], start, tokens[-1]", "cache.slot[sequence], start, tokens[0]"),
            ("cache.lengths[sequence] += count", "cache.lengths[sequence] += STEPS"),
            ("= cache.padding, 0, 0, -1", "= cache.padding, 0, 0, 0"),
        ],
        "draft/head/prompt_graphs.py": [
            ("(positions <= last[:, None])", "(positions >= 0 * last[:, None])"),
            ("sequence.tokens[1 : count + 1]", "sequence.tokens[:count]"),
            ("= self._cache.slot[sequence], count - 1", "= self._cache.slot[sequence], 0"),
            ("self._cache.lengths[sequence] = count", "self._cache.lengths[sequence] = count - 1"),
            ("len(group) == TEXTS[-1] or ", ""),
            (" or size.texts * size.rows > MOST_ROWS", ""),
        ],
        "draft/head/trees/catching_up.py": [
            ("if not self._cache.lengths[sequence]}", "}"),
        ],
    }),
    Family("drawn-head", [
        "tests/test_head_drawn.py::test_a_verdict_that_never_counted_is_undone",
        "tests/test_head_drawn.py::test_under_a_grammar_the_host_draws",
        "tests/test_head_drawn.py",
    ], {
        "draft/head/trees/drawn.py": [
            ("now[slots] = before[slots]", "pass"),
            ("if len(sequence.tokens) == length and ", "if "),
            ("carry, own = self._carry[:, above], ", "carry, own = self._carry[:, above * 0], "),
            ("torch.where(known, extra.tokens[:, None], self._table[0])", "extra.tokens[:, None].clamp_min(0)"),
            ("if rests or any(place_of(sequence) is not None for sequence in sequences):", "if rests:"),
        ],
        "draft/drawn/paths.py": [
            ("path if number else torch.zeros_like(path)", "torch.zeros_like(path)"),
        ],
        "draft/drawn/shapes.py": [
            ("torch.tensor([before.index(self._shape.parents[node]) for node in nodes])", "torch.arange(len(nodes)) % len(before)"),
        ],
    }),
    Family("copies", [
        "tests/test_head_copies.py",
        "tests/test_head_drafter.py::test_a_prompt_longer_than_one_pass_is_read_as_in_training",
    ], {
        "draft/head/trees/copies.py": [
            ("torch.where(places < end, agreeing, 0)", "torch.where(places <= end, agreeing, 0)"),
            ("(REACH - 1, 0), value=-2)", "(REACH - 1, 0), value=0)"),
            ("steps % (end - best).clamp_min(1)", "steps"),
            ("(agreeing * cells + places)", "(agreeing * cells - places)"),
            ("torch.maximum(values, copy.values[:, this])", "values"),
            ("torch.where(found, NOTHING, own_values[:, this])", "own_values[:, this]"),
            ("range(min(depth + 1, count))", "range(min(depth, count))"),
        ],
        "draft/head/prompt.py": [
            ("value, is_causal=True", "value, is_causal=False"),
            ("= new[:, :, :cells]", "= new[:, :, 1 : cells + 1]"),
            (", wanted=last)", ", wanted=0 * last)"),
            ("(positions <= last[:, None])", "(positions < last[:, None])"),
        ],
    }),
    Family("head-training", [
        "tests/test_head_training.py",
        "tests/test_head_loss.py",
        "tests/test_head_drafter.py",
        "tests/test_head_replay.py",
        "tests/test_head_learning.py",
    ], {
        "train/head/unroll.py": [
            ("read = functional.pad(carry[:, :-1], (0, 0, 1, 0))", "read = carry"),
            ("torch.where(key_depths == 0, key_rows <= anchors, own)", "torch.where(key_depths == 0, key_rows <= anchors + 1, own)"),
            ("(key_depths <= depths[:, None])", "(key_depths < depths[:, None])"),
            ("own = (key_rows - key_depths == anchors) & ", "own = (key_rows <= rows[:, None]) & "),
            ("look = _look(cached, places - step)", "look = _look(cached, places)"),
        ],
        "train/head/learn.py": [
            ("self.head.features([state[:, :-2] for state in hidden])", "self.head.features([state[:, 1:-1] for state in hidden])"),
            ("rows = rows & functional.pad(right[:, :-1], (1, 0))", "pass"),
        ],
        "train/head/loss.py": [
            ("slope = said.exp() - 0.5 * meant.exp()", "slope = said.exp() - meant.exp()"),
        ],
    }),
]  # fmt: skip
