# ruff: noqa: N803, N806  (P, Q, A, X, K are the letters of the papers)
"""The slow truth: every verifier as its paper reads, and every outcome of it with its exact probability.

One recursive function per verifier, in float64, for one sequence, on distributions small enough to enumerate. Nothing
here is imported from Branchwise, so that a fast verifier and its truth cannot share a mistake.

    prefix  tuple of tokens below the root; () is the root
    p, q    rows over the vocabulary; p(u) follows prefix u in the target, q(u) is what the children of u were drawn
            from. Verifiers take p and q as functions of the prefix, so any small tree will do.
    draft   tuple of prefixes in draw order: K paths with their repeats, or the members of a tree. The children of a
            node are the distinct next tokens of the members that run through it, in order of first appearance: a
            list of i.i.d. paths read as a tree is that list with repeats dropped.
    chance  answers `coin(probability)` and `draw(distribution)`; `outcomes` follows every answer it could give.

A verifier is called as verifier(p, q, draft, chance) and returns the accepted prefix and the token after it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol, TypeVar

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

Prefix = tuple[int, ...]
Row = np.ndarray
Probs = Callable[[Prefix], Row]
Draft = tuple[Prefix, ...]
Drafts = Iterable[tuple[float, Draft]]
Verdict = tuple[Prefix, int]
Result = TypeVar("Result")


class Chance(Protocol):
    def coin(self, probability: float) -> bool: ...
    def draw(self, probs: Row) -> int: ...


Verifier = Callable[[Probs, Probs, Draft, Chance], Verdict]


# Instances

KINDS = ("plain", "ties", "zeros", "one-hot", "end")
END = 0
"""the token that nothing but itself follows, in instances of kind "end" """


@dataclass(frozen=True, eq=False)
class Instance:
    """Target and draft distributions of every prefix, and how many paths of which depth are drafted."""

    V: int
    L: int
    K: int
    p: dict[Prefix, Row]
    """prefixes of length 0 to L"""
    q: dict[Prefix, Row]
    """prefixes of length 0 to L - 1"""

    @classmethod
    def from_case(cls, case: dict[str, Any]) -> Instance:
        """From the JSON form, whose keys are comma-joined tokens, "" for the root."""

        def probs(rows: dict[str, list[float]]) -> dict[Prefix, Row]:
            return {tuple(map(int, key.split(","))) if key else (): np.array(row) for key, row in rows.items()}

        return cls(case["V"], case["L"], case["K"], probs(case["p"]), probs(case["q"]))

    @classmethod
    def random(cls, V: int, L: int, K: int, sigma: float, seed: int, kind: str = "plain") -> Instance:
        """p flat on the simplex, q = softmax(log p + sigma N(0, 1)): sigma 0.3 is close, 1 medium, 2 far.

        The awkward kinds: "ties" has exactly equal p/q among unequal tokens, "zeros" has tokens that only p, only q
        or neither can emit, in "one-hot" every second distribution is certain, in "end" nothing but END follows END.
        """
        assert kind in KINDS, kind
        rng = np.random.default_rng(seed)
        p, q = {}, {}
        for u in prefixes(V, L):
            p[u], q[u] = _random_pair(V, sigma, rng, kind)
            if kind == "end" and END in u:
                p[u] = q[u] = np.eye(V)[END]
        return cls(V, L, K, p, {u: row for u, row in q.items() if len(u) < L})


def _random_pair(V: int, sigma: float, rng: np.random.Generator, kind: str) -> tuple[Row, Row]:
    if kind == "ties":  # powers of two keep their exact ratios when divided by a common sum
        power = rng.integers(0, 3, V)
        return normalise(2.0**power), normalise(2.0 ** (power + np.rint(sigma * rng.normal(size=V))))
    p = rng.dirichlet(np.ones(V))
    q = normalise(p * np.exp(sigma * rng.normal(size=V)))
    if kind == "zeros":
        p, q = (normalise(np.where(_some(V, rng), row, 0.0)) for row in (p, q))
    if kind == "one-hot":
        p, q = (np.eye(V)[rng.integers(V)] if rng.random() < 0.5 else row for row in (p, q))
    return p, q


def _some(V: int, rng: np.random.Generator) -> Row:
    """(V,) bool: each token with probability one half, and one of them surely."""
    chosen = rng.random(V) < 0.5
    chosen[rng.integers(V)] = True
    return chosen


def prefixes(V: int, L: int) -> Iterator[Prefix]:
    """Every prefix of length 0 to L, shortest first."""
    return itertools.chain.from_iterable(itertools.product(range(V), repeat=length) for length in range(L + 1))


def joint(probs: dict[Prefix, Row], u: Prefix, start: int = 0) -> float:
    """The probability that u[:start] is continued to u when every token is drawn from the distribution before it."""
    return float(np.prod([probs[u[:i]][u[i]] for i in range(start, len(u))]))


# Drafts: every one that can be drawn, with its probability


def iid_paths(instance: Instance, K: int | None = None) -> Iterator[tuple[float, Draft]]:
    """K independent paths of full depth; K of the instance unless given."""
    paths = [(joint(instance.q, x), x) for x in itertools.product(range(instance.V), repeat=instance.L)]
    possible = [(weight, x) for weight, x in paths if weight > 0]
    for drawn in itertools.product(possible, repeat=K or instance.K):
        yield float(np.prod([weight for weight, _ in drawn])), tuple(x for _, x in drawn)


def one_path(instance: Instance) -> Iterator[tuple[float, Draft]]:
    return iid_paths(instance, K=1)


def rsd_c(instance: Instance, branching: Sequence[int] | None = None) -> Iterator[tuple[float, Draft]]:
    """Children without replacement, so many at each level (K, 1, ..., 1 unless given), fewer where q has fewer."""
    widths = branching or (instance.K, *[1] * (instance.L - 1))

    def below(u: Prefix) -> Iterator[tuple[float, Draft]]:
        if len(u) == len(widths):
            yield 1.0, (u,)
            return
        for weight, tokens in without_replacement(instance.q[u], widths[len(u)]):
            for branches in itertools.product(*[list(below((*u, t))) for t in tokens]):
                yield weight * float(np.prod([w for w, _ in branches])), sum((draft for _, draft in branches), ())

    return below(())


def without_replacement(probs: Row, k: int) -> Iterator[tuple[float, Prefix]]:
    """k tokens in draw order, or all that the distribution carries."""
    if k == 0 or not probs.any():
        yield 1.0, ()
        return
    for t in np.flatnonzero(probs):
        left = np.where(np.arange(len(probs)) == t, 0.0, probs)
        for weight, rest in without_replacement(left, k - 1):
            yield float(probs[t] / probs.sum()) * weight, (int(t), *rest)


def rsd_s(instance: Instance) -> Iterator[tuple[float, Draft]]:
    """Stochastic beam search: level l holds the first K prefixes of length l met when leaves are drawn without
    replacement.

    K leaves come first. Where they have fewer than K parents, the next parents to be met are drawn without replacement
    from those not met yet, whatever leaves were met in between; then their parents, up to the root.
    """

    def grow(level: int, draft: Draft) -> Iterator[tuple[float, Draft]]:
        if level == 0:
            yield 1.0, draft
            return
        met = {u[:level] for u in draft}
        masses = {u: joint(instance.q, u) for u in itertools.product(range(instance.V), repeat=level) if u not in met}
        total = sum(masses.values())
        if len(met) == instance.K or total == 0:
            yield from grow(level - 1, draft)
            return
        for u, mass in masses.items():
            if mass > 0:
                for weight, grown in grow(level, (*draft, u)):
                    yield mass / total * weight, grown

    return grow(instance.L, ())


def nodes(draft: Draft) -> set[Prefix]:
    """The tree that the members of a draft form, root included."""
    return {x[:length] for x in draft for length in range(len(x) + 1)} | {()}


def candidates(draft: Draft, u: Prefix) -> list[int]:
    """The next token of every member that runs through u, in draw order, repeats kept."""
    return [x[len(u)] for x in draft if len(x) > len(u) and x[: len(u)] == u]


def children(draft: Draft, u: Prefix) -> list[int]:
    """The candidates at u with repeats dropped in order of first appearance."""
    return list(dict.fromkeys(candidates(draft, u)))


# Every outcome of a random program


class GraphedFunction:
    """Gives the scripted answers, after them the first possible one, and remembers those it did not give."""

    def __init__(self, script: tuple[int, ...] = ()) -> None:
        self.script = script
        self.answers: tuple[int, ...] = ()
        self.untaken: list[tuple[int, ...]] = []
        self.weight = 1.0

    def coin(self, probability: float) -> bool:
        assert -1e-9 < probability < 1 + 1e-9, probability
        heads = min(max(float(probability), 0.0), 1.0)
        return bool(self._answer([1 - heads, heads]))

    def draw(self, probs: Row) -> int:
        weights = probs.tolist()
        assert min(weights) >= 0, probs
        assert abs(sum(weights) - 1) < 1e-9, probs
        return self._answer(weights)

    def _answer(self, weights: list[float]) -> int:
        turn = len(self.answers)
        if turn < len(self.script):
            answer = self.script[turn]
        else:
            answer, *others = (i for i, weight in enumerate(weights) if weight > 0)
            self.untaken += [(*self.answers, other) for other in others]
        self.answers += (answer,)
        self.weight *= weights[answer]
        return answer


def outcomes(program: Callable[[Chance], Result]) -> Iterator[tuple[float, Result]]:
    """Every way a program can go, with its probability."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        chance = GraphedFunction(scripts.pop())
        result = program(chance)
        scripts += chance.untaken
        yield chance.weight, result


