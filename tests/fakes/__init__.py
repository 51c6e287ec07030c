"""One stand-in for all engines: facts, KV events, metrics, faults and dialects, on the wire."""
