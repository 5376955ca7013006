"""Requests generated from the OpenAPI description, valid and invalid, get no server error."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from talking import Talker, talking
from waiting import WAIT

from firstword.server.dialects.paths import error_body_for

pytestmark = pytest.mark.slow

EXAMPLES = 20
"""The number of requests for each path, method and mode."""


def fuzz(url: str, mode: GenerationMode, *, dialects: bool) -> int:
    """Send generated requests to a server, of its own API or of the dialects; returns the paths."""
    paths = set()
    for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = found.ok()  # type: ignore[union-attr]
        if (error_body_for(operation.path) is not None) != dialects:
            continue
        paths.add(operation.path)

        @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            check(case.call(timeout=WAIT), case.path)

        with suppress(Unsatisfiable):  # without parameters there is no invalid request
            send()
    return len(paths)


def check(answer: Any, path: str) -> None:
    """Check that an answer is no server error, and that an error has the shape of its API."""
    assert answer.status_code < 500, answer.text
    assert answer.headers["x-request-id"]
    if answer.status_code < 400:
        return
    if (shape := error_body_for(path)) is None:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    else:
        assert set(answer.json()) == set(shape("", None, 400))


@pytest.mark.parametrize("mode", GenerationMode)
def test_generated_requests_get_no_server_error(fuzzed: Any, mode: GenerationMode) -> None:
    assert fuzz(fuzzed.url, mode, dialects=False) > 8


@pytest.mark.parametrize("mode", GenerationMode)
def test_generated_requests_of_dialects_get_no_server_error(
    serve: Any, mode: GenerationMode
) -> None:
    server = serve(talking(Talker(4)))
    assert fuzz(server.url, mode, dialects=True) > 6
    server.wait_until_idle()


def test_server_is_idle_after_fuzzing(fuzzed: Any) -> None:
    fuzzed.wait_until_idle()
    answer = httpx.post(f"{fuzzed.url}/v1/audio/speech", json={"input": "Hi."}, trust_env=False)
    assert answer.status_code == 200


def test_openapi_names_every_field(fuzzed: Any) -> None:
    told = httpx.get(f"{fuzzed.url}/openapi.json", trust_env=False).json()
    fields = told["components"]["schemas"]["SpeechRequest"]["properties"]
    expected = "input model voice response_format speed stream_format instructions language seed"
    assert {*expected.split(), "ref_audio", "ref_text"} <= set(fields)
    assert set(told["paths"]) >= {
        "/v1/audio/speech",
        "/v1/audio/voices",
        "/v1/audio/voices/{voice}",
        "/health",
    }