@dataclass(frozen=True)
class Emitted:
    """What a verifier makes of the drafts of an instance, without any sampling error."""

    verdicts: dict[tuple[Draft, Prefix, int], float]
    """the probability, given the draft, of each accepted prefix and token after it"""
    probs: dict[Prefix, float]
    """the first L + 1 tokens: those of the verdict, then the target's own"""
    total_variation: float
    """distance of that distribution to the target's; 0 up to rounding where the verifier is lossless"""
    block_efficiency: float
    """the mean number of emitted tokens: 1 + the mean length of the accepted prefix"""


def emitted_probs(instance: Instance, verifier: Verifier, drafts: Drafts) -> Emitted:
    p, q = instance.p.__getitem__, instance.q.__getitem__
    verdicts: dict[tuple[Draft, Prefix, int], float] = defaultdict(float)
    blocks: dict[Prefix, float] = defaultdict(float)
    for draft, weight in merged(drafts).items():
        for probability, (u, y) in outcomes(lambda chance, draft=draft: verifier(p, q, draft, chance)):
            verdicts[draft, u, y] += probability
            blocks[*u, y] += weight * probability

    texts = list(itertools.product(range(instance.V), repeat=instance.L + 1))
    probs = {
        x: sum(blocks.get(x[:n], 0.0) * joint(instance.p, x, start=n) for n in range(1, len(x) + 1)) for x in texts
    }
    return Emitted(
        verdicts=dict(verdicts),
        probs=probs,
        total_variation=sum(abs(probs[x] - joint(instance.p, x)) for x in texts) / 2,
        block_efficiency=sum(len(block) * mass for block, mass in blocks.items()),
    )


