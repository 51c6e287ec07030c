"""What the console shows: the same answers for its page and as JSON."""
