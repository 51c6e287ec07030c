"""Pages of other origins, in browsers."""

import pytest

from app.core.settings.kinds import parse_origins

PAGE = "https://chat.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


async def test_pages_of_the_given_origins_may_call(one_redis_server, replica):
    origins = f"{PAGE}, http://localhost:3000"
    async with replica(one_redis_server.url, cors_origin=origins, api_key="k") as client:
        # Browsers send no key with this question.
        asked = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in asked.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in asked.headers
        for key, status in (("k", 200), ("no", 401)):
            headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
            answer = await client.get("/v1/models", headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE
            exposed = answer.headers["access-control-expose-headers"].split(", ")
            assert {"x-request-id", "x-kvroute-trust", "x-kvroute-source"} <= {*exposed}
        other = PREFLIGHT | {"origin": "https://other.example"}
        refused = await client.options("/v1/chat/completions", headers=other)
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers


async def test_no_page_of_another_origin_may_call_unless_told(one_redis_server, replica):
    async with replica(one_redis_server.url) as client:
        asked = await client.options("/v1/models", headers=PREFLIGHT)
        answer = await client.get("/v1/models", headers={"origin": PAGE})
        assert asked.status_code == 204
        names = (*asked.headers, *answer.headers)
        assert not [name for name in names if name.startswith("access-control")]


def test_what_is_no_origin_is_refused():
    assert parse_origins("") == []
    assert parse_origins(f"{PAGE},*") == [PAGE, "*"]
    for bad in ("chat.example", "https://chat.example/", "https://a/b", "ftp://a", "https://"):
        with pytest.raises(ValueError, match="is no origin"):
            parse_origins(bad)
