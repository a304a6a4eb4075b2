"""How much of a device the KV cache may take."""

from __future__ import annotations

import os

import torch

from branchwise.errors import ModelError


def fitting_context(context: int, bytes_per_token: int, max_nodes: int, device: torch.device, *, asked: bool) -> int:
    """Shorten the context to what the device can hold, or say with numbers why it cannot."""
    free = free_memory(device)
    room = int(free * 0.8) // bytes_per_token - max_nodes
    if context <= room:
        return context
    if asked or room < 512:
        raise ModelError(
            f"Keys and values of {context} tokens need {context * bytes_per_token / 2**30:.1f} GiB and "
            f"{free / 2**30:.1f} GiB are free; ask for a context of at most {max(room, 0)} or for fewer slots."
        )
    return room


def free_memory(device: torch.device) -> int:
    """Bytes that a cache may take; on a host half the machine, since rows cost nothing until they are used."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):  # not every system has these names
        return 1 << 34
