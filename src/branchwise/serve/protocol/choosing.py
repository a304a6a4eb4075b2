"""The fields by which a request chooses its method or one of its specialists and asks to see its steps, and what may be
chosen.

A client names a preset, or a drafter, a tree and a verifier with small numbers as options. It never names a file, a
folder or a model: only the person who starts the server decides about those.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Annotated, Any

from pydantic import BaseModel, Field

from branchwise.draft import TREES, build_drafter, build_policy
from branchwise.draft.policies.template import SHAPES
from branchwise.errors import BranchwiseError, PairingError, UsageError
from branchwise.methods import BLANKS, HEAD, PRESETS, Method
from branchwise.registry import check_known, split_spec
from branchwise.serve.protocol.failures import Refusal, refusal_of
from branchwise.verify import VERIFIERS

DRAFTERS = {
    "none": "nothing: plain decoding, one token a pass",
    "ngram": "what followed the last tokens where they stood before in the text",
    "suffix": "what followed the longest repetition that ends the text",
    "recycle": "what the model last found likely after each token",
    "stand": "averaged distributions after the last few tokens",
    "trigram": "counts of three tokens, learned as texts are written",
    "memories": "several of these in one tree",
    "head": "a small network trained on the model's hidden states",
    "auto": "step by step the fastest that there is",
    "disturbed": "the model itself with noise: slow, made to watch verifiers",
}
VERIFY = {
    "match": "keep the drafted tokens that the model itself would have written",
    "token": "accept each token with the chance min(1, p / q)",
    "block": "accept the longest beginning of a path that keeps the distribution",
    "gbv": "choose the best of several paths, and accept it as a block",
    "lambda-gbv": "the same with a mixture that loses nothing if q is close to p",
    "cascade": "block verification of one path after another",
    "mss": "try the tokens below a node one after another, drawn with replacement",
    "rrs": "the same for tokens drawn without replacement",
    "traversal": "accept from the leaves upwards",
    "k-seq": "choose among independent paths token by token",
}
SHOWN_TREES = ("chain:4", "chain:8", "topk:12", "topk:24", "paced:24", "paths:2x4", "paths:4x4", "rsd-c:3,2,1,1")
"""trees that the server offers; requests may name others of the same kinds"""
NAMED_SHAPES = ("template", "ranks")
MOST_LETTERS = 80
MOST_NODES = 128
Spec = Annotated[str, Field(max_length=MOST_LETTERS)]

_NUMBER = r"\d{1,3}(?:\.\d{1,6})?"
_DRAFT = re.compile(rf"([a-z-]+)(?::(?:[a-z]+={_NUMBER})(?:,[a-z]+={_NUMBER})*)?")
_TREE = re.compile(rf"([a-z-]+)(?::((?:[a-z]+=)?{_NUMBER}(?:x\d{{1,3}})?(?:,(?:[a-z]+=)?{_NUMBER})*))?")


class Chosen(BaseModel):
    """What a request says about its method."""

    method: Spec | None = None
    draft: Spec | None = None
    tree: Spec | None = None
    verify: Spec | None = None
    task: Spec | None = None
    """what the text is about, where the draft model is a pack of specialists: this one of them drafts"""
    trace: bool | None = None
    """tell with every event of the stream what its steps looked like"""

    @property
    def chooses(self) -> bool:
        return any(part is not None for part in (self.method, self.draft, self.tree, self.verify))


def chosen(asked: Chosen, own: Method | None, head: str | None) -> Method | None:
    """The method of a request; None for the server's `own`. Refuses what clients may not name. `head` is the file of
    the trained head, if the server has one."""
    if not asked.chooses:
        return None
    try:
        if asked.method is not None and any(part is not None for part in (asked.draft, asked.tree, asked.verify)):
            raise UsageError("A method has a drafter, a tree and a verifier; give it, or these.")
        return None if own is not None and asked.method == own.name else _chosen(asked, head)
    except BranchwiseError as error:
        raise refusal_of(error, "method" if asked.method is not None else "draft") from None


def check_task(task: str | None, known: Sequence[str]) -> None:
    """Refuse a task without a specialist; the drafter has one for each task that is `known`."""
    if task is None:
        return
    try:
        if not known:
            raise UsageError("What drafts this text has no specialists; leave out task.")
        check_known("task", task, known)
    except BranchwiseError as error:
        raise refusal_of(error, "task") from None


def _chosen(asked: Chosen, head: str | None) -> Method:
    if asked.method in PRESETS:
        method = PRESETS[asked.method]
    else:
        parts: list[str | None] = [asked.draft, asked.tree, asked.verify]
        if asked.method is not None:
            words = asked.method.split("/")
            if len(words) == 1:  # most likely meant as the name of one
                check_known("method", words[0].partition(":")[0], [*_exact_presets(), *DRAFTERS])
            if len(words) > 3:
                raise UsageError("A method is the name of one, or draft/tree/verify.")
            parts = [word or None for word in [*words, "", ""][:3]]
        draft, tree, verify = parts
        if draft is None:
            raise UsageError("Name a drafter with draft, or a method.")
        _check(draft, tree, verify)
        method = Method("/".join(part or "" for part in parts).rstrip("/"), draft, tree, verify or "match")
    if not method.lossless:
        raise UsageError(f"{method.name} changes the distribution of the texts, and this server keeps it.")
    for name in method.blanks:
        if name != HEAD or head is None:
            raise UsageError(f"{method.name} drafts with {BLANKS[name].what}, which requests cannot name.")
    return method.drafting_with(head=head) if HEAD in method.blanks else method


def _check(draft: str, tree: str | None, verify: str | None) -> None:
    """Refuse a spec with anything but names and small numbers: no part of it may be a file, or ask for a huge tree."""
    found = _DRAFT.fullmatch(draft)
    check_known("drafter", found[1] if found else draft.partition(":")[0], DRAFTERS)
    if found is None:
        raise UsageError("A drafter is named with options that are numbers below 1000, as in ngram:max=4,min=2.")
    if verify is not None:
        check_known("verifier", verify, VERIFY)
    if tree is None:
        return
    name, given, options = split_spec(tree)
    check_known("tree", name, [known for known in TREES if known != "fork-lossy"])
    if name in NAMED_SHAPES and tree.partition(":")[2] in ("", *SHAPES):
        return
    if _TREE.fullmatch(tree) is None or name in (*NAMED_SHAPES, "paced-ranks"):
        raise UsageError("A tree is named with numbers, as in chain:8, topk:24,depth=6 or paths:4x6.")
    sizes = [float(number) for part in given for number in part.split("x")]
    if max(prod(size for size in sizes if size >= 1), *map(float, options.values()), 0.0) > MOST_NODES:
        raise UsageError(f"A tree has at most {MOST_NODES} nodes here.")


def offered(own: Method | None, head: str | None, lanes: int, tasks: Sequence[str] = ()) -> dict[str, Any]:
    """What requests may choose, for people and for the playground; each drafter with the trees and verifiers that
    fit."""
    names = [name for name in DRAFTERS if name != HEAD or head is not None]
    presets = [one for one in _exact_presets().values() if all(b == HEAD and head for b in one.blanks)]
    return {
        "serving": _described(own) if own is not None else None,
        "tasks": list(tasks),
        "lanes": lanes,
        "methods": [_described(one) for one in presets] if lanes else [],
        "drafters": [{"name": name, "about": DRAFTERS[name], "fits": fits(name)} for name in names] if lanes else [],
        "verifiers": VERIFY,
    }


def _exact_presets() -> dict[str, Method]:
    return {name: method for name, method in PRESETS.items() if method.lossless}


def _described(method: Method) -> dict[str, Any]:
    """A method without its model or file, whose path on this machine clients must not see."""
    known = PRESETS.get(method.name)
    about = {} if known is None else {"about": known.about, "paper": known.paper}
    drafter = known.draft if known is not None else split_spec(method.draft)[0]
    name = method.name if known is not None else drafter
    return {"name": name, "draft": drafter, "tree": method.tree, "verify": method.verify, **about}


@cache
def fits(draft: str) -> dict[str, list[str]]:
    """The trees that a drafter can grow ("" for its own tree), each with the verifiers that are exact for it."""
    found: dict[str, list[str]] = {}
    for tree in ("", *SHOWN_TREES):
        try:
            # A head takes its draw from the tree; its file need not be read to know that.
            draw = build_policy(tree or "topk:24").draw if draft == HEAD else build_drafter(draft, tree or None).draw
        except PairingError:
            continue
        found[tree] = [name for name in VERIFY if draw in VERIFIERS.find(name).accepts]
    return found


def refuse_choice() -> Refusal:
    said = "This server writes every text with its own method; it was started without lanes for others."
    return Refusal(400, said, param="method", code="unsupported_value")
