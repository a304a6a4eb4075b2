"""`branchwise train data`, `student` and `nested`: draft models that are made for a target."""
