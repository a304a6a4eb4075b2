"""What requests and answers look like, and what they mean to the engine."""
