"""GET / says what this is, to people and to curl, with or without a key."""

import re
from hashlib import sha256
from importlib.resources import files

from app.edge.front_page import WHAT

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


async def test_curl_gets_three_lines_and_needs_no_key(replica, one_redis_server):
    async with replica(one_redis_server.url, api_key="sesame") as client:
        answer = await client.get("/", headers={"accept": "*/*"})
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        first, *links = answer.text.splitlines()
        assert first == WHAT
        assert [line.split()[0] for line in links] == ["/console/", "/docs"]


async def test_a_browser_gets_links_that_lead_somewhere_below_any_prefix(client):
    answer = await client.get("/", headers=BROWSER)
    assert answer.headers["content-type"].startswith("text/html")
    for link in ("console/", "docs"):
        assert f"<a href={link}>" in answer.text
        assert (await client.get(f"/{link}")).status_code == 200


async def test_a_console_that_is_off_has_no_link(replica, one_redis_server):
    async with replica(one_redis_server.url, console=False) as client:
        assert "console" not in (await client.get("/")).text
        assert "console" not in (await client.get("/", headers=BROWSER)).text


async def test_the_page_of_all_paths_needs_no_other_host(client):
    page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "openapi.json" in page.text
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert links == ["docs/swagger-ui.css", "data:,", "docs/swagger-ui-bundle.js"]
    readme = (files("app.edge") / "static" / "README.md").read_text()
    for link in (links[0], links[2]):
        file = await client.get(f"/{link}")
        assert file.headers["content-type"].startswith("text/")
        assert f"{link.removeprefix('docs/')} | {sha256(file.content).hexdigest()} |" in readme
    for path in ("/redoc", "/docs/README.md", "/docs/../static/README.md"):
        assert (await client.get(path)).status_code == 404
