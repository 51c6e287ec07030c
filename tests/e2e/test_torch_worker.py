"""Workers with a torch engine in a cluster of real processes."""

import json
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.local.cluster import Cluster
from tests.door.conftest import until_healthy, worker_here
from tests.eventually import eventually
from tests.redis_servers import default_kind, require_redis
from tests.workers.engines.torch.checkpoints import library, reference

TWINS = json.loads((Path(__file__).parents[1] / "data" / "twin_blocks.json").read_text())
MODEL = "tiny"
CHUNK = 32
PROMPT_TOKENS = 200
REUSED = 192


def torch_cluster(folder, num_workers, kv_transfer=""):
    require_redis(default_kind())
    return Cluster(
        num_workers=num_workers,
        num_replicas=1,
        # By cost, a worker may be chosen that a busy machine has let seem faster.
        router=RouterSettings(policy="blocks", log_level="error"),
        worker=WorkerSettings(
            engine="torch",
            model=MODEL,
            device="cpu",
            threads=1,
            prefill_chunk=CHUNK,
            kv_pool_tokens=512,
            host_pool_tokens=512,
            disk_pool_tokens=4096,
            disk_folder=str(folder),
            kv_transfer=kv_transfer,
            lease_ttl_s=30.0,
            log_level="error",
        ),
    )


def prompt(seed):
    """Raw token ids from the model's vocabulary."""
    tokens = np.random.default_rng(seed).integers(0, 256, PROMPT_TOKENS, np.uint32)
    return tokens.astype("<u4").tobytes()


async def ask(probe, tokens):
    """The worker chosen, the tokens it answered, and its cached prompt tokens by tier."""
    choice = await probe.route(tokens)
    response = await probe.http.post(
        f"{choice['address']}/v1/completions?max_tokens=4&temperature=0",
        content=tokens,
        headers={"content-type": "application/octet-stream"},
    )
    answer = response.json()
    await probe.release(choice["request_id"])
    details = answer["usage"]["prompt_tokens_details"]
    cached = {tier: n for tier, n in details["cached_tokens_by_tier"].items() if n}
    return choice["worker_id"], answer["choices"][0]["token_ids"], cached


async def complete(probe, url, tokens, cache_salt="", **transfer):
    fields = {"prompt": np.frombuffer(tokens, "<u4").tolist(), "max_tokens": 4, "temperature": 0}
    fields |= {"model": MODEL, "cache_salt": cache_salt or None, "return_token_ids": True}
    if transfer:
        fields["kv_transfer_params"] = transfer
    response = await probe.http.post(f"{url}/v1/completions", json=fields)
    answer = response.json()
    assert response.status_code == 200, answer
    return answer


def told(answer):
    """The tokens, and how many prompt tokens were not computed."""
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["token_ids"], cached


async def test_a_prompt_goes_back_to_who_computed_it_and_another_process_goes_on_from_there(
    tmp_path, open_probe
):
    with torch_cluster(tmp_path, num_workers=2, kv_transfer="kvroute") as cluster:
        probe = open_probe(cluster)
        first = await ask(probe, prompt(9))
        assert first[2] == {}
        blocks = PROMPT_TOKENS // 16
        assert await eventually(lambda: probe.overlaps(prompt(9))) == {first[0]: blocks}
        assert await ask(probe, prompt(9)) == (first[0], first[1], {"device": REUSED})

        source, target = (member.url for member in cluster.workers)
        computed = await complete(probe, source, prompt(1), do_remote_decode=True)
        split = await complete(probe, target, prompt(1), **computed["kv_transfer_params"])
        assert told(computed) == (told(split)[0], 0)
        assert told(split)[1] == 0, "the source has just computed it"
        both = {"w0": blocks, "w1": blocks}
        assert await eventually(lambda: probe.overlaps(prompt(1)), both.__eq__) == both

        longer = prompt(2) + prompt(3)
        await complete(probe, source, prompt(2))
        held = await complete(probe, source, longer, do_remote_decode=True, cached_only=True)
        fetched = await complete(probe, target, longer, **held["kv_transfer_params"])
        assert told(fetched) == (told(await complete(probe, source, longer))[0], REUSED)

        kept = await complete(probe, source, prompt(4), do_remote_decode=True)
        cluster.workers[0].process.kill()
        cluster.workers[0].process.wait()
        alone = await complete(probe, target, prompt(4), **kept["kv_transfer_params"])
        assert told(alone) == (told(kept)[0], 0)


