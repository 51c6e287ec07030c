"""The crowd that asks for one prefix."""

import orjson
from click.testing import CliRunner

from loadtest.experiments.hot_prefix import main


def test_each_worker_fetches_the_prefix_once_and_the_table_shows_it(tmp_path):
    file = tmp_path / "spread.json"
    options = ["--requests", "60", "--within-s", "0.6", "--link-gbit", "100", "--seeds", "1"]
    ended = CliRunner().invoke(main, [*options, "--json", str(file)])
    assert ended.exit_code == 0, ended.output
    [played] = orjson.loads(file.read_bytes()).values()
    (without,), (linked,) = played.values()
    assert without["fetched"] == without["split"] == 0 < linked["fetched"] <= 7
    row = ended.output.splitlines()[-1]
    assert row.startswith(
        f"| 100 Gbit/s | {linked['ttft_mean_s']:.2f} | {linked['ttft_p99_s']:.2f}"
    )
