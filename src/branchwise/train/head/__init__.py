"""Training of heads that draft from the hidden states of their target."""
