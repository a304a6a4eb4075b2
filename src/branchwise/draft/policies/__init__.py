"""Tree policies: which nodes to expand, and when to stop."""
