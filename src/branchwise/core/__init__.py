"""What everything else speaks of: trees, their batches, probabilities, sampling, randomness, sequences."""
