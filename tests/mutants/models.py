# ruff: noqa: E501  (texts of the source stay in one piece)
"""Mutants of draft models: their caches, their exits and how students learn."""

from __future__ import annotations

from tests.mutants.family import Family

FAMILIES = [
    Family("model", ["tests/test_model_drafter.py"], {
        "draft/model/draft_model.py": [
            ("row_depths[b, row] = one.tree.depths[node] - 1", "row_depths[b, row] = one.tree.depths[node]"),
            ("depths[b, place] = one.tree.depths[node] - 1", "depths[b, place] = one.tree.depths[node]"),
            ("ancestors[b, place, rows[node]] = True", "ancestors[b, place, : before[b]] = True"),
            ("if cached != text[:known] or known == len(text):", "if known == len(text):"),
            ("if cached != text[:known] or known == len(text):", "if cached != text[:known]:"),
            ("store.cut(followed.key, known)", "pass"),
            ("path.append(node := child)", "path.append(child)"),
            ("slice(len(new) - 1, len(new)) for new in ahead", "slice(nodes - 1, nodes) for new in ahead"),
            ("one.tree = tree", "pass"),
            ("followed.rows = {}\n        ahead", "ahead"),
        ],
        "draft/model/drafter.py": [
            ("self.temperature or sampling.temperature or FOR_GREEDY", "sampling.temperature or FOR_GREEDY"),
            ("own_head(None if self.trim is None else self.vocabulary.columns)", "own_head(None)"),
            ("if bias and not self.vocabulary.whole:", "if bias:", "of a whole vocabulary the places are the tokens; the guard spares a table of them"),
            ("self._following.close(sequence)\n        self._spelled", "self._spelled"),
        ],
        "draft/model/vocabulary.py": [
            ("index_copy_(1, self.tokens, probs)", "index_copy_(1, self.columns, probs)"),
            ("if overlap < LEAST_OVERLAP:", "if False:"),
            ('found["end of text"] = tokenizer.eos_token_id', "pass"),
        ],
        "backends/transformers/slots.py": [
            ("else self._touched[free]\n", "else self._lengths[last]\n"),
        ],
    }),
    Family("nested", ["tests/test_nested.py"], {
        "draft/nested/exits.py": [
            ("cost += segments[number] * float(left.mean())", "cost += segments[number]"),
            ("left = left & ~leaves", "pass"),
            ("_speed(accepted[number], costs[number], depth)", "_speed(accepted[number], 0.0, depth)"),
            ("accepted = samples[:, 1].mean(axis=0)", "accepted = samples[:, 0].mean(axis=0)"),
        ],
        "draft/nested/parts.py": [
            ("nn.ModuleList(part._modules[last][:count])", "part._modules[last]"),
            ("found._modules = dict(module._modules)", "pass"),
        ],
        "draft/nested/drafter.py": [
            ("if target.execution.kernels and self.threshold is None:", "if target.execution.kernels:"),
            ("return None if self.only is None else super()._on_device(target)", "return None"),
        ],
        "draft/nested/cache.py": [
            ("beside.seen[place, needed] <= number", "beside.seen[place, needed] < number"),
            ("seen[place, self.length + above] = True", "pass"),
            ("beside.seen[current.slot_column, current.rows] = 1", "pass"),
        ],
    }),
    Family("students", ["tests/test_students.py"], {
        "train/student/divergence.py": [
            ("return (p * (log_p - log_q)).sum(-1), q - p", "return (p * (log_p - log_q)).sum(-1), p - q"),
            ("return value, q * (apart - value[:, None])", "return value, q * apart"),
            ("apart = 0.5 * (log_q - log_m)", "apart = log_q - log_m"),
            ("side = 0.5 * torch.sign(q - p)", "side = torch.sign(q - p)"),
        ],
        "train/student/score.py": [
            ("table.unfold(1, self.depth, 1).cumprod(-1)", "table.unfold(1, self.depth, 1)"),
        ],
    }),
]  # fmt: skip
