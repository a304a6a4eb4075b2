"""`branchwise train data`, `student`, `nested`, `merge` and `prune-experts`: draft models made for a target."""
