"""Ways to change the size of a fleet."""
