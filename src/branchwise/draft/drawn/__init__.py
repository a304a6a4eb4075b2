"""Trees whose tokens are drawn on a device, from the logits of a draft model or a head."""
