"""Chat: talk to a model with its tools."""
