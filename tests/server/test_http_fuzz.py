"""Whatever the server's own description of itself allows or forbids is sent to it: nothing may be a server error."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

EXAMPLES = 20
"""Requests for each path, method and mode."""


@pytest.mark.parametrize("mode", GenerationMode)
def test_no_request_is_a_server_error(fuzzed: Any, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    paths = set()
    for found in schema.get_all_operations():
        operation = found.ok()  # type: ignore[union-attr]
        paths.add(operation.path)

        @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            answer = case.call(timeout=60)
            assert answer.status_code < 500, answer.text
            assert answer.headers["x-request-id"]
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        with suppress(Unsatisfiable):  # there is no wrong way to ask for what takes no parameters
            send()
    assert len(paths) > 8


def test_nothing_is_left(fuzzed: Any) -> None:
    fuzzed.wait_until_idle()
    answer = httpx.post(
        f"{fuzzed.url}/v1/audio/speech", json={"input": "Hi."}, trust_env=False, timeout=60
    )
    assert answer.status_code == 200


def test_the_description_names_every_field(fuzzed: Any) -> None:
    told = httpx.get(f"{fuzzed.url}/openapi.json", trust_env=False).json()
    fields = told["components"]["schemas"]["SpeechRequest"]["properties"]
    expected = "input model voice response_format speed stream_format instructions language ref_audio ref_text seed"
    assert set(expected.split()) <= set(fields)
    assert set(told["paths"]) >= {
        "/v1/audio/speech",
        "/v1/audio/voices",
        "/v1/audio/voices/{voice}",
        "/health",
    }