def merged(drafts: Drafts) -> dict[Draft, float]:
    """Equal drafts as one."""
    weights: dict[Draft, float] = defaultdict(float)
    for weight, draft in drafts:
        weights[draft] += weight
    return dict(weights)


# Rules on rows, remembered: thousands of replays ask for the same few

Rule = TypeVar("Rule", bound=Callable[..., Any])


def remembered(rule: Rule) -> Rule:
    """A function of rows and numbers that computes each answer once."""
    answers: dict[tuple[Any, ...], Any] = {}

    @wraps(rule)
    def remember(*arguments: Any) -> Any:
        key = tuple(a.tobytes() if isinstance(a, np.ndarray) else a for a in arguments)
        if key not in answers:
            answers[key] = rule(*arguments)
        return answers[key]

    return remember  # type: ignore[return-value]


# One path


def token(p: Probs, q: Probs, paths: Draft, chance: Chance) -> Verdict:
    """Token verification (Leviathan et al. 2023; Chen et al. 2023) of the first path."""
    x = paths[0]
    for i, t in enumerate(x):
        P, Q = p(x[:i]), q(x[:i])
        if not chance.coin(min(1, P[t] / Q[t])):
            return x[:i], chance.draw(residual(P, Q))
    return x, chance.draw(p(x))


