"""The simulated engine, and a fleet of them in virtual time: no Redis, no HTTP, no clock."""
