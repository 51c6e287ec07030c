"""The front door of one replica: what its parts are, and how a request is admitted."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping

from app.core.outcomes import Ending
from app.core.settings.kinds import parse_aliases, parse_names, parse_sharing
from app.core.settings.router import RouterSettings
from app.door.access_log import AccessLog
from app.door.asked import PROMPTS
from app.door.door import Door, Patience
from app.door.errors import ContextTooLong
from app.door.last_errors import LastErrors
from app.door.lifecycle import Lifecycle
from app.door.metrics import Outcomes
from app.door.models import Model, Models
from app.door.prompts import PromptIds, Prompts
from app.door.record import Admission, RequestRecord
from app.door.tracing import Trace, Tracing
from app.door.upstream import Upstream
from app.http.supervisor import attempted, supervised
from app.router.prompt import Prompt, check_length
from app.router.routers import Routers

log = logging.getLogger(__name__)


class FrontDoor:
    """Models, their tokenizers and their engines, while `run` runs.

    door, prompts: only then.
    """

    door: Door
    prompts: Prompts

    def __init__(
        self, settings: RouterSettings, routers: Routers, tracing: Tracing, upstream: Upstream
    ) -> None:
        """upstream: closed when `run` ends."""
        self.models = Models(
            routers,
            parse_aliases(settings.model_alias),
            parse_sharing(settings.namespace_weights),
        )
        self.tracing = tracing
        self.settings = settings
        self._upstream = upstream
        self._routers = routers
        log = AccessLog(
            on=settings.access_log,
            hashes=settings.log_identities == "hash",
            replica=f"{socket.gethostname()}:{settings.port}",
        )
        self._last_errors = LastErrors(routers.runner, settings.namespace)
        self._outcomes = Outcomes(
            routers.own.telemetry.registry,
            log,
            self._last_errors,
            self.apart,
        )
        self._task_failures = routers.own.telemetry.task_failures
        self.keep_workers = self._outcomes.keep_workers

    def adopt(self, settings: RouterSettings) -> None:
        """Go by these from now on, as far as app/edge/live.py names them; log what of them has no
        effect."""
        self.settings = settings
        self.models.adopt(
            parse_aliases(settings.model_alias), parse_sharing(settings.namespace_weights)
        )
        for remark in self.models.remarks():
            log.warning("%s", remark)

    async def run(self) -> None:
        """Run until cancelled."""
        settings, upstream = self.settings, self._upstream
        try:
            patience = Patience(
                settings.answer_timeout_s, settings.whole_timeout_s, settings.gap_timeout_s
            )
            self.door = Door(upstream, patience, settings.kv_lease_s)
            async with asyncio.TaskGroup() as tasks:

                def beside(task: str, run: Callable[[], Awaitable[object]]) -> asyncio.Task[None]:
                    return tasks.create_task(attempted(task, run, self._task_failures))

                sources = parse_names(settings.tokenizers)
                self.prompts = Prompts(upstream, sources, settings.worker_key, beside)
                tasks.create_task(self.models.run())
                for name, run in self.door.tasks.items():
                    tasks.create_task(supervised(name, run, self._task_failures))
                telling = supervised("last_errors", self._last_errors.run, self._task_failures)
                tasks.create_task(telling)
        finally:
            await upstream.close()
            await asyncio.to_thread(self.tracing.close)

    def reported(self, model: str, ending: Ending | None, *, has_failed: bool) -> None:
        """Count a request that its client has carried."""
        self._outcomes.reported(model, ending, has_failed=has_failed)

    def ended(self, record: RequestRecord) -> None:
        """Tell of a request, and learn from it."""
        self._outcomes.ended(record)
        if (used := record.used) is not None:
            router = record.model.router if record.model is not None else self._routers.own
            router.count(*used)
        if record.spending is not None:
            self._routers.own.limiter.ended(record.spending, *record.spent)
        admitted, usage = record.admitted, record.usage
        if admitted is not None and admitted.media is not None and usage and not usage.by_router:
            self.prompts.learn(admitted.model, admitted.media, usage.prompt)

    def apart(self) -> Mapping[str, bool]:
        """Of each model, whether its tokenizer here is another than its engines'."""
        return self.prompts.apart() if hasattr(self, "prompts") else {}

    def remarks(self) -> list[str]:
        """What is not as it should be, although requests are answered: `<what>: <why>` each."""
        not_tokenized = self.prompts.state() if hasattr(self, "prompts") else {}
        live = {model.name for model in self.models}
        told = [name for name in not_tokenized if name in live]
        said = [f"tokenizer of {name}: {not_tokenized[name]}" for name in told]
        return [*self.models.remarks(), *said, *self._outcomes.alarm.remarks()]

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
        request.part_tokens = ids.part_tokens
        request.trail = ids.trail
        request.exclude = model.others
        request.output_tokens = max(1, asked.output_room)
        request.context_tokens = _context(model, ids, asked.output_room)
        admitted = Admission(request, model, prompt, ids.tokens_from, ids.media)
        return Lifecycle(admitted, record, trace)


def _context(model: Model, ids: PromptIds, output_room: int) -> int:
    """Tokens that an engine must take; 0: any may do.

    What fits nowhere goes where most fits: how to say so, or to shorten the answer, is up to the
    engine.
    """
    longest, most = model.max_tokens, ids.bound if ids.ids is None else ids.num_tokens
    if most is None:
        return longest
    return min(most + output_room, longest) if longest else most + output_room
