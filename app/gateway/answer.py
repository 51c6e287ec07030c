"""What is seen of a worker's answer as it passes. No I/O."""

from __future__ import annotations

from app.door import whole_answer
from app.door.forwarding import Outgoing, Parser
from app.door.stream import Whole
from app.gateway import messages

FIRST_BYTES = whole_answer.MAX_PARSED_BYTES
"""Of an answer that is no stream, by which it is judged."""
_DETAILS = "response.code_details"
_VIA_UPSTREAM = "via_upstream"


class GatewayAnswer:
    """As far as it has come.

    in_events: it is a stream. is_of_gateway: no worker answered, but the gateway in its place.
    sees_all: its body passes. is_refusal: it is an error, in whose place another body can go on.
    """

    def __init__(self, said: messages.Request, outgoing: Outgoing, mode: int) -> None:
        """said: its headers. mode: how the gateway passes bodies."""
        self.headers = messages.headers_of(said.response_headers.headers)
        about = dict(self.headers)
        status = about.get(b":status", b"")
        self.status = int(status) if status.isdigit() else 0
        details = messages.attribute_in(said, _DETAILS)
        self.is_of_gateway = details not in ("", _VIA_UPSTREAM)
        kind = whole_answer.type_in(self.headers)
        self.in_events = self.status == 200 and kind == b"text/event-stream"
        self.sees_all = mode != messages.NONE
        self.is_refusal = self.status >= 400 and mode == messages.FULL_DUPLEX_STREAMED
        self.parser: Parser = outgoing.parser() if self.in_events else Whole()
        self.first = b""
        """Its beginning, unless it is a stream."""
        self._kept: list[bytes] = []
        self._num_kept = 0

    def passed(self, piece: bytes, *, is_last: bool) -> bytes:
        """What of it goes on now."""
        if not self.in_events and len(self.first) < FIRST_BYTES:
            self.first += piece[: FIRST_BYTES - len(self.first)]
        passed = self.parser.passed(piece) if piece else b""
        return passed + self.parser.rest() if is_last else passed

    def goes_on(self, passed: bytes, *, is_last: bool) -> list[bytes]:
        """What is sent now: of an answer that is no stream as much as fits, as each message costs
        a seventh of a decision. Empty: nothing."""
        self._kept.append(passed)
        self._num_kept += len(passed)
        if not (is_last or self.in_events or self._num_kept >= messages.CHUNK_BYTES):
            return []
        kept, self._kept, self._num_kept = self._kept, [], 0
        return kept

    @property
    def error(self) -> bytes:
        """The worker's own words about why it failed, if it said any."""
        return self.parser.error or (self.first if self.status >= 400 else b"")
