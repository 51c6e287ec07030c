"""The router over HTTP."""