def block(p: Probs, q: Probs, paths: Draft, chance: Chance) -> Verdict:
    """Block verification (Sun et al. 2025) of the first path."""
    x = paths[0]
    i, probs = accept_block(x, p, [q(x[:i]) for i in range(len(x))], chance)
    return x[:i], chance.draw(probs)


def accept_block(x: Prefix, p: Probs, rows: Sequence[Row], chance: Chance) -> tuple[int, Row]:
    """How much of x block verification accepts when x[i] was drawn from rows[i], and the distribution of the token
    after it."""
    w = [1.0]
    for i, t in enumerate(x):
        w.append(min(1.0, w[i] * p(x[:i])[t] / rows[i][t]))
    if chance.coin(w[-1]):
        return len(x), p(x)
    for i in reversed(range(1, len(x))):
        S = np.maximum(w[i] * p(x[:i]) - rows[i], 0).sum()
        # w = 1 and S = 0: p and q agree here. Whoever comes by stops, but no one comes by.
        if chance.coin(S / (S + 1 - w[i]) if S + 1 - w[i] > 0 else 1.0):
            return i, residual(p(x[:i]), rows[i], w[i])
    return 0, residual(p(()), rows[0])


def normalise(row: Row) -> Row:
    return row / row.sum()


def residual(P: Row, Q: Row, w: float = 1.0) -> Row:
    """What of w P is left when Q is taken away, normalised; P where nothing is left, which chance never leads to."""
    R = np.maximum(w * P - Q, 0)
    S = R.sum()
    return R / S if S > 0 else P


# K i.i.d. paths, as blocks


def gbv(p: Probs, q: Probs, paths: Draft, chance: Chance) -> Verdict:
    """Greedy multi-path block verification (Thomas & Pal 2026): the highest-ranked path, as a block."""
    return lambda_gbv(p, q, paths, chance, lam=0.0)


def lambda_gbv(p: Probs, q: Probs, paths: Draft, chance: Chance, lam: float | None = None) -> Verdict:
    """With probability lam the first path, else the highest, as a block drawn from the mixture of both
    distributions."""
    K = len(paths)
    if lam is None:
        lam = best_lam(p(()), q(()), K)
    s = paths[0] if chance.coin(lam) else highest(p, q, paths)
    i, probs = accept_block(s, p, mixture(p, q, s, K, lam), chance)
    return s[:i], chance.draw(probs)


def cascade(p: Probs, q: Probs, paths: Draft, chance: Chance, lam: float | None = None) -> Verdict:
    """Lambda-GBV that goes on after a stop, with the paths that are left and what is known about their distribution.

    A stage sees its own root as (): p(()) is what is wanted first, q(()) what the first tokens were drawn from.
    """
    if not paths or not paths[0]:
        return (), chance.draw(p(()))
    K, fixed = len(paths), lam
    if lam is None:
        lam = 1.0 if K == 1 else best_lam(p(()), q(()), K)
    first = chance.coin(lam)
    s = paths[0] if first else highest(p, q, paths)
    i, probs = accept_block(s, p, mixture(p, q, s, K, lam), chance)  # the same distribution whichever branch was taken
    v = s[:i]
    if i == len(s):
        return s, chance.draw(probs)
    if first:  # nothing more is known about the others; copies of s stay among them
        rest = tuple(x[i:] for x in paths[1:] if x[:i] == v)
        next_draft = q(v)
    else:  # they rank below s
        rest = tuple(x[i:] for x in paths if x[:i] == v and x[i] != s[i])
        rank = ranks(p(v), q(v))
        next_draft = np.where(rank < rank[s[i]], q(v), 0)
    if not rest:
        return v, chance.draw(probs)
    u, y = cascade(rerooted(p, v, probs), rerooted(q, v, normalise(next_draft)), rest, chance, fixed)
    return (*v, *u), y


def rerooted(probs: Probs, v: Prefix, first: Row) -> Probs:
    """The distributions below v as seen from v, with another distribution for the first token."""
    return lambda u: probs((*v, *u)) if u else first


LAMBDAS = (0.0, 0.25, 0.5, 0.75, 1.0)


