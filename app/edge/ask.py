"""Requests for a decision, and who asks: from headers, bodies and queries."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel
from starlette.datastructures import QueryParams

from app.core.errors import InvalidRequest, NotAllowed, shown
from app.core.hashing import Tokens, token_bytes
from app.core.key_rules import ANY, KeyRules
from app.core.settings.kinds import PRIORITIES
from app.core.types import REQUEST_ID, TENANT_ID, checked_sent_ms, new_id
from app.edge import schemas
from app.http import numbers
from app.policy.decision import RouteRequest
from app.router.prompt import Prompt, check_length

if TYPE_CHECKING:
    from app.edge.client import Client

log = logging.getLogger(__name__)

SESSIONS = (
    *(b"x-session-id", b"x-claude-code-session-id", b"x-session-affinity"),
    *(b"session-id", b"session_id", b"conversation-id", b"conversation_id"),
)
"""Headers in which clients name a session: ours, Claude Code's, OpenCode's and Codex's."""
SENT = b"x-request-start"
"""Header with the time at which a proxy, or the client, sent a request."""

DEFAULT_PRIORITY = "normal"
ISOLATED = "isolated:"
"""Beginning of the salts of tenants that share no cache with others."""

M = TypeVar("M", bound=BaseModel)


def parse(model: type[M], raw: bytes) -> tuple[M, bytes | None]:
    """Returns a body, and its `token_ids` as `token_bytes` makes them, if they are not in the body.

    simdjson writes an array of numbers into a buffer, without an object for each: half the time of
    the fastest parser that makes objects, and a fifth of pydantic's. pydantic gets the other
    fields, and the whole body if that is not plainly valid, as it knows how to report why.
    """
    # Only objects; and simdjson would accept a byte order mark and read on.
    if numbers.simdjson is not None and raw.startswith(b"{"):
        with suppress(InvalidRequest, LookupError, RuntimeError, TypeError, ValueError):
            return _fields(model, raw)
    return model.model_validate_json(raw), None


def _fields(model: type[M], raw: bytes) -> tuple[M, bytes | None]:
    """Reads a body as `parse` does. Raises if it is not plainly valid."""
    # A new parser each time, which takes no longer: a parser keeps all that it has read.
    document: Any = numbers.simdjson.Parser().parse(raw)
    fields: dict[str, Any] = {}
    tokens: bytes | None = None
    hashes: list[int] | None = None
    # Buffers are flat, so arrays that become one must not contain arrays.
    num_arrays = 0
    for name in document:
        if name not in model.model_fields:
            raise ValueError(f"{name} is unknown; looking up each of many would take minutes")
        if name in fields:
            raise ValueError(f"{name} comes twice, and simdjson shows only the first")
        value = document[name]
        if not isinstance(value, numbers.simdjson.Array):
            fields[name] = value
            continue
        num_arrays += 1
        if name == "token_ids":
            tokens, fields[name] = token_bytes(numbers.unsigned(value)), []
        elif name == "local_hashes":
            hashes, fields[name] = numbers.unsigned(value).tolist(), []
        else:
            fields[name] = value.as_list()
            num_arrays += sum(isinstance(inner, list) for inner in fields[name])
    # Looking for the only one from both ends takes a sixth of the time of counting.
    is_only = num_arrays == 1 and raw.find(b"[") == raw.rfind(b"[")
    if not is_only and raw.count(b"[") != num_arrays:
        raise ValueError("there are other arrays in arrays")
    body = model.model_validate(fields)
    if hashes is not None:
        setattr(body, "local_hashes", hashes)  # noqa: B010 - models have it, their base has not
    return body, tokens


