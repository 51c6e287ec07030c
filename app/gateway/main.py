"""Runs an endpoint picker: a router replica that gateways ask."""

from __future__ import annotations

import socket
from collections.abc import Callable

from app.core.settings.picker import PickerSettings
from app.edge.app import Application, serve_router
from app.gateway.processor import Processor


async def serve(
    settings: PickerSettings,
    listening: socket.socket,
    *,
    file: str = "",
    read: Callable[[], PickerSettings] | None = None,
) -> None:
    """Run until it is told to stop. Raises as serve_router; ConfigError if `grpc_port` cannot be
    had."""

    def beside(app: Application) -> Processor:
        return Processor(app, settings)

    await serve_router(settings, listening, file=file, read=read, beside=beside)
