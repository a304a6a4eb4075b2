"""Branchwise inside vLLM: its drafters, its verification and its log lines, without a change to vLLM's code.

    vllm serve MODEL --speculative-config '{"model": "branchwise.integrations.vllm.Proposer", …}'

`Proposer` is the class that vLLM builds there, and `register` the entry point `vllm.general_plugins`. `hooks.py` lists
the names that are used from vLLM; docs/vllm.md says what works and what does not.
"""

from branchwise.integrations.vllm.plugin import register
from branchwise.integrations.vllm.proposer import Proposer

__all__ = ["Proposer", "register"]
