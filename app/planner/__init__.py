"""How many workers a fleet has: `rules` decides, without I/O; the rest observes the fleet in Redis,
settles which planner leads, and has the fleet changed."""
