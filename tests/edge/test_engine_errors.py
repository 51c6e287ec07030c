import orjson
import pytest

from app.edge.errors import told
from tests.fake_worker import worker_info

WORKER = worker_info("w")
CHATS, MESSAGES = "/v1/chat/completions", "/v1/messages"
PYDANTIC = (
    "[{'type': 'missing', 'loc': ('body', 'messages', 0, 'user', 'content'), "
    "'msg': 'Field required', 'input': {'role': 'user'}}]"
)


def error(status, answer, path=CHATS):
    body = answer if isinstance(answer, bytes) else orjson.dumps(answer)
    told_status, told_body = told(status, body, path, WORKER)
    return told_status, orjson.loads(told_body)


@pytest.mark.parametrize(
    ("status", "answer", "expected"),
    [
        (  # vLLM
            400,
            {
                "error": {
                    "message": "temperature must be non-negative, got -1.",
                    "type": "BadRequestError",
                    "param": "temperature",
                    "code": 400,
                }
            },
            (400, "temperature must be non-negative, got -1.", "temperature", None),
        ),
        (  # SGLang
            400,
            {"object": "error", "message": "no", "type": "BadRequest", "param": None, "code": 400},
            (400, "no", None, None),
        ),
        (  # our own
            422,
            {"error": {"code": "invalid_request", "message": "n: got 0", "field": "n"}},
            (400, "n: got 0", "n", None),
        ),
        (
            422,
            {"error": {"code": "prompt_too_large", "message": "too many", "field": "prompt"}},
            (400, "too many", "prompt", "context_length_exceeded"),
        ),
        (
            400,
            {"error": {"message": "This model's maximum context length is 8 tokens.", "code": 400}},
            (
                400,
                "This model's maximum context length is 8 tokens.",
                None,
                "context_length_exceeded",
            ),
        ),
        (
            400,
            {"error": {"message": PYDANTIC, "type": "Bad Request", "code": 400}},
            (400, "messages: Field required", "messages", None),
        ),
        (
            422,
            {"detail": [{"loc": ["body", "n"], "msg": 'not "it"', "type": "x"}]},
            (400, 'n: not "it"', "n", None),
        ),
        (500, b"Internal Server Error", (500, "Internal Server Error", None, None)),
        (500, b"", (500, "the engine answered 500", None, None)),
        (503, {"error": "no room"}, (503, "no room", None, None)),
    ],
)
def test_an_engines_error_names_its_cause_in_openais_form(status, answer, expected):
    told_status, told_body = error(status, answer)
    said = told_body["error"]

    assert (told_status, said["message"], said["param"], said["code"]) == expected
    kinds = {400: "invalid_request_error", 500: "api_error", 503: "overloaded_error"}
    assert said["type"] == kinds[told_status]


def test_an_error_is_in_the_form_of_the_path():
    answer = {"error": {"message": "max_tokens: is missing", "code": 400}}
    assert error(400, answer, MESSAGES)[1] == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "max_tokens: is missing"},
    }


@pytest.mark.parametrize(
    "answer",
    [
        {"detail": "Not Found"},
        {"detail": "Method Not Allowed"},
        {"error": {"code": "not_found", "message": "Not Found", "field": None}},
        b"404",
    ],
)
def test_a_path_that_an_engine_lacks_is_no_404(answer):
    status, said = error(404, answer, "/v1/embeddings")

    assert status == 400
    assert said["error"]["code"] == "path_not_supported"
    assert "w:0) has no /v1/embeddings" in said["error"]["message"]


def test_a_model_that_an_engine_no_longer_has_is_the_fault_of_its_worker():
    answer = {"error": {"message": "The model `x` does not exist.", "code": 404}}
    assert error(404, answer)[0] == 502


def test_the_routers_own_key_is_no_matter_of_clients():
    status, said = error(401, {"error": "Unauthorized"})
    assert status == 502
    assert "--worker-key" in said["error"]["message"]


def test_a_message_is_not_as_long_as_an_engine_makes_it():
    assert len(error(400, {"error": {"message": "x" * 10**6}})[1]["error"]["message"]) == 2000
