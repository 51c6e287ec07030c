"""What runs in a worker or an agent beside the engine's requests."""

from __future__ import annotations

from app.http.supervisor import Tasks

FAILURES = Tasks().failures
"""Of this process: see app/http/supervisor.py."""
