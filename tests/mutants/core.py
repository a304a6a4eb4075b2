# ruff: noqa: E501  (texts of the source stay in one piece)
"""Mutants of trees and random numbers, and of the audits that enumerate what becomes of them."""

from __future__ import annotations

from tests.mutants.family import BASE, Family

FAMILIES = [
    Family("tree", ["tests/test_tree.py", BASE], {
        "core/tree.py": [
            ("return order[::-1]", "return order"),
            ("sorted(below, key=first.__getitem__)", "below"),
            ("first.setdefault(node, turn)", "first[node] = turn"),
            ("for leaf in self.leaves or (0,)]", "for leaf in sorted(self.leaves) or (0,)]"),
        ],
        "core/topology.py": [
            ("[node for node, below in enumerate(self.children) if len(below) > 1]", "[node for node, below in enumerate(self.children) if below]",
             "a fork of one way costs a look at its law and decides nothing"),
        ],
        "core/batch.py": [
            ("nodes.clamp(0, self.q.shape[1] - 1)", "nodes.clamp(0, 0)"),
            ("widths[depth] = max(widths[depth], len(below))", "widths[depth] = len(below)"),
            ("torch.where(above, every, -1)", "every"),
        ],
    }),
    Family("chance", ["tests/test_rng.py", "tests/test_sampler.py", "tests/test_builder.py"], {
        "core/rng.py": [
            ("torch.where(self.hopes(odds, draw), places, count)", "torch.where(~self.hopes(odds, draw), places, count)"),
            ("(found, (0, 1), value=count).amin(dim=1)", "(found.where(found < count, -1), (0, 1), value=count).amax(dim=1)"),
            ("self._tossed(draw, bounds.shape[1]) < bounds", "self._tossed(draw, bounds.shape[1]) <= bounds"),
            ("self._tossed(draw, bounds.shape[1]) < bounds", "self._tossed(0, bounds.shape[1]) < bounds"),
            ("self._tossed(draw, bounds.shape[1]) < bounds", "self._tossed(draw, bounds.shape[1]) > bounds"),
            ("torch.arange(chunk * COINS, (chunk + 1) * COINS,", "torch.arange(0, COINS,"),
            ("coins[:, start - first * COINS : start - first * COINS + count]", "coins[:, :count]"),
            ("left.scatter_(1, token, 0.0)", "left"),
            ('zlib.crc32(f"{role} {purpose}".encode()) << 31 | draw', "zlib.crc32(purpose.encode()) << 31 | draw"),
            ("sums if rows is None else sums[rows]", "sums if rows is None else sums[rows * 0]"),
            ("blocks[rows, winner]", "blocks[rows * 0, winner]"),
            ("probs if rows is None else probs[rows]", "probs if rows is None else probs[rows * 0]"),
            ("torch.where(left.gather(1, token) > 0, token, -1)", "token"),
        ],
    }),
    Family("enumeration", ["tests/test_enumeration.py"], {
        "audit/enumeration.py": [
            ("torch.cat([failed[:, :-1] * odds, failed[:, -1:]], dim=1)", "torch.cat([odds, failed[:, -1:]], dim=1)"),
            ("(1 - odds).cumprod(dim=1)", "(1 - odds).cumsum(dim=1)"),
            ("torch.stack([1 - bound, bound], dim=1)", "torch.stack([bound, 1 - bound], dim=1)"),
            ("torch.where(hope, (odds[:, column] / bound).clamp_max(1).nan_to_num(0.0), 0.0)", "torch.where(hope, odds[:, column], 0.0)"),
            ("torch.where(hope, (odds[:, column] / bound).clamp_max(1).nan_to_num(0.0), 0.0)", "odds[:, column]"),
            ("probs / probs.sum(dim=1, keepdim=True))", "probs)"),
            ("others = (weights > 0) & (prescribed < 0)[:, None]", "others = weights > 0"),
            ("others = (weights > 0) & (prescribed < 0)[:, None]", "others = (prescribed < 0)[:, None] & (weights >= 0)",
             "ways of probability 0 are followed too, with the weight 0"),
            ("others.scatter_(1, decided[:, None], False)", "others"),
            ('assert key not in self.made, f"the verifier asked twice for {kind} {draw}"', "pass"),
            ("<= bound + 1e-12).all()", "<= bound + 1).all()"),
            ("if len(script.rows) > most:", "if False:", "only how many rows run at once"),
            ("torch.where(prescribed >= 0, self.weights, self.weights * taken)", "self.weights * taken"),
            ("self.weights[rows] * weights[rows, ways]", "weights[rows, ways]"),
            ("column = self._script.ways.get(key, self._free)[fork.rows]", "column = torch.full_like(fork.ways, -1)"),
            ("self._tossed[draw + column] = decides if before is None else before | decides", "pass"),
        ],
    }),
    Family("audit", ["tests/test_exact_audit.py"], {
        "audit/exact.py": [
            ("return 0.5 * float((probs - target).abs().sum())", "return float((probs - target).abs().sum())"),
            ("return 0.5 * float((probs - target).abs().sum())", "return 0.0"),
            ("sum((level + 1) * float(mass.sum())", "sum(level * float(mass.sum())"),
            ("codes, drafts.weights[found.rows] * found.weights", "codes, found.weights"),
            ("kept = (found.verdicts.paths >= 0).sum(dim=1) - 1", "kept = (found.verdicts.paths > 0).sum(dim=1)",
             "the root is the only node 0"),
            ("return self.tv < TOLERANCE", "return self.tv > TOLERANCE"),
            ("TOLERANCE = 1e-9", "TOLERANCE = 1e-2"),
        ],
    }),
]  # fmt: skip
