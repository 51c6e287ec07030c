"""Answers as engines give them, in each API that clients speak: events, bodies and errors."""

import time

import orjson

from tests.fakes.said import embedding

FAULT = "the engine core has died"
_STATUSES = {400: "BadRequestError", 404: "NotFoundError"}
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": [1, 2, 3]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    "/v1/responses": {"input": "hello"},
}
"""A body for each path on which answers may be streams."""


class Chat:
    """POST /v1/chat/completions. body: of the request. prompts: how many tokens each has."""

    kind, id = "chat.completion", "chatcmpl-1"

    def __init__(self, body, said, prompts):
        self.body, self.said = body, said
        self.model = body.get("model", "")
        self.prompt_tokens, self.cached_tokens = sum(prompts), 0
        self.choices = range(len(prompts) * (body.get("n") or 1))
        self.members = {}
        """More of a whole answer."""
        self._names_ids = bool(body.get("return_token_ids"))
        self._shows_usage = bool((body.get("stream_options") or {}).get("include_usage"))

    @property
    def num_tokens(self):
        return len(self.said.tokens)

    def begin(self):
        return self._chunks({"role": "assistant", "content": ""}, None)

    def token(self, number):
        text = self.said.tokens[number]
        if self.said.call is None:
            return self._chunks({"content": text}, number)
        call = self._called(text) if number == 0 else {"function": {"arguments": text}}
        return self._chunks({"tool_calls": [{"index": 0, **call}]}, number)

    def end(self):
        delta = {"content": ""} if self.said.call is None else {}
        last = self._chunks(delta, None, finish_reason=self._reason)
        usage = _data(self._frame(".chunk") | {"choices": [], "usage": self.usage})
        return last + (usage if self._shows_usage else b"") + b"data: [DONE]\n\n"

    def error(self):
        """The event of a failure, and what follows it."""
        return _data(self.refusal(500)) + b"data: [DONE]\n\n"

    def whole(self):
        choices = [
            {
                "index": index,
                "finish_reason": self._reason,
                "logprobs": None,
                **self._whole_choice(),
            }
            for index in self.choices
        ]
        return self._frame() | {"choices": choices, "usage": self.usage} | self.members

    @staticmethod
    def refusal(status, message=FAULT, field=None):
        kind = "InternalServerError" if status >= 500 else _STATUSES.get(status, "BadRequestError")
        return {"error": {"message": message, "type": kind, "param": field, "code": status}}

    @property
    def usage(self):
        generated = self.num_tokens * len(self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    @property
    def _reason(self):
        if self.said.is_cut:
            return "length"
        return "stop" if self.said.call is None else "tool_calls"

    def _frame(self, part=""):
        return {"id": self.id, "object": self.kind + part, "created": 1, "model": self.model}

    def _called(self, arguments):
        function = {"name": self.said.call, "arguments": arguments}
        return {"id": f"call_{self.prompt_tokens}", "type": "function", "function": function}

    def _whole_choice(self):
        message = {"role": "assistant", "content": self.said.text, "refusal": None}
        if self.said.call is not None:
            message |= {"content": None, "tool_calls": [self._called(self.said.text)]}
        return {"message": message | {"annotations": []}}

    def _delta(self, delta):
        return {"delta": delta}

    def _chunks(self, delta, number, finish_reason=None):
        ids = {"token_ids": [] if number is None else [number]} if self._names_ids else {}
        about = {"finish_reason": finish_reason, "logprobs": None, **self._delta(delta), **ids}
        chunks = ([{"index": index, **about}] for index in self.choices)
        frame = self._frame(".chunk")
        return b"".join(_data(frame | {"choices": choices}) for choices in chunks)


class Completion(Chat):
    """POST /v1/completions."""

    kind, id = "text_completion", "cmpl-1"

    def begin(self):
        return b""

    def _frame(self, part=""):
        return super()._frame()

    def _whole_choice(self):
        return {"text": self.said.text}

    def _delta(self, delta):
        return {"text": delta.get("content", "")}


class Message(Chat):
    """POST /v1/messages."""

    def begin(self):
        usage = self.usage | {"output_tokens": 0}
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        return _named("message_start", message=message) + _named(
            "content_block_start", index=0, content_block=self._block("")
        )

    def token(self, number):
        text = self.said.tokens[number]
        delta = {"type": "text_delta", "text": text}
        if self.said.call is not None:
            delta = {"type": "input_json_delta", "partial_json": text}
        return _named("content_block_delta", index=0, delta=delta)

    def end(self):
        return (
            _named("content_block_stop", index=0)
            + _named("message_delta", delta=self._ended, usage=self.usage)
            + _named("message_stop")
        )

    def error(self):
        return _named("error", error=self.refusal(500)["error"])

    def whole(self):
        return self._message([self._block(self.said.text)]) | self.members

    @staticmethod
    def refusal(status, message=FAULT, field=None):
        kind = "api_error" if status >= 500 else "invalid_request_error"
        return {"type": "error", "error": {"type": kind, "message": message}}

    @property
    def usage(self):
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens,
            "output_tokens": self.num_tokens,
            "cache_read_input_tokens": self.cached_tokens,
            "cache_creation_input_tokens": 0,
            **dict.fromkeys(("cache_creation", "inference_geo", "output_tokens_details")),
            **dict.fromkeys(("server_tool_use", "service_tier")),
        }

    @property
    def _ended(self):
        reason = "max_tokens" if self.said.is_cut else "end_turn"
        if self.said.stopped_by is not None:
            reason = "stop_sequence"
        elif self.said.call is not None and not self.said.is_cut:
            reason = "tool_use"
        stopped = {"stop_sequence": self.said.stopped_by, "stop_details": None}
        return {"stop_reason": reason, **stopped}

    def _block(self, text):
        if self.said.call is None:
            return {"type": "text", "text": text, "citations": None}
        called = {"type": "tool_use", "name": self.said.call, "caller": {"type": "direct"}}
        called["id"] = f"toolu_{self.prompt_tokens}"
        is_whole = bool(text) and not self.said.is_cut
        return called | {"input": orjson.loads(text) if is_whole else {}}

    def _message(self, content):
        return {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "container": None,
            **self._ended,
            "usage": self.usage,
        }


