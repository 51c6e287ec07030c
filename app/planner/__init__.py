"""Size of a fleet: `rules` decides, without I/O; the rest observes the fleet in Redis,
settles which planner leads, and has the fleet changed."""
