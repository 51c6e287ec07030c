"""Engines a worker agent can host."""
