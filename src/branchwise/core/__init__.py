"""What all other folders build on: trees, batches of trees, probabilities, sampling, randomness, sequences, text."""
