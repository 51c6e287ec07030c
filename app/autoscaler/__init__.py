"""The planner's shell: what it sees in Redis, which planner leads, and how a fleet is changed."""
