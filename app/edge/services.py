"""What the endpoints of a router replica share."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from app.console.console import Console
from app.core.router_settings import RouterSettings
from app.door.front import FrontDoor
from app.edge.keys import Keys, check_open
from app.edge.large import BodyReader
from app.router.router import Router
from app.router.routers import Routers


@dataclass(slots=True)
class Services:
    """What the endpoints of one replica use.

    settings: `adopt` changes those that app/edge/live.py names.
    """

    settings: RouterSettings
    routers: Routers
    door: FrontDoor
    keys: Keys
    bodies: BodyReader
    console: Console | None
    """None: it is off."""

    @property
    def router(self) -> Router:
        """Of its own namespace."""
        return self.routers.own

    @property
    def block_size(self) -> int | None:
        """Tokens per block there; None: not known yet."""
        return self.routers.own.fleet.block_size

    def adopt(self, settings: RouterSettings) -> None:
        """Go by these settings from now on. Raises ConfigError, and then changes nothing."""
        given = (settings.api_key, settings.api_key_file, settings.metrics_key)
        new = Keys(*given)
        check_open(settings.host, new, no_auth=settings.no_auth)
        self.keys.change(*given)
        logging.getLogger().setLevel(settings.log_level.upper())
        self.settings = self.door.settings = settings
        self.bodies.max_tokens = settings.max_prompt_tokens
