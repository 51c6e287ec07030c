"""Sources of engines, so that one agent process is the agent of many."""
