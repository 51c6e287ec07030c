"""One router replica."""