def request_of(
    headers: Mapping[bytes, bytes],
    policy: str,
    *,
    request_id: object = None,
    session: object = None,
    tenant: object = None,
    priority: object = None,
    key_name: str = "",
    rules: KeyRules | None = None,
    came_ms: int | None = None,
    **options: Any,
) -> RouteRequest:
    """Returns a request without its chain, by who asks: as its body or query says, else as headers
    do, which proxies may set, and which refuse nobody if they do not fit.

    key_name: of its key, which is its tenant if no other is named, so that keys take turns. rules:
    of that key; None: it may ask for anything. came_ms: when it came in, by the Redis clock, unless
    x-request-start tells when it was sent. options: of RouteRequest. A balancer names each request
    in x-balancer-id, and repeats the name if it sends that request again to another replica. Raises
    InvalidRequest for what is no header, and NotAllowed.
    """
    own = fitting_id(key_name, TENANT_ID, "name of a key")
    named = _id(headers, b"x-tenant-id", "tenant", tenant, TENANT_ID) or own
    level = _priority(priority, headers.get(b"x-priority"))
    if rules is not None:
        # What headers say, anybody can say: that is not refused, but does not count.
        highest, named = rules.highest(level), _tenant(rules, named, own)
        if priority not in (None, DEFAULT_PRIORITY, highest):
            raise NotAllowed("priority", f"this key may have {highest} at most, got {priority}")
        if tenant not in (None, named):
            raise NotAllowed("tenant", f"this key is for its own tenant alone, got {shown(tenant)}")
        level = highest
    return RouteRequest(
        request_id_in(headers) if request_id is None else str(request_id),
        [],
        policy=policy,
        session=_id(headers, _session_header(headers), "session_id", session, REQUEST_ID),
        tenant=named,
        owner=key_name if rules is not None and rules.is_client else "",
        priority=level,
        began_ms=_sent_ms(headers[SENT]) or came_ms if SENT in headers else came_ms,
        balancer_id=headers.get(b"x-balancer-id", b"").decode("latin-1"),
        **options,
    )


def salt_of(client: Client, given: str) -> str:
    """Returns what tells the cache of a request apart: as given, but of a tenant that shares none
    with others. given: "": nothing. Raises InvalidRequest for what another one has."""
    keys, rules = client.replica.keys, client.rules
    if keys.isolates and given.startswith(ISOLATED):
        raise InvalidRequest("cache_salt", f"must not begin with {ISOLATED}")
    if rules is None or not rules.isolate:
        return given
    return f"{ISOLATED}{rules.tenant or rules.name}:{given}"


def check_options(client: Client, options: schemas.RouteOptions | schemas.FindBestWorker) -> None:
    """Sets the namespace of a tenant that shares no cache with others. Raises NotAllowed for what
    only operators may ask: clients have to do with their own requests alone."""
    namespace = getattr(options, "cache_namespace", None) or ""
    if salt := salt_of(client, namespace):
        options.cache_namespace = salt  # type: ignore[union-attr]
    if not client.is_of_client:
        return
    for name in ("exclude", "policy", "explain"):
        if getattr(options, name, None):
            raise NotAllowed(name, "only an operator's key may set it")
    rules, model = client.rules, getattr(options, "lora_name", None)
    if rules is not None and rules.models and not (model and rules.may_ask(model)):
        served = {name for info in client.replica.router.fleet.infos for name in info.models}
        if model or not all(map(rules.may_ask, served)):
            raise NotAllowed("lora_name", "this key may not ask for that model")
    if client.replica.keys.isolates and getattr(options, "local_hashes", None) is not None:
        raise NotAllowed("local_hashes", "only an operator's key may name what others cache")


def _tenant(rules: KeyRules, named: str, own: str) -> str:
    """Returns the tenant under which requests of a key count. named: by one. own: of the key."""
    return named if not rules.is_client or rules.tenant == ANY else rules.tenant or own


def _session_header(headers: Mapping[bytes, bytes]) -> bytes:
    """Returns the first header that names a session."""
    return next(filter(headers.__contains__, SESSIONS), SESSIONS[0])


def request_id_in(headers: Mapping[bytes, bytes]) -> str:
    """Returns the id that the client, or a balancer, gives a request, or else a new one."""
    given = _id(headers, b"x-request-id", "request_id", None, REQUEST_ID)
    return given or f"req-{new_id()}"


