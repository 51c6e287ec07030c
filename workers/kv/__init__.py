"""The KV cache of our own engines: blocks, tiers, and copies between tiers."""