_ECHOED = {
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "reasoning")),
    **dict.fromkeys(("prompt_cache_key", "safety_identifier", "previous_response_id", "error")),
    "background": False,
    "store": False,
    "service_tier": "default",
    "truncation": "disabled",
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "text": {"format": {"type": "text"}},
    "metadata": {},
    "top_logprobs": 0,
    "tool_choice": "auto",
    "tools": [],
    "parallel_tool_calls": True,
}
"""Members of a response: those of its request, or these."""


class Response(Chat):
    """POST /v1/responses."""

    def __init__(self, body, said, prompts):
        super().__init__(body, said, prompts)
        self._is_call = said.call is not None
        self._item_id = "fc_1" if self._is_call else "msg_1"

    def begin(self):
        response = self._response("in_progress", [])
        return _numbered(0, "created", response=response) + _numbered(
            1, "in_progress", response=response
        )

    def token(self, number):
        text = self.said.tokens[number]
        if self._is_call:
            told = self._of_item(number + 3, "function_call_arguments.delta", delta=text)
        else:
            told = self._of_text(number + 4, "output_text.delta", delta=text, logprobs=[])
        return told if number else self._begin_item() + told

    def end(self):
        text, number = self.said.text, self.num_tokens + (3 if self._is_call else 4)
        if self._is_call:
            kind = "function_call_arguments.done"
            done = self._of_item(number, kind, name=self.said.call, arguments=text)
        else:
            done = self._of_text(number, "output_text.done", text=text, logprobs=[])
            number += 1
            done += self._of_text(number, "content_part.done", part=_text_part(text))
        item = self._item(text, self._status)
        return (
            done
            + _numbered(number + 1, "output_item.done", output_index=0, item=item)
            + _numbered(number + 2, self._status, response=self.whole())
        )

    def error(self):
        error = {"code": "server_error", "message": FAULT}
        return _numbered(4, "failed", response=self._response("failed", []) | {"error": error})

    def whole(self):
        item = self._item(self.said.text, self._status)
        return self._response(self._status, [item]) | self.members

    @property
    def usage(self):
        return {
            "input_tokens": self.prompt_tokens,
            "output_tokens": self.num_tokens,
            "total_tokens": self.prompt_tokens + self.num_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens_details": {"reasoning_tokens": 0},
        }

    @property
    def _status(self):
        return "incomplete" if self.said.is_cut else "completed"

    def _begin_item(self):
        item = self._item("", "in_progress")
        if self._is_call:
            return _numbered(2, "output_item.added", output_index=0, item=item)
        begun = _numbered(2, "output_item.added", output_index=0, item=item | {"content": []})
        return begun + self._of_text(3, "content_part.added", part=_text_part(""))

    def _of_item(self, number, kind, **fields):
        return _numbered(number, kind, item_id=self._item_id, output_index=0, **fields)

    def _of_text(self, number, kind, **fields):
        return self._of_item(number, kind, content_index=0, **fields)

    def _item(self, text, status):
        about = {"id": self._item_id, "status": status}
        if self._is_call:
            call = {"name": self.said.call, "call_id": f"call_{self.prompt_tokens}"}
            return about | {"type": "function_call", "arguments": text, **call}
        return about | {"type": "message", "role": "assistant", "content": [_text_part(text)]}

    def _response(self, status, output):
        given = {name: self.body[name] for name in _ECHOED if self.body.get(name) is not None}
        given["tools"] = [{"strict": None, **tool} for tool in given.get("tools", ())]
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": "resp_1",
            "object": "response",
            "created_at": 1,
            "completed_at": int(time.time()) if status == "completed" else None,
            "model": self.model,
            **_ECHOED,
            **given,
            "status": status,
            "incomplete_details": cut,
            "output": output,
            "usage": self.usage if output else None,
        }


class Numbers(Chat):
    """Paths whose answers are no text: embeddings, rankings, scores, classes."""

    def whole(self):
        given = self.body.get("input")
        many = isinstance(given, list) and not (given and isinstance(given[0], int))
        encoding = self.body.get("encoding_format")
        data = [
            {"index": index, "object": "embedding", "embedding": embedding(one, encoding)}
            | {"score": 0.0, "label": "LABEL_0", "data": [0.0]}
            for index, one in enumerate(given if isinstance(given, list) and many else [given])
        ]
        results = [
            {"index": index, "relevance_score": 1.0, "document": {"text": text}}
            for index, text in enumerate(self.body.get("documents") or ())
        ]
        usage = {"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens}
        frame = {"id": "x", "object": "list", "created": 1, "model": self.model}
        return frame | {"data": data, "results": results, "usage": usage} | self.members


DIALECTS = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completion,
    "/v1/messages": Message,
    "/v1/responses": Response,
    **dict.fromkeys(
        (
            *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
            *("/pooling", "/classify"),
        ),
        Numbers,
    ),
}


def _text_part(text):
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _numbered(number, kind, **fields):
    """An event of a response."""
    return _named(f"response.{kind}", sequence_number=number, **fields)


def _data(fields):
    return b"data: " + orjson.dumps(fields) + b"\n\n"


def _named(kind, **fields):
    return b"event: " + kind.encode() + b"\n" + _data({"type": kind, **fields})
