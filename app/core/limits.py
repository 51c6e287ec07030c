"""Limits on what each member of a fleet may say. The writer keeps to them: what is over a limit is
left out and reported, and the rest counts. docs/engines.md has the same table."""

MAX_NAMES, MAX_NAME = 256, 256
"""Models, adapters or findings that a worker registers, and the characters of each."""
MAX_COUNT = 10**12
MAX_MEASURED = 1e15
"""Largest number that a worker measures: what is computed from such values stays finite."""
MAX_RANKS = 100_000
"""Data-parallel ranks of an engine: WorkerKey takes five digits."""
MAX_KV_HOSTS = 16
MAX_ANSWER_BYTES = 32 << 20
"""Bytes of an engine's answer to its agent: Prometheus text is 60 KB a rank."""
MAX_ENGINES = 64
MAX_ENGINES_BYTES = 1 << 20
MAX_MODELS, MAX_NAMESPACES = 10_000, 32
"""Names of models in all namespaces together, and namespaces that may claim one name."""
