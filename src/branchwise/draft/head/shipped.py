"""Heads that come with the package, by the weights that they were trained for."""

from __future__ import annotations

from pathlib import Path

from branchwise.backends.base import TargetInfo

FILES = {"277686ffc7544b73": "smollm2.safetensors"}
"""fingerprint of a target's weights (`TargetInfo.weights`) -> file of its head"""


def shipped_head(target: TargetInfo) -> Path | None:
    """The file of the head for a target, if there is one."""
    name = FILES.get(target.weights)
    return None if name is None else Path(__file__).with_name("data") / name
