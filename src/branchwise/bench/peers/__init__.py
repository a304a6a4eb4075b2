"""Peers: other engines as contestants.

    transformers                        `generate` of transformers on the same weights
    transformers-static                 the same with a KV cache of fixed size and compiled passes, its own fast path
    transformers-lookup[:tokens=10]     the same with its prompt lookup
    transformers-assisted:MODEL         the same with a smaller model that drafts
    llama.cpp[:PATH.gguf]               llama.cpp in this process, by the package xllamacpp
    openai:URL[,model=NAME]             any OpenAI-compatible server

A peer starts from the same token ids, is asked for the same number of tokens, and is timed like every contestant. To
add a peer, write a class like these in a file of its own, and a line in `PEERS`.
"""

from __future__ import annotations

from branchwise.bench.contest import Contestant
from branchwise.errors import UsageError
from branchwise.llm import LLM
from branchwise.registry import Registry

PEERS = Registry(
    "peer",
    {
        "llama.cpp": "branchwise.bench.peers.llamacpp:LlamaCpp",
        "openai": "branchwise.bench.peers.openai:OpenAI",
        "transformers": "branchwise.bench.peers.transformers:Plain",
        "transformers-assisted": "branchwise.bench.peers.transformers:Assisted",
        "transformers-lookup": "branchwise.bench.peers.transformers:Lookup",
        "transformers-static": "branchwise.bench.peers.transformers:Static",
    },
)


def build_peer(spec: str, llm: LLM, *, threads: int | None = None) -> Contestant:
    """The peer of a spec, for the model that `llm` runs; `threads` are for peers with threads of their own."""
    name, colon, place = (part.strip() for part in spec.partition(":"))
    part = PEERS.find(name)
    if part.usage is None:
        return PEERS.build(spec, name=spec, llm=llm, threads=threads)  # type: ignore[no-any-return]
    # The rest is one path or address, which may itself contain ':', ',' and '='.
    if colon and not place:
        raise UsageError(f"Nothing follows the colon of {spec!r}; write it as {part.usage}.")
    return part(place or None, name=spec, llm=llm, threads=threads)  # type: ignore[no-any-return]
