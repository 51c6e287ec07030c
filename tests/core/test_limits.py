"""What a member says up to each limit counts, and one more is left out and told."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from app.core import limits
from app.core.limits import MAX_COUNT, MAX_MEASURED, MAX_NAME, MAX_NAMES
from app.core.registration import decode_info, decode_metrics, encode_info, encode_metrics
from app.core.worker_report import DEFAULT_SPEED, ForwardPassMetrics
from tests.fake_worker import worker_info

NAMES = tuple(f"a{number}" for number in range(MAX_NAMES))
ONE = ("b",)


@pytest.mark.parametrize("field", ["models", "adapters", "kv_hosts", "event_addresses"])
@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (NAMES, NAMES),
        ((*NAMES, "b"), NAMES),
        (("x" * MAX_NAME,), ("x" * MAX_NAME,)),
        (("x" * (MAX_NAME + 1), "b"), ONE),
        (("", "b"), ONE),
        (("no-break\u00a0space", "b"), ONE),
        (("end\nof line", "half a pair \ud800", "b"), ONE),
    ],
)
def test_names_over_a_limit_are_left_out_and_told(field, said, kept):
    info = decode_info(encode_info(replace(worker_info("w"), **{field: said}), 3000))
    assert getattr(info, field) == kept
    num = len(said) - len(kept)
    text = f"{num} of {len(said)} {field} are left out"
    assert [finding.partition(":")[0] for finding in info.findings] == [text] * (num > 0)
    assert decode_info(encode_info(info, 3000)) == info


@pytest.mark.parametrize(
    ("said", "counts"), [(0, 0), (-1, 0), (MAX_COUNT, MAX_COUNT), (MAX_COUNT + 1, MAX_COUNT)]
)
def test_a_number_over_its_limit_counts_as_that(said, counts):
    info = decode_info(encode_info(worker_info("w", max_model_len=said), 3000))
    assert info.max_model_len == counts
    assert len(info.findings) == (said != counts)


def test_findings_have_limits_too():
    findings = (*(f"finding {number}" for number in range(MAX_NAMES)), "x" * 300)
    info = worker_info("w", findings=findings, models=("",))
    assert decode_info(encode_info(info, 3000)).findings == findings[:MAX_NAMES]


@pytest.mark.parametrize(
    ("said", "counts"),
    [(MAX_MEASURED, MAX_MEASURED), (1.1e15, 0.0), (-1.0, 0.0), (float("nan"), 0.0)],
)
def test_a_measured_number_that_cannot_be_leaves_the_others(said, counts):
    measured = ForwardPassMetrics(request_active_slots=7, gpu_cache_usage_perc=said)
    entry = {k.encode(): v.encode() for k, v in encode_metrics(measured, DEFAULT_SPEED).items()}
    assert decode_metrics(entry)[0] == replace(measured, gpu_cache_usage_perc=counts)


def test_a_page_has_the_limits():
    page = (Path(__file__).parents[2] / "docs/engines.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([\d,]+) [^|]*\| [^|]+ \|$", page, re.M))
    said = [int(number.replace(",", "")) for number in rows.values()]
    names = [name for name in vars(limits) if name.startswith("MAX_")]
    # Of two, the first is another's unit: MiB.
    units = {"MAX_ANSWER_BYTES": 1 << 20, "MAX_ENGINES_BYTES": 1 << 20}
    assert said == [getattr(limits, name) // units.get(name, 1) for name in names]
