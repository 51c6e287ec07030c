"""The front door of one replica: what its parts are, and how a request is admitted."""

from __future__ import annotations

import asyncio
import socket

from app.core.router_settings import RouterSettings
from app.core.settings import parse_names
from app.door.access_log import AccessLog
from app.door.asked import PROMPTS
from app.door.door import Door, Patience
from app.door.errors import ContextTooLong
from app.door.lifecycle import Lifecycle
from app.door.metrics import Outcomes
from app.door.models import Models
from app.door.prompts import PromptIds, Prompts
from app.door.record import Admitted, RequestRecord
from app.door.tracing import Trace, Tracing
from app.door.upstream import Upstream
from app.router.prompt import Prompt, check_length
from app.router.routers import Routers


class FrontDoor:
    """Models, their tokenizers and their engines, while `run` runs.

    door, prompts: only then.
    """

    door: Door
    prompts: Prompts

    def __init__(self, settings: RouterSettings, routers: Routers, tracing: Tracing) -> None:
        self.models = Models(routers, settings.redis_timeout_ms / 1000)
        self.tracing = tracing
        self.settings = settings
        log = AccessLog(
            on=settings.access_log,
            hashes=settings.log_identities == "hash",
            replica=f"{socket.gethostname()}:{settings.port}",
        )
        self._outcomes = Outcomes(
            routers.own.telemetry.registry,
            log,
            lambda: self.prompts.apart() if hasattr(self, "prompts") else {},
        )
        self.ended = self._outcomes.ended
        self.keep_workers = self._outcomes.keep_workers

    async def run(self) -> None:
        """Run until cancelled."""
        settings = self.settings
        upstream = Upstream()
        try:
            self.prompts = Prompts(upstream, parse_names(settings.tokenizers), settings.worker_key)
            patience = Patience(settings.answer_timeout_s, settings.gap_timeout_s)
            self.door = Door(upstream, patience, settings.kv_lease_s)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.models.run())
                tasks.create_task(self.door.run())
        finally:
            await upstream.close()
            await asyncio.to_thread(self.tracing.close)

    def remarks(self) -> list[str]:
        """What is not as it should be, although requests are answered: `<what>: <why>` each."""
        not_tokenized = self.prompts.state() if hasattr(self, "prompts") else {}
        said = [f"tokenizer of {model}: {why}" for model, why in not_tokenized.items()]
        return said + self._outcomes.alarm.remarks()

    def admit(self, record: RequestRecord, ids: PromptIds, trace: Trace) -> Lifecycle:
        """Let a request in of which all is known. Raises InvalidRequest, as ContextTooLong is."""
        request, model, asked = record.request, record.model, record.asked
        assert request is not None
        assert model is not None
        assert asked is not None
        prompt = None
        if ids.ids is not None:
            field, num_tokens = PROMPTS[asked.api], ids.num_tokens
            if 0 < model.max_tokens <= num_tokens:
                raise ContextTooLong(field, model.max_tokens, str(num_tokens))
            check_length(field, num_tokens, self.settings.max_prompt_tokens)
            prompt = Prompt(
                ids.num_tokens,
                tokens=ids.ids,
                lora_name=model.lora_name,
                # One of its own is cached nowhere.
                cache_namespace=(
                    asked.cache_salt or None if asked.reads_cache else request.request_id
                ),
            )
        request.isl_tokens, request.is_blind = ids.num_tokens, ids.ids is None
        request.exclude = model.others
        admitted = Admitted(request, model, prompt, ids.tokens_from)
        return Lifecycle(admitted, record, trace)
