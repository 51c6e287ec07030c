"""KV blocks on their way from one worker process to another."""