async def test_a_prompt_with_the_hashes_of_another_and_another_salt_get_nothing_of_it(
    tmp_path, open_probe
):
    given, twin = (
        np.array([*TWINS[name], *range(16, PROMPT_TOKENS)], "<u4").tobytes()
        for name in ("block", "twin")
    )
    with torch_cluster(tmp_path, num_workers=2, kv_transfer="kvroute") as cluster:
        probe = open_probe(cluster)
        source, target = (member.url for member in cluster.workers)

        async def answer(url, tokens, salt):
            return told(await complete(probe, url, tokens, salt))

        # What each comes to where nothing of any other is held.
        (of_given, _), (of_twin, _) = [await answer(target, one, "own") for one in (given, twin)]
        assert of_given != of_twin, "the control: their first blocks tell"
        for tokens, salt, expected in (
            (given, "", (of_given, 0)),
            (given, "", (of_given, REUSED)),
            (twin, "", (of_twin, 0)),
            (twin, "", (of_twin, REUSED)),
            (given, "red", (of_given, 0)),
            (given, "red", (of_given, REUSED)),
            (given, "blue", (of_given, 0)),
        ):
            # What others have asked is found at once, or never; what one has asked, once told of.
            asked = partial(answer, "", tokens, salt)
            assert (
                await (eventually(asked, expected.__eq__) if expected[1] else asked()) == expected
            )

        await answer(source, given, "a")
        for tokens, salt, expected in (
            (twin, "a", (of_twin, 0)),
            (given, "b", (of_given, 0)),
            (given, "a", (of_given, REUSED)),
        ):
            held = await complete(
                probe, source, given, "a", do_remote_decode=True, cached_only=True
            )
            came = await complete(probe, target, tokens, salt, **held["kv_transfer_params"])
            assert told(came) == expected, (tokens[:4], salt)


@pytest.mark.slow
async def test_a_killed_worker_comes_back_with_the_blocks_it_had_on_disk(tmp_path, open_probe):
    with torch_cluster(tmp_path, num_workers=1) as cluster:
        probe = open_probe(cluster)
        first = await ask(probe, prompt(1))
        seeds = iter(range(2, 40))

        async def on_disk():
            """How many blocks of the first prompt are on disk, after one more other prompt."""
            await ask(probe, prompt(next(seeds)))
            choice = await probe.route(prompt(1), reserve="false")
            return int(choice["overlap_blocks"]["disk"])

        await eventually(on_disk, lambda blocks: blocks == PROMPT_TOKENS // 16, within_s=30.0)
        cluster.workers[0].process.kill()
        cluster.workers[0].process.wait()
        member = cluster.start_worker(0)

        async def held():
            workers = await probe.workers()
            is_new = "w0" in workers and workers["w0"]["address"] == member.url
            return is_new and bool(await probe.overlaps(prompt(1)))

        await eventually(held, within_s=30.0)
        again = await ask(probe, prompt(1))

    assert again == (first[0], first[1], {"disk": REUSED})


async def test_a_checkpoint_with_a_tokenizer_is_served_as_text(tmp_path, one_redis_server):
    tokenizer = library("bytes")
    expected = reference(vocab_size=tokenizer.get_vocab_size(), eos_token_id=None)
    expected.save_pretrained(tmp_path / "model")
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    question = "A stream of tokens 日本"
    prompt = tokenizer.encode(question).ids
    answer = expected.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=24,
        do_sample=False,
    )[0][len(prompt) :].tolist()
    fields = {"prompt": question, "max_tokens": 24, "temperature": 0}

    options = {"engine": "torch", "model": str(tmp_path / "model"), "model_name": ""}
    options |= {"device": "cpu", "threads": 1, "prefill_chunk": CHUNK, "kv_pool_tokens": 512}
    async with (
        worker_here(one_redis_server.url, "w0", **options) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await until_healthy(http)
        whole = (await http.post("/v1/completions", json=fields)).json()
        streamed = (await http.post("/v1/completions", json={**fields, "stream": True})).text

    assert whole["choices"][0]["token_ids"] == answer
    assert whole["choices"][0]["text"] == tokenizer.decode(answer)
    assert whole["usage"]["prompt_tokens"] == len(prompt)
    chunks = [line.removeprefix("data: ") for line in streamed.split("\n\n")]
    texts = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks if chunk[:1] == "{"]
    assert "".join(texts) == tokenizer.decode(answer)
    assert len(texts) == 24
