import orjson
import pytest
from click.testing import CliRunner

from loadtest import demo_torch
from loadtest.traces import VOCABULARY
from tests.redis_servers import default_kind, require_redis
from tests.workers.engines.torch.checkpoints import reference


@pytest.mark.slow
def test_hits_from_every_tier_are_measured(tmp_path):
    require_redis(default_kind())
    model = tmp_path / "model"
    reference(vocab_size=VOCABULARY, max_position_embeddings=4096).save_pretrained(model)
    options = [f"--model={model}", f"--out={tmp_path}", "--rounds=1"]
    result = CliRunner().invoke(demo_torch.main, options)
    assert result.exit_code == 0, result.output
    found = orjson.loads((tmp_path / "demo-torch.json").read_bytes())
    samples = {tier: len(measured["ttft_s"]) for tier, measured in found["tiers"].items()}
    # Prompts that share nothing fill the device, then host memory, before any is on disk.
    assert samples.pop("cold") >= 8
    assert samples == {"device": 1, "host": 1, "disk": 1}
