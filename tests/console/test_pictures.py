"""The README's pictures: KVROUTE_PICTURES=docs/images writes them there (`make pictures`)."""

import os
from pathlib import Path

import pytest

from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.local.cluster import Cluster
from tests.console.conftest import Load
from tests.redis_servers import default_kind, require_binary, require_redis

FOLDER = Path(os.environ.get("KVROUTE_PICTURES", "out/console"))
WIDTH, HEIGHT = 1280, 800
SHOWN_S = 90
"""So long a time the charts show."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_pages_of_the_readme_can_be_taken(watch):
    require_binary("haproxy")
    require_redis(default_kind())
    FOLDER.mkdir(parents=True, exist_ok=True)
    workers = WorkerSettings(kv_pool_tokens=32_768, host_pool_tokens=16_384, log_level="error")
    with Cluster(
        num_workers=8,
        num_replicas=3,
        haproxy=True,
        router=RouterSettings(details_per_s=1000, log_level="error"),
        worker=workers,
    ) as cluster:
        load = Load(cluster, "70b-4xh100", "acme", "globex", "hooli", clients=8, sessions=1000)
        size = {"width": WIDTH, "height": HEIGHT}
        try:
            with watch(cluster.balancer_url, viewport=size, device_scale_factor=1.5) as seen:
                page = seen.open("overview")
                page.wait_for_timeout(SHOWN_S * 1000)
                page.screenshot(path=FOLDER / "overview.png")
                tail = page.request.get(
                    f"{cluster.balancer_url}/console/api/decisions?reason=load&limit=50"
                ).json()
                # Not the newest one, whose candidates may not be in Redis yet.
                row = dict(zip(tail["columns"], tail["rows"][-1], strict=True))
                seen.open(f"decisions/{row['request_id']}")
                page.wait_for_selector("text=What each worker would have cost")
                page.wait_for_timeout(1000)
                page.screenshot(path=FOLDER / "explanation.png")
        finally:
            load.stop()
