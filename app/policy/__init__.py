"""Routing policy: pure functions from what a router sees to a worker. No I/O, no clock."""
