"""Texts that follow a grammar: JSON of a schema, a regular expression, or a grammar of the user's own.

    Grammar      what a text may be, compiled for the tokens of a model; serves any number of requests
    Constraint   the grammar of one request: masks the logits after every node by what may follow the node's own path
    Place        where a path has led in the grammar: the tokens that may come next

A constraint is a processor of the sampling parameters. The target's distribution after a node is then that of plain
constrained decoding after the same tokens, masked and renormalised, so every lossless verifier keeps it whatever was
drafted. A drafter need not know the constraint; a drafter that does never drafts a forbidden token
(`draft/constrained.py`).
"""

from branchwise.constrain.constraint import Constraint, Place, constraint_of
from branchwise.constrain.grammar import Grammar, GrammarCompiler, Limits, check_grammar, compiler_for

__all__ = [
    "Constraint",
    "Grammar",
    "GrammarCompiler",
    "Limits",
    "Place",
    "check_grammar",
    "compiler_for",
    "constraint_of",
]
