"""A cluster in virtual time: no Redis, no HTTP and no clock, as fast as it computes."""