def fitting_id(value: str, pattern: re.Pattern[str], name: str) -> str:
    """Returns `value`, which names something; if it does not fit, its hash, so that equal ones stay
    equal. name: where it is from, for the log."""
    if not value or pattern.fullmatch(value):
        return value
    _unfit(name, "used by its hash")
    return hashlib.blake2b(value.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _id(
    headers: Mapping[bytes, bytes],
    header: bytes,
    field: str,
    given: object,
    pattern: re.Pattern[str],
) -> str:
    """Returns an id; "" if none is given."""
    if given is None:
        value = headers.get(header)
        return fitting_id(value.decode("latin-1"), pattern, header.decode()) if value else ""
    if not isinstance(given, str) or not pattern.fullmatch(given):
        most = 64 if pattern is TENANT_ID else 128
        raise InvalidRequest(
            field, f"needs 1 to {most} visible ASCII characters, got {shown(given)}"
        )
    return given


def _priority(given: object, header: bytes | None) -> str:
    if given is None:
        value = (header or DEFAULT_PRIORITY.encode()).decode("latin-1").strip().lower()
        if value not in PRIORITIES:
            _unfit("x-priority", f"taken for {DEFAULT_PRIORITY}")
            return DEFAULT_PRIORITY
        return value
    if given not in PRIORITIES:
        raise InvalidRequest(
            "priority", f"must be one of {', '.join(PRIORITIES)}, got {shown(given)}"
        )
    return str(given)


def _sent_ms(header: bytes) -> int | None:
    try:
        return checked_sent_ms(header.decode("latin-1"))
    except InvalidRequest:
        _unfit("x-request-start", "not used")
        return None


_seen_unfit: set[str] = set()


def _unfit(name: str, what: str) -> None:
    """Logs once that values of a header do not fit."""
    if name not in _seen_unfit:
        _seen_unfit.add(name)
        log.warning("a value of %s does not fit, and is %s; so are later ones", name, what)


def options_in_query(query: QueryParams) -> schemas.RouteOptions:
    """Returns the options that accompany raw tokens. Raises ValidationError."""
    fields: dict[str, Any] = dict(query)
    if "exclude" in fields:
        fields["exclude"] = query.getlist("exclude")
    return schemas.RouteOptions.model_validate(fields, strict=False)


def of_body(body: schemas.RouteBody, tokens: bytes | None, max_tokens: int) -> Prompt:
    """Returns the prompt in a body. tokens: as `parse` gives them. Raises InvalidRequest."""
    if (body.token_ids is None) == (body.local_hashes is None):
        raise InvalidRequest("token_ids", "give either token_ids, or local_hashes and num_tokens")
    if body.token_ids is not None:
        if body.num_tokens is not None:
            raise InvalidRequest(
                "num_tokens", "is only allowed with local_hashes; token_ids are counted"
            )
        given = body.token_ids if tokens is None else tokens
        return of_tokens(body, given, max_tokens, body.mm_hashes)
    for name in ("mm_hashes", "lora_name", "cache_namespace"):
        if getattr(body, name) not in (None, ""):
            raise InvalidRequest(
                name, "is only allowed with token_ids; local_hashes already cover it"
            )
    if body.num_tokens is None:
        raise InvalidRequest("num_tokens", "is required with local_hashes")
    assert body.local_hashes is not None
    return of_hashes(body.local_hashes, body.num_tokens, max_tokens)


def of_tokens(
    options: schemas.RouteOptions,
    tokens: Tokens,
    max_tokens: int,
    mm_hashes: list[list[int]] | None = None,
) -> Prompt:
    """Returns the prompt with these tokens. Raises InvalidRequest if it is empty or too long."""
    # Rounded up, as hashing reports bytes that are left over.
    num_tokens = -(-len(tokens) // 4) if isinstance(tokens, bytes) else len(tokens)
    check_length("token_ids", num_tokens, max_tokens)
    return Prompt(
        num_tokens,
        tokens=tokens,
        mm_hashes=mm_hashes,
        lora_name=options.lora_name,
        cache_namespace=options.cache_namespace,
    )


def of_hashes(
    local_hashes: list[int], num_tokens: int, max_tokens: int, *, may_be_longer: bool = False
) -> Prompt:
    """Returns the prompt with hashes that the client computed. Raises InvalidRequest if it is too
    long."""
    check_length("num_tokens", num_tokens, max_tokens)
    return Prompt(num_tokens, local_hashes=local_hashes, may_be_longer=may_be_longer)
