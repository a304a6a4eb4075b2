"""The worked tree of docs/how-it-works.md: two paths drafted for a real text, and what every verifier keeps of them.

    python docs/examples/worked_tree.py docs/images/worked-tree.png

The odds are exact: the code of each verifier is followed through every random decision on this one tree.
"""

import sys

import torch

import branchwise
from branchwise.audit.enumeration import Enumerator, outcomes
from branchwise.audit.instances import ExactProbs
from branchwise.core.batch import TreeBatch
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.target_probs import WarpedProbs
from branchwise.draft import build_drafter
from branchwise.draft.base import Budget
from branchwise.verify import VERIFIERS

TEXT = "The best thing about the sea is that"
SHOWN = ("token", "block", "mss", "traversal", "gbv", "cascade")


def main() -> None:
    llm = branchwise.load("smollm2", draft="none", dtype="float32", max_batch=1)
    drafter = build_drafter("disturbed:1.0", "paths:2x3")
    drafter.bind(llm.engine.target.info)
    sequence = SequenceState(llm.encode(TEXT, raw=True), SamplingParams(temperature=1.0, seed=7))
    llm.engine.target.open(sequence)
    batch = TreeBatch(drafter.draft([sequence], [Budget(16, 3)]))
    tree = batch.trees[0]
    scored = llm.engine.target.score([sequence], batch)
    p = WarpedProbs(scored.logits, batch, [sequence]).at(torch.arange(len(tree))[None])

    print(f"{TEXT} …")
    for node in range(1, len(tree)):
        parent, token = tree.parents[node], int(tree.tokens[node])
        wanted, drawn = float(p[0, parent, token]), float(tree.q[parent, token])
        name = "    " * tree.topology.depths[node] + repr(llm.decode([token]))
        paths = [number for number, path in enumerate(tree.paths, start=1) if node in path]
        print(f"{name:26} on path {paths}  p {wanted:.4f}  q {drawn:.4f}  p/q {wanted / drawn:.3f}")

    kept = {}
    for name in SHOWN:
        kept[name] = odds_of_keeping(VERIFIERS.build(name), batch, p)
        tokens = sum((length + 1) * weight for length, weight in enumerate(kept[name]))
        print(
            f"{name:10} keeps", "  ".join(f"{n}: {w:.3f}" for n, w in enumerate(kept[name])), f"  {tokens:.3f} tokens"
        )
    if len(sys.argv) > 1:
        draw(kept, sys.argv[1])


class Coins(Enumerator):
    """Follows every coin. The token after the accepted path is not enumerated: only the path is shown."""

    def pick(self, probs, draw=0):
        return probs.argmax(dim=-1)


def odds_of_keeping(verifier, batch, p) -> list[float]:
    odds = torch.zeros(batch.depth + 1, dtype=torch.float64)

    def verify(rows, chance):
        return verifier(batch.take(rows), ExactProbs(p[rows]), chance)

    for found in outcomes(verify, 1, chance=Coins):
        odds.index_add_(0, (found.verdicts.paths >= 0).sum(dim=1) - 1, found.weights)
    return odds.tolist()


def draw(kept: dict[str, list[float]], file: str) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 2.8))
    names = list(kept)[::-1]
    left = [0.0] * len(names)
    for length, colour in enumerate(("#d8dee6", "#9cc5b5", "#4fa083", "#1c6b50")):
        widths = [kept[name][length] for name in names]
        axis.barh(names, widths, left=left, color=colour, height=0.7, label=f"{length} kept")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, name in enumerate(names):
        tokens = sum((length + 1) * weight for length, weight in enumerate(kept[name]))
        axis.text(1.01, place, f"{tokens:.2f} tokens", va="center", fontsize=8)
    axis.set_xlim(0, 1.15)
    axis.set_title("What each verifier keeps of the worked tree (odds)", fontsize=9, loc="left")
    axis.legend(ncols=4, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
