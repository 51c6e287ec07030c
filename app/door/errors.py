"""Errors that a request through the front door may end in."""

from __future__ import annotations

from app.core.errors import InvalidRequest, KvrouteError, shown


class UnknownModel(KvrouteError):
    """No worker has ever announced a model of that name.

    alias: by which it was asked for.
    """

    field = "model"

    def __init__(self, name: object, alias: str = "") -> None:
        as_set = f" It is what model_alias has for {shown(alias)}." if alias else ""
        super().__init__(f"The model {shown(name)} does not exist.{as_set}")


class ModelUnavailable(KvrouteError):
    """The model is known, but no worker that serves it is alive.

    where: of those that may get its requests; "": anywhere.
    """

    def __init__(self, model: str, where: str = "") -> None:
        super().__init__(f"No worker that serves {shown(model)} is alive{where and f' {where}'}.")
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


class PathMissing(WorkerFailed):
    """No worker of the model has the path that was asked for."""


class AnswerTimeout(WorkerFailed):
    """No answer began, or came whole, in the time that there is for all tries."""


class Unreached(WorkerFailed):
    """No worker has had the request: none that it was for could be connected to."""


class RepeatedFailure(WorkerFailed):
    """Two workers have failed while they had a request: no third one is given it."""


class Stopping(KvrouteError):
    """The router ends, and this answer took longer than it waits."""

    def __init__(self) -> None:
        super().__init__("the router is stopping")
