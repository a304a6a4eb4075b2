"""Token Recycling: an adjacency table of the tokens that the target found probable after each token."""
