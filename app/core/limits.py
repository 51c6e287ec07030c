"""How much each member of a fleet may say. Who writes keeps to it: what is over a limit is left
out and told, and the rest counts. docs/engines.md has the same table."""

MAX_NAMES, MAX_NAME = 256, 256
"""Models, adapters or findings that a worker registers, and characters of each."""
MAX_COUNT = 10**12
"""Of any number that a worker registers."""
MAX_MEASURED = 1e15
"""Of any number that a worker measures. What is computed from such values stays finite."""
MAX_RANKS = 100_000
"""Data-parallel ranks of an engine."""
MAX_KV_HOSTS = 16
"""Addresses at which others fetch an engine's KV."""
MAX_ANSWER_BYTES = 32 << 20
"""Of what an engine answers its agent: Prometheus text is 60 KB a rank."""
MAX_ENGINES = 64
"""That one process is the agent of."""
MAX_ENGINES_BYTES = 1 << 20
"""Of the file that --engines names."""
MAX_MODELS, MAX_NAMESPACES = 10_000, 32
"""Names of models in all namespaces together, and namespaces that may claim one."""
