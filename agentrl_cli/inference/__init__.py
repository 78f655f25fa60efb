"""The sampling engine: continuous batching over a paged KV cache, on CPU and GPU alike; imports no torch itself."""
