# ruff: noqa: E501  (texts of the source stay in one piece)
"""Mutants of steps: what is decided about them, begun ahead, or left over."""

from __future__ import annotations

from tests.mutants.family import Family

FAMILIES = [
    Family("controller", [
        "tests/test_cost_memory.py",
        "tests/test_explain.py",
        "tests/test_adaptive_size.py",
        "tests/test_controller.py",
    ], {
        "control/choice.py": [
            ("return found if speeds[found] > WORTH * speeds[0] else 0", "return found"),
            ("speeds = [gained / cost for", "speeds = [gained for"),
            (" or lost <= 0:", ":"),
            (" and lost < self._most)", ")"),
            ("(at_stake + self._invested) / terms.share", "at_stake / terms.share"),
            ("if self._left > 0:", "if False:"),
            ("self._left += round(max(0.0, passes - tokens) / terms.share)", "pass"),
        ],
        "control/trust.py": [
            ("return min(1.0, promise * self.came / self.promised)", "return promise"),
            ("self.promised, self.came = self._lately_promised, self._lately_came", "pass"),
            ("known.forgive()", "pass"),
            ("for node in path[1:]), last]", "for node in path[1:]), -1]"),
        ],
        "draft/policies/adaptive.py": [
            ("path = [order[node] for node in verdict.path]", "path = list(verdict.path)"),
            ("most, texts = max(growth.most", "most, texts = min(growth.most"),
            ("growth.bound(more) for growth in growing", "growth.bound(0) for growth in growing"),
        ],
        "control/memory.py": [
            ("write_notes(path, read_notes(path) | learned)", "write_notes(path, learned)"),
            ("if model.knows(1)}", "}"),
            ("str(target.dtype),", "0,"),
        ],
        "engine/explain.py": [
            ("(plain.wall_seconds - plain.prefill_seconds)", "plain.wall_seconds"),
            ("if not step.nodes and step.seconds]", "]"),
            ("return self.wall - self.seconds[\"prefill\"]", "return self.wall"),
            ("key=lambda one: -one[0])]", "key=lambda one: one[0])]"),
        ],
        "control/costs.py": [
            ("self._spread[1:, 1:] += OTHER_DAY * _WALK", "self._spread[1:, 1:] += 9 * _WALK"),
            ("self._spread[1:, 1:] += ALARM * _WALK", "pass"),
            ("self._spread[0, 0] += DRIFT", "pass"),
            ("found = found - np.clip(", "found = found - 0 * np.clip("),
            ("return not self._drafted or", "return True or"),
            ("return self._since_plain > 0 and math.log(speed) < doubt < UNTRIED", "return False"),
            ("other._spread[0, 0] += OTHER_BATCH", "pass"),
            ("(first if nearest is None else models[nearest])", "first"),
            ("for rows in wanted]) - _seen(batch)", "for rows in wanted]) - _seen(1)"),
        ],
    }),
    Family("begun", ["tests/test_advance.py", "tests/test_inflight.py"], {
        "cuda/advance.py": [
            ("inputs.lengths[:batch] += kept", "pass"),
            ("inputs.starts[:batch] += kept", "pass"),
            ("inputs.positions[:batch] += kept[:, None]", "pass"),
            ("inputs.tokens[:batch, 0] = after.tokens[:batch]", "pass"),
            ("(after.paths[:batch] >= 0).sum(dim=1)", "after.paths.shape[1] * torch.ones_like(after.tokens[:batch])"),
            ("[:batch, 1 : drafted.shape[1]] = drafted[:, 1:]", "[:batch, : drafted.shape[1]] = drafted"),
            ("inputs.key_depths[:batch, :nodes] = laid.depths", "pass"),
            ("torch.add(inputs.lengths[:batch, None], inputs.depths[:batch], out=inputs.positions[:batch])", "pass"),
            ("        inputs.drafted[:batch] = inputs.tokens[:batch]", "        pass"),
        ],
        "cuda/graphs.py": [
            ("if not (self.committed and ", "if not ("),
            ("self.sequences != tuple(sequences) or ", ""),
            ("(self.batch.nodes, len(mine)) != (batch.nodes, len(theirs))", "len(mine) != len(theirs)"),
            ("one is other or len(one) == len(other) == 1", "one is other or len(one) == 1"),
            ("one is other or len(one) == len(other) == 1", "True"),
            ("tensor.copy_(value)", "pass"),
            ("batch.tokens = self.batch.tokens", "pass", "the forest brings together the same tokens by itself, with more launches"),
        ],
        "backends/transformers/target.py": [
            ("self._passes += 1  # graphs share memory: whatever an enqueued pass found is overwritten", "pass"),
            ("if not self._moved or furthest", "if furthest"),
            (" + after.paths.shape[1] + batch.nodes", " + batch.nodes"),
        ],
        "backends/transformers/sequences.py": [
            (
                "self._passes += 1  # slots move\n        self._prefills.pop(sequence, None)\n        self.store.close",
                "self._prefills.pop(sequence, None)\n        self.store.close",
            ),
        ],
        "engine/pipelined.py": [
            ("verdicts, logprobs, seen)", "verdicts, self.logprobs(generations, batch, scored, found), seen)"),
            ("self._budgets(generations, depth + 1)", "self._budgets(generations)"),
            ("self.drafter.draw is Draw.FIXED", "True"),
            (" or self._changes(generations)", ""),
            ("    self.clock.lap(\"score\")\n        probs =", "self.clock.lap(\"score\")\n        probs =", "on a host the time is that of a call that returns at once"),
        ],
    }),
    Family("lingering", ["tests/test_lingering.py"], {
        "engine/lingering.py": [
            ("[*row.tokens, *behind]", "list(row.tokens)"),
            ("row.tokens = [*row.tokens, *behind]", "row.tokens += behind"),
            ("self.sequence.tokens = list(self.text_tokens)", "pass"),
        ],
        "engine/scheduler.py": [
            ("self.target.free_slots or self.lingering", "self.target.free_slots"),
            ("if self._waiting or self.prefilling:\n            self.thin_out()", "if False:\n            pass"),
            ("if sparing and lingering and ", "if lingering and "),
            ("if sparing and lingering and ", "if False and "),
            ("return held <= MOST_HELD * (whole - held)", "return True"),
            ("            self.leave(generation)\n        self.thin_out(sparing=True)\n", "            self.leave(generation)\n"),
        ],
        "engine/request.py": [
            ("return not self.request.sampling.processors", "return True"),
        ],
        "engine/pipelined.py": [
            ('self._rows_may_linger = verifier.name == "match"', "self._rows_may_linger = True"),
            ("return self._rows_may_linger and self._inflight is not None", "return self._rows_may_linger"),
        ],
        "engine/engine.py": [
            ("generation.sequence.tokens += outcome.tokens", "pass"),
            ("                if scheduler.lingering:\n", "                if False:\n"),
            ("behind=tokens[number:]", "behind=tokens"),
        ],
    }),
]  # fmt: skip