@remembered
def best_lam(P: Row, Q: Row, K: int) -> float:
    """The lam whose mixture overlaps the target most at the root; of equals the smallest."""
    G, _ = skewed(P, Q, 0.0, 1.0, K)
    overlaps = [np.minimum(P, lam * Q + (1 - lam) * G).sum() for lam in LAMBDAS]
    return next(lam for lam, overlap in zip(LAMBDAS, overlaps, strict=True) if overlap > max(overlaps) - 1e-12)


@remembered
def ranks(P: Row, Q: Row) -> Row:
    """(V,) int: the place of each token when P/Q ascends, ties by token id. Where Q is 0 any place does."""
    with np.errstate(over="ignore"):
        ratio = np.divide(P, Q, out=np.zeros_like(P), where=Q > 0)
    rank = np.empty(len(P), dtype=int)
    rank[np.argsort(ratio, kind="stable")] = np.arange(len(P))
    return rank


def highest(p: Probs, q: Probs, paths: Draft) -> Prefix:
    """The path whose tokens rank highest, level by level."""
    left = paths
    for i in range(len(paths[0])):
        rank = ranks(p(left[0][:i]), q(left[0][:i]))
        best = max(rank[x[i]] for x in left)
        left = tuple(x for x in left if rank[x[i]] == best)
    return left[0]


@remembered
def skewed(P: Row, Q: Row, A: float, X: float, K: int) -> tuple[Row, Row]:
    """The distribution of the next token of the highest of K paths, and the mass of Q that ranks below each token.

    A : X is the mass of paths below the present prefix to the mass of those through it.
    """
    order = np.argsort(ranks(P, Q))
    lo = np.zeros_like(Q)
    lo[order[1:]] = np.cumsum(Q[order])[:-1]
    rl, rh, r0 = (A + X * lo) / (A + X), (A + X * (lo + Q)) / (A + X), A / (A + X)
    # (rh^K - rl^K) / (1 - r0^K) with the common factor taken out of both differences
    G = Q * sum(rh**j * rl ** (K - 1 - j) for j in range(K)) / sum(r0 ** (K - 1 - j) for j in range(K))
    return G, lo


def mixture(p: Probs, q: Probs, s: Prefix, K: int, lam: float) -> list[Row]:
    """Row i is the distribution of token i after s[:i] on a path that is the first with probability lam, else the
    highest."""
    rows = []
    A, X = 0.0, 1.0
    a, b = 1.0, 1.0  # the probability of s[:i] as the first path and as the highest
    for i, t in enumerate(s):
        P, Q = p(s[:i]), q(s[:i])
        G, lo = skewed(P, Q, A, X, K)
        rows.append((lam * a * Q + (1 - lam) * b * G) / (lam * a + (1 - lam) * b))
        A, X = A + X * lo[t], X * Q[t]
        A, X = A / (A + X), X / (A + X)
        a, b = a * Q[t], b * G[t]
    return rows


# Node by node from the root


def match(p: Probs, q: Probs, draft: Draft, chance: Chance, u: Prefix = ()) -> Verdict:
    """Draw from the target and walk while the tree holds the token; exact for any tree."""
    t = chance.draw(p(u))
    if t in candidates(draft, u):
        return match(p, q, draft, chance, (*u, t))
    return u, t


def mss(p: Probs, q: Probs, paths: Draft, chance: Chance, u: Prefix = ()) -> Verdict:
    """Recursive rejection with replacement (SpecInfer, Miao et al. 2024; MCSD, Yang et al. 2024)."""
    P, drawn = p(u), candidates(paths, u)
    if not drawn:
        return u, chance.draw(P)
    Q = q(u)
    for t in drawn:
        if chance.coin(min(1, P[t] / Q[t])):
            return mss(p, q, paths, chance, (*u, t))
        P = residual(P, Q)
    return u, chance.draw(P)


def rrs(p: Probs, q: Probs, tree: Draft, chance: Chance, u: Prefix = ()) -> Verdict:
    """Recursive rejection without replacement (RSD, Jeon et al. 2024; MCSD; Sequoia)."""
    P, drawn = p(u), children(tree, u)
    if not drawn:
        return u, chance.draw(P)
    Q = q(u)
    for t in drawn:
        if chance.coin(min(1, P[t] / Q[t])):
            return rrs(p, q, tree, chance, (*u, t))
        P, Q = residual(P, Q), without(Q, t)
    return u, chance.draw(P)


