"""Trees whose tokens are drawn on a device, for whoever can say there what follows: a draft model or a head."""
