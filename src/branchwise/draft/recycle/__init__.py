"""Token Recycling: the adjacency table of what the target found likely."""
