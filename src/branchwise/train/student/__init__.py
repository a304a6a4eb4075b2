"""Students: draft models that learn the distributions of a target (DistillSpec), with one exit or several (S2D)."""
