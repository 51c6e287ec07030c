"""Our own engines as vLLM shows itself: its KV events, metrics and HTTP interface."""
