"""Training: small networks that learn from runs what a drafter is good at."""
