"""Text generation with the sharded model: caches of keys and values, sampling, and requests in one batch."""
