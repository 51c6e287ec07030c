"""Load generation, trace replay and benchmarks."""
