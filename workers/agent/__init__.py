"""Reports of a worker to Redis."""
