"""What a server tells about itself: counters for Prometheus, and a line of JSON for every request."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from tests.serving import Brake, Served, serving, tiny_llm


def metrics_of(client: Served) -> dict[str, float]:
    """`name{labels}` -> value, the label of the model left out."""
    page = client.get("/metrics").text
    found = re.findall(r"^branchwise:(\S+?)(\{.*\})? (\S+)$", page, re.MULTILINE)
    return {
        name + re.sub(r'(,?)model_name="tiny"(,?)', "", labels).replace("{}", ""): float(value)
        for name, labels, value in found
    }


def test_counters_follow_what_was_written() -> None:
    with serving(tiny_llm) as client:
        before = metrics_of(client)
        assert before["generation_tokens_total"] == before["spec_decode_num_drafts_total"] == 0
        told = [
            client.complete(prompt, max_tokens=20, temperature=0, metrics=True)["metrics"]["speculative_decoding"]
            for prompt in ("abcabcabc", "0101010101")
        ]
        client.complete("x", n=2, max_tokens=3, logit_bias={"0": 100})
        client.post("/v1/completions", json={"prompt": 5})
        after = metrics_of(client)
        assert after["generation_tokens_total"] == 42
        assert after["prompt_tokens_total"] == 20
        assert after["spec_decode_num_drafts_total"] == sum(one["num_spec_steps"] for one in told) > 0
        assert after["spec_decode_num_draft_tokens_total"] == sum(one["num_draft_tokens"] for one in told)
        accepted = sum(one["num_accepted_draft_tokens"] for one in told)
        assert after["spec_decode_num_accepted_tokens_total"] == accepted
        assert sum(value for name, value in after.items() if "per_pos" in name) == accepted
        assert after['accepted_tokens_by_source_total{source="ngram"}'] == accepted
        assert after['request_success_total{finished_reason="length"}'] == 2
        assert after['request_success_total{finished_reason="stop"}'] == 2
        assert after['request_refused_total{status="400"}'] == 1
        assert after["time_to_first_token_seconds_count"] == after["e2e_request_latency_seconds_count"] == 3
        assert after["time_per_output_token_seconds_count"] == 2
        for phase in ("prefill", "draft", "score", "verify", "commit"):
            assert after[f'phase_seconds_total{{phase="{phase}"}}'] > 0


def test_gauges_show_what_runs_and_what_waits() -> None:
    llm = tiny_llm(slots=1)
    brake = Brake(llm)
    asked = {"prompt": "abcabc", "max_tokens": 30, "stream": True}
    with serving(lambda: llm) as client:
        brake.hold()
        with client.stream("POST", "/v1/completions", json={**asked, "n": 3}) as answer:
            brake.wait()
            now = metrics_of(client)
            assert (now["num_requests_running"], now["num_requests_waiting"]) == (1, 2)
            assert (now["kv_slots"], now["kv_slots_used"]) == (1, 1)
            brake.release()
            answer.read()
        now = metrics_of(client)
        assert (now["num_requests_running"], now["num_requests_waiting"], now["kv_slots_used"]) == (0, 0, 0)


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    board = (Path(__file__).parents[1] / "deploy" / "grafana.json").read_text()
    shown = {name.removesuffix("_bucket") for name in re.findall(r"branchwise:(\w+)", board)}
    with serving(tiny_llm) as client:
        client.complete("0101010101", max_tokens=20, temperature=0)
        client.post("/v1/completions", json={"prompt": 5})
        told = set(re.findall(r"^# TYPE branchwise:(\w+)", client.get("/metrics").text, re.MULTILINE))
    assert shown <= told
    assert len(shown) >= 15


def test_a_request_is_one_line_of_json_without_a_word_of_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="branchwise.requests")
    with serving(tiny_llm) as client:
        secret = "a secret\nline\x1b[31m"
        client.complete(secret, max_tokens=5, odd_field=1)
        client.post(f"/v1/{'x' * 200}%0aforged", json={})
        with client.stream(
            "POST", "/v1/completions", json={"prompt": secret, "max_tokens": 5, "stream": True}
        ) as found:
            found.read()
    lines = [record.getMessage() for record in caplog.records if record.name == "branchwise.requests"]
    assert len(lines) == 3
    assert all("\n" not in line and line.isascii() and "secret" not in line for line in lines)
    whole, refused, stream = map(json.loads, lines)
    assert (whole["status"], whole["completion_tokens"], whole["stream"]) == (200, 5, False)
    assert whole["ignored"] == ["odd_field"]
    assert whole["speculative_decoding"]["num_draft_tokens"] >= 0
    assert (refused["event"], refused["status"], len(refused["path"])) == ("refused", 404, 80)
    assert (stream["status"], stream["stream"], stream["finish_reasons"]) == (200, True, ["length"])
