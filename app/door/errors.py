"""What a request through the front door may end in besides an answer."""

from __future__ import annotations

from app.core.errors import InvalidRequest, KvrouteError, shown


class UnknownModel(KvrouteError):
    """No worker has ever announced a model of that name."""

    field = "model"

    def __init__(self, name: object) -> None:
        super().__init__(f"The model {shown(name)} does not exist.")


class ModelUnavailable(KvrouteError):
    """The model is known, but no worker that serves it is alive."""

    def __init__(self, model: str) -> None:
        super().__init__(f"No worker that serves {shown(model)} is alive.")
        self.model = model


class ContextTooLong(InvalidRequest):
    """The prompt has more tokens than the model takes. length: how many, in words."""

    def __init__(self, field: str, max_tokens: int, length: str) -> None:
        super().__init__(
            field,
            f"This model's maximum context length is {max_tokens} tokens, and the prompt has "
            f"{length}.",
        )


class NotTokenized(KvrouteError):
    """The ids of a prompt cannot be known here. reason: from a closed list, for metrics."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class WorkerFailed(KvrouteError):
    """A worker gave no answer, or one that another worker would not give."""


class RepeatedFailure(WorkerFailed):
    """Two workers have failed while they had a request: no third one is given it."""


class ClientStalled(KvrouteError):
    """The client has taken nothing of its answer for too long."""


class Unauthorized(KvrouteError):
    """A request carries no valid key."""
