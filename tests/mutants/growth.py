# ruff: noqa: E501  (texts of the source stay in one piece)
"""Mutants of policies, which grow trees, and of what they draw."""

from __future__ import annotations

from tests.mutants.family import Family

FAMILIES = [
    Family("growth", [
        "tests/test_sampler.py",
        "tests/test_builder.py",
        "tests/test_policies.py",
        "tests/test_topk.py",
    ], {
        "draft/policies/paths.py": [
            ("nodes = budget.nodes - 1", "nodes = budget.nodes"),
            ("max(min(self.length, budget.depth, fits), 0)", "max(min(self.length, fits), 0)"),
            ("independent = self.common == 0 or self.count == 1", "independent = True"),
            ("paths if level >= self.common else paths[:1]", "paths"),
            ("level * self.count + path) for path in drawing", "level) for path in drawing"),
            ("level * self.count + path) for path in drawing", "path) for path in drawing"),
            ("nodes.index(ends[path])", "0"),
            ("if step not in children:", "if True:"),
            ("ends[path] = children[step]", "ends[path] = len(tree) - 1"),
        ],
        "draft/policies/rsd.py": [
            ("if len(tree) + len(level) * width > budget.nodes:", "if len(tree) + len(level) > budget.nodes:"),
            ("self.branching[: max(budget.depth, 0)]", "self.branching"),
            ("(place, (depth << 16) + place) for", "(place, depth << 16) for"),
            ("(place, (depth << 16) + place) for", "(place, place) for"),
            ("for token in order]", "for token in sorted(order)]"),
            ("time.append(now)", "time.append(-math.inf)"),
            ("math.log(rest.mass / whole[parent])", "0.0"),
            ("len(level) < self.width:\n                now", "len(level) <= self.width:\n                now"),
            ("(budget.nodes - 1) // self.width", "budget.nodes // self.width"),
            ("(self.length - 1) * (self.width // 2)", "0"),
        ],
        "draft/builder.py": [
            ("self.probs.update(zip(nodes, probs, strict=True))", "self.probs.update((node, probs[0]) for node in nodes)"),
        ],
        "draft/noisy_target.py": [
            ("torch.softmax(logits.float() / temperature + self.sigma * noise, dim=-1)", "torch.softmax(logits.float() + self.sigma * noise, dim=-1)"),
            ("torch.softmax(logits.float() / temperature + self.sigma * noise, dim=-1)", "torch.softmax(logits.float() / temperature, dim=-1)"),
            ("[*sequence.tokens, *tree.path(node)]", "[*sequence.tokens]"),
            ("logits[places[node]]", "logits[0]"),
        ],
        "draft/sampler.py": [
            ('key_of("draft", purpose', 'key_of("verify", purpose'),
            ("if sequence.sampling.temperature == 0:", "if False:"),
            ("if mass > 0]", "]"),
            ("left[token] = 0.0", "pass"),
            ("self.mass / before)", "1 - taken / before)"),
            ("self._left[self._out] = 0.0", "pass"),
            ("self._turn += 1", "pass"),
            ("list(enumerate(nodes)), [turns] * len(nodes))", "[(row, 0) for row in range(len(nodes))], [turns] * len(nodes))"),
        ],
        "draft/policies/dynamic.py": [
            ("heapq.heappush(slots, (value * share, 2 * child, child))", "heapq.heappush(slots, (value * rest, 2 * child, child))"),
            ("heapq.heappush(slots, (value * rest, 2 * child + 1, parent))", "heapq.heappush(slots, (value, 2 * child + 1, parent))"),
            ("if tree.depths[child] < budget.depth:", "if True:"),
            ("heapq.nsmallest(room, slots)", "heapq.nsmallest(1, slots)"),
            ("if -value * share >= least:", "if True:"),
            ("if rest > 0 and -value * rest >= least:", "if rest > 0:"),
            ("(drawn + unserved) / self.nodes", "drawn / self.nodes"),
            ("if unserved and drawn < self.nodes:", "if False:"),
            ("if sequence not in self._controllers:", "if not self._controllers:"),
        ],
        "draft/policies/topk.py": [
            ("min(math.log(mass), 0.0)", "math.log(mass)"),
        ],
    }),
    Family("replacement", ["tests/test_with_replacement.py", "tests/test_verify_recursive.py"], {
        "core/tree.py": [
            ("for node in self.draws or range(1, len(self)):", "for node in range(1, len(self)):"),
            ("for node in self.draws or range(1, len(self)):", "for node in sorted(self.draws) or range(1, len(self)):"),
            ("found[node][turn] = below", "found[node][0] = below"),
            ("found = [[-1] * len(self.leaves) for _ in self.parents]", "found = [[-1] for _ in self.parents]"),
        ],
        "draft/policies/iid.py": [
            ("if len(tree) + len(level) * count > budget.nodes:", "if len(tree) + len(level) > budget.nodes:"),
            ("self.draws[: max(budget.depth, 0)]", "self.draws"),
            ("(depth << 20) + place * count + turn)", "(depth << 20) + turn)"),
            ("(depth << 20) + place * count + turn)", "place * count + turn)"),
            ("if step not in children:", "if True:"),
            ("tree.draws.append(children[step])", "tree.draws.append(len(tree) - 1)"),
            ("level = list(children.values())", "level = list(children.values())[:1]"),
        ],
    }),
    Family("dice", ["tests/test_sampler.py", "tests/test_model_drafter_probs.py"], {
        "core/rng.py": [
            ("_first_int(blocks, mix_int(key))", "_first_int(blocks, key)"),
            ("wait_of(key + name * GAMMA) / mass", "wait_of(key + name * GAMMA) * mass"),
            ("blocks.get(token // BLOCK, 0.0) + mass", "mass"),
            ("if token // BLOCK == winner", "if True"),
        ],
        "draft/sparse.py": [
            ("if mass >= TINY", "if mass > 0"),
            ("if other != token", "if True"),
            ("mix_int(key + turn)", "key + turn"),
            ("reverse=True)[:k]", ")[:k]"),
            ("spread[row] = p", "pass"),
        ],
        "draft/sampler.py": [
            ("found = self.device_sampler.orders(probs, keys, max(sizes))", "found = self.device_sampler.orders(probs, keys, min(sizes))"),
            ("repeat(best[row][0])", "repeat(best[row][-1])"),
            ("race(probs, draws[:, 0], draws[:, 1])", "race(probs, draws[:, 0], draws[:, 1] * 0)"),
            ("if token >= 0]", "]"),
            ("key = mix_int(key + turn)", "key = mix_int(key)"),
            ("race(left, mix(keys + turn))", "race(left, mix(keys))"),
            ("left.scatter_(1, token, 0.0)", "pass"),
            ("return type(self), type(self.sampler), self.sizes is None", "return type(self.sampler), self.sizes is None"),
            ("JointSampler(seeded) if seeded else", "seeded[0] if seeded else"),
        ],
        "cuda/graphs.py": [
            ("place[: len(rows)].copy_(rows", "place[: len(rows)].add_(rows"),
        ],
        "draft/model/reading.py": [
            ("probs.clone() if self._replayed.fixed else probs", "probs"),
            ("None if trimmed or vocabulary.whole else vocabulary.columns", "None"),
        ],
    }),
    Family("ranks", ["tests/test_recycle.py", "tests/test_adaptive_ranks.py"], {
        "draft/recycle/drafter.py": [
            ("next((turn for turn in turns if token not in turn), None)", "next(iter(turns), None)"),
            ("torch.where(accepted, ACCEPTED, REJECTED) * real", "torch.where(accepted, REJECTED, REJECTED) * real"),
            ("self._expected = []", "pass"),
            ("left = max(PREFILL - len(logits), 0)", "left = 0"),
            ("*[PADDING] * left]", "*[ACCEPTED] * left]"),
        ],
        "draft/recycle/adjacency.py": [
            ("share = np.where(held.any(axis=1, keepdims=True), np.float32(rate), np.float32(1))", "share = np.full_like(before[:, :1], rate)"),
            ("join = np.where(known, 0, share * found.masses[rows])", "join = share * found.masses[rows]"),
            ("(best.numpy() * np.float32(HALF_DOWN))", "best.numpy()"),
        ],
        "draft/policies/adaptive.py": [
            ("self._hits[places[list(verdict.path)]] += 1", "self._hits[list(verdict.path)] += 1"),
            ("self._tries[places] += 1", "self._tries[: len(places)] += 1"),
            ("tokens = [1.0, *(1 + float(gained[size - 1])", "tokens = [1.0, *(1 + float(gained[size])"),
            ("if untried or not costs.knows_plain:", "if untried:"),
            ("self._wanted, self._turn = untried[0] if untried else 0, 0", "self._wanted, self._turn = 0, 0"),
        ],
    }),
]  # fmt: skip