def without(Q: Row, t: int) -> Row:
    """Q after t was tried, normalised; all zero after the last."""
    left = Q.copy()
    left[t] = 0
    return normalise(left) if left.any() else left


def k_seq(p: Probs, q: Probs, paths: Draft, chance: Chance, u: Prefix = ()) -> Verdict:
    """SpecTr's k-sequential selection (Sun et al. 2023), with rho solved anew for the paths through each node."""
    P, drawn = p(u), candidates(paths, u)
    if not drawn:
        return u, chance.draw(P)
    Q = q(u)
    rho = solve_rho(P, Q, len(drawn))
    for t in drawn:
        if chance.coin(min(1, P[t] / (rho * Q[t]))):
            return k_seq(p, q, paths, chance, (*u, t))
    return u, chance.draw(residual(P, rho * Q))


@remembered
def solve_rho(P: Row, Q: Row, m: int) -> float:
    """The rho in [1, m] with 1 - (1 - beta)^m = rho beta, where beta = sum min(P / rho, Q); m where beta is 0."""
    low, high = 1.0, float(m)
    while low < (rho := (low + high) / 2) < high:  # until no float lies between
        beta = np.minimum(P / rho, Q).sum()
        if 1 - (1 - beta) ** m >= rho * beta:  # the left side falls with rho, the right one rises
            low = rho
        else:
            high = rho
    return high


# Bottom-up


def traversal(p: Probs, q: Probs, tree: Draft, chance: Chance) -> Verdict:
    """Traversal verification (Weng et al. 2025): children before their parent, siblings in draw order."""

    def visit(u: Prefix, alpha: float) -> Verdict | None:
        P, a, drawn = p(u), alpha, children(tree, u)
        Q = q(u) if drawn else P  # a leaf has no q, and needs none
        for t in drawn:
            if (verdict := visit((*u, t), min(1, a * P[t] / Q[t]))) is not None:
                return verdict
            S = np.maximum(a * P - Q, 0).sum()
            P, Q = residual(P, Q, a), without(Q, t)
            a = S / (S + 1 - a) if S + 1 - a > 0 else 1.0
        if u == () or chance.coin(a):
            return u, chance.draw(P)
        return None

    verdict = visit((), 1.0)
    assert verdict is not None
    return verdict


# What no verifier can pass


def lp_optimum(instance: Instance, drafts: Drafts) -> float:
    """The greatest block efficiency of any lossless verifier of these drafts, whatever it looks at.

    x(T, u) is the probability that T is drafted and exactly u accepted, A(u) = sum of x(T, v) over v below or at u.
    Lossless: A(uy) <= A(u) p(y|u).
    """
    trees: dict[frozenset[Prefix], float] = defaultdict(float)
    for weight, draft in drafts:
        trees[frozenset(nodes(draft))] += weight
    drafted = sorted(set().union(*trees) - {()})
    row_of = {u: row for row, u in enumerate(drafted)}
    variables = [(tree, u) for tree, T in enumerate(trees) for u in sorted(T)]
    upper, equal = [], []  # (row, column, value)
    for column, (tree, v) in enumerate(variables):
        equal.append((tree, column, 1.0))
        for u in (v[:n] for n in range(len(v) + 1)):  # A(u) counts x(T, v)
            if u:
                upper.append((row_of[u], column, 1.0))
            upper += [(row_of[uy], column, -instance.p[u][y]) for y in range(instance.V) if (uy := (*u, y)) in row_of]
    solution = linprog(
        c=[-len(u) for _, u in variables],
        A_ub=_sparse(upper, len(drafted), len(variables)),
        b_ub=np.zeros(len(drafted)),
        A_eq=_sparse(equal, len(trees), len(variables)),
        b_eq=list(trees.values()),
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert solution.success, solution.message
    return 1 - float(solution.fun)


def _sparse(entries: list[tuple[int, int, float]], rows: int, columns: int) -> coo_array:
    row, column, value = zip(*entries, strict=True)
    return coo_array((value, (row, column)), shape=(rows, columns))  # entries that meet are added
