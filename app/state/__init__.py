"""The shared state in Redis: one file a family of scripts."""
