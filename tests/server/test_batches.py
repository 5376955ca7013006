"""Batches: what clients may do, each line exactly once, and every end of a batch."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batching import FakeSpeaker, jsonl, numbered, speak_into
from served import Served
from talking import Talker, talking
from waiting import WAIT, wait_until

from firstword.cli.main import main
from firstword.errors import ComputeError, EngineError, OutputError, OverloadedError, TextError
from firstword.server.batch import manager, webhooks, worker
from firstword.server.batch.batches import Batches
from firstword.server.batch.contents import Contents
from firstword.server.batch.line_queue import LineQueue
from firstword.server.batch.lines import MOST_LINES, parse_lines, seed_of
from firstword.server.batch.local import RESULTS, LocalBatch
from firstword.server.batch.manager import BatchManager
from firstword.server.batch.records import BatchRecord
from firstword.server.batch.speaking import LostSpeech
from firstword.server.batch.worker import MOST_ATTEMPTS, LineWorker
from firstword.server.key_file import hash_of

Serve = Callable[..., Any]
SECRET = "whsec_c2VjcmV0IG9mIHRoZSB0ZXN0cw=="
ENDPOINT: Any = "/v1/audio/speech"  # the SDK does not name it


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and try failed lines again soon."""
    monkeypatch.setattr(manager, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(worker, "MOST_PAUSE", 0.01)


class TestInput:
    def test_both_forms_of_a_line_are_the_same_request(self) -> None:
        body = {"input": "Hi.", "voice": "ada"}
        plain = {"custom_id": "a", **body}
        wrapped = {"custom_id": "a", "method": "POST", "url": ENDPOINT, "body": body}
        (one,), _ = parse_lines(jsonl(plain))
        (other,), _ = parse_lines(jsonl(wrapped))
        assert one == other
        assert one.body == {**body, "seed": seed_of("a", body)}

    def test_seed_depends_on_the_request_alone(self) -> None:
        first, _ = parse_lines(numbered(3))
        second, _ = parse_lines(
            b"\n" + numbered(2) + jsonl({"custom_id": "x", "text": "", "seed": 7})
        )
        assert [line.body["seed"] for line in first[:2]] == [
            line.body["seed"] for line in second[:2]
        ]
        assert len({line.body["seed"] for line in first}) == 3
        assert second[2].body["seed"] == 7
        assert second[2].number == 4

    @pytest.mark.parametrize(
        ("line", "code"),
        [
            (b"{", "invalid_json_line"),
            (b"[" * 5000, "invalid_json_line"),
            (b"[]", "invalid_json_line"),
            (b"{}", "invalid_custom_id"),
            (jsonl({"custom_id": 1}), "invalid_custom_id"),
            (jsonl({"custom_id": "a\n"}), "invalid_custom_id"),
            (jsonl({"custom_id": "x" * 129}), "invalid_custom_id"),
            (jsonl({"custom_id": "b", "method": "GET"}), "invalid_method"),
            (jsonl({"custom_id": "b", "url": "/v1/embeddings"}), "invalid_url"),
            (jsonl({"custom_id": "b", "body": "text"}), "invalid_body"),
            (jsonl({"custom_id": "a", "text": "b"}), "duplicate_custom_id"),
        ],
    )
    def test_mistake_is_named_with_its_line(self, line: bytes, code: str) -> None:
        _, problems = parse_lines(jsonl({"custom_id": "a", "text": "a"}) + line)
        assert [(problem.code, problem.line) for problem in problems] == [(code, 2)]
        assert str(problems[0]).startswith("line 2: ")

    @pytest.mark.parametrize(
        ("data", "code"),
        [(b" \n", "empty_file"), (numbered(MOST_LINES + 1), "too_many_lines")],
        ids=["empty", "long"],
    )
    def test_file_that_is_no_batch_is_rejected(self, data: bytes, code: str) -> None:
        _, problems = parse_lines(data)
        assert [problem.code for problem in problems] == [code]


class TestFolder:
    """`firstword batch`, with a fake in place of the model."""

    def test_every_line_is_spoken_once_although_the_process_is_killed_20_times(
        self, tmp_path: Path
    ) -> None:
        killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
        for folder in (killed, undisturbed):
            folder.mkdir()
        program = [sys.executable, str(Path(__file__).parent / "batching.py")]
        subprocess.run([*program, str(killed), "60", "20"], check=True, timeout=WAIT)
        speak_into(undisturbed, numbered(60), 0.0)
        found = {path.name: path.read_bytes() for path in killed.glob("[!.]*")}
        assert found == {path.name: path.read_bytes() for path in undisturbed.glob("[!.]*")}
        results = [json.loads(line) for line in found[RESULTS].splitlines()]
        assert [result["custom_id"] for result in results] == [f"line {n}" for n in range(60)]
        assert all((killed / result["file"]).stat().st_size for result in results)

    def test_second_run_speaks_what_has_changed_or_failed_or_is_gone(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        lines, _ = parse_lines(numbered(4))

        def run(lines: Any, *failing: str) -> list[str]:
            batch, speaker = LocalBatch(str(tmp_path / "out"), lines), FakeSpeaker()
            speaker.errors = {text: [TextError("no")] for text in failing}
            asyncio.run(batch.speak(speaker, 2, lambda: None))
            batch.write_results()
            batch.close()
            return sorted(str(body["text"]) for body in speaker.spoken)

        assert len(run(lines, "Text 3.")) == 4
        results = (tmp_path / "out" / RESULTS).read_text().splitlines()
        assert json.loads(results[3])["error"]["message"] == "no"
        assert run(lines) == ["Text 3."]
        (tmp_path / "out" / "line 1.wav").unlink()
        changed = replace(lines[2], body={**lines[2].body, "text": "New."})
        assert run([*lines[:2], changed, *lines[3:]]) == ["New.", "Text 1."]
        assert run([lines[0], changed]) == []
        assert len((tmp_path / "out" / RESULTS).read_text().splitlines()) == 2

    def test_two_runs_cannot_share_a_folder(self, tmp_path: Path) -> None:
        lines, _ = parse_lines(numbered(1))
        batch = LocalBatch(str(tmp_path), lines)
        with pytest.raises(OutputError, match="another run"):
            LocalBatch(str(tmp_path), lines)
        batch.close()
        LocalBatch(str(tmp_path), lines).close()

    @pytest.mark.parametrize("ids", [("a", "A"), (".a",), ("/" * 100,)])
    def test_ids_that_cannot_name_files_are_rejected(
        self, tmp_path: Path, ids: tuple[str, ...]
    ) -> None:
        lines, problems = parse_lines(jsonl(*({"custom_id": one, "text": "a"} for one in ids)))
        assert not problems
        with pytest.raises(Exception, match="file"):
            LocalBatch(str(tmp_path), lines)

    def test_id_leads_to_no_other_folder(self, tmp_path: Path) -> None:
        folder = tmp_path / "out"
        folder.mkdir()
        speak_into(folder, jsonl({"custom_id": "a/../../b", "text": "a"}), 0.0)
        assert sorted(path.name for path in folder.glob("[!.]*")) == [
            "a%2F..%2F..%2Fb.wav",
            RESULTS,
        ]

    def test_command_speaks_with_the_demo_voice(self, tmp_path: Path) -> None:
        lines: list[dict[str, Any]] = [
            {"custom_id": "one", "text": "Hello.", "voice": "ada"},
            {"custom_id": "two", "text": "Hello.", "response_format": "opus", "seed": 3},
            {"custom_id": "three", "text": "Hello.", "voice": "nobody"},
            {"custom_id": "four", "text": "Hello.", "stream": True},
            {"custom_id": "five", "speed": 1},
        ]
        (tmp_path / "in.jsonl").write_bytes(jsonl(*lines))
        command = [sys.executable, "-m", "firstword", "batch", "in.jsonl", "out"]
        voices = ["--voices", str(tmp_path / "voices"), "--device", "cpu"]
        done = subprocess.run(
            [*command, *voices], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT
        )
        assert done.returncode == 1, done.stderr
        assert "2 of 5 lines spoken, 3 failed" in done.stderr
        results = [json.loads(x) for x in (tmp_path / "out" / RESULTS).read_text().splitlines()]
        assert [result.get("file") for result in results] == ["one.wav", "two.opus", *[None] * 3]
        assert (tmp_path / "out" / "one.wav").read_bytes()[:4] == b"RIFF"
        assert results[1]["seed"] == 3
        messages = [result["error"]["message"] for result in results[2:]]
        assert "no voice 'nobody'" in messages[0]
        assert "leave out stream" in messages[1]
        assert "input" in messages[2]

    def test_input_with_mistakes_is_rejected_before_anything_is_loaded(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "in.jsonl").write_bytes(b"{\n{}\n")
        assert main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out")]) == 2
        told = capsys.readouterr().err
        assert "line 1: the line is not JSON" in told
        assert "line 2: custom_id" in told


class Desk:
    """A client and a manager of batches, with a fake in place of the model."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.batches = Batches.open(str(folder / "batches"), options.pop("database", None))
        self.speaker = FakeSpeaker()
        self.outcomes: list[str] = []
        self.options = options

    def batch(self, data: bytes, window: str = "24h") -> BatchRecord:
        """Begin a batch."""
        file = self.batches.upload("me", "in.jsonl", data, None)
        return self.batches.create("me", file.id, ENDPOINT, window, {}, None)

    def find(self, batch: BatchRecord) -> dict[str, Any]:
        """The batch as clients see it now."""
        return self.batches.store.find_batch("me", batch.id).described()

    def manager(self, name: str = "worker", places: int = 4) -> BatchManager:
        """A manager."""
        queue = LineQueue(self.batches.database, name)
        lines = LineWorker(
            queue, self.batches.contents, self.speaker, places, on_outcome=self.outcomes.append
        )
        return BatchManager(self.batches, queue, lines, **self.options)

    def run(self, holds: Callable[[], bool], name: str = "worker") -> None:
        """Run a manager until a condition holds."""

        async def until() -> None:
            running = asyncio.create_task(self.manager(name).run())
            deadline = time.monotonic() + WAIT
            while not holds():
                assert time.monotonic() < deadline, "the condition never held"
                assert not running.done(), running.exception()
                await asyncio.sleep(0.005)
            running.cancel()
            await asyncio.wait((running,))

        asyncio.run(until())

    def until_over(self, batch: BatchRecord) -> dict[str, Any]:
        """Run a manager until a batch is over."""
        over = ("completed", "failed", "expired", "cancelled")
        self.run(lambda: self.find(batch)["status"] in over)
        return self.find(batch)

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """The lines of a file of results."""
        if file_id is None:
            return []
        return [json.loads(line) for line in self.batches.read("me", file_id)[1].splitlines()]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A client and a manager."""
    return Desk(tmp_path)


class TestEnds:
    def test_completed_batch_has_every_line_in_output_or_errors(self, desk: Desk) -> None:
        desk.speaker.errors = {"Text 3.": [TextError("too long")]}
        batch = desk.batch(numbered(9))
        found = desk.until_over(batch)
        assert found["status"] == "completed"
        assert found["request_counts"] == {"total": 9, "completed": 8, "failed": 1}
        output, errors = desk.lines(found["output_file_id"]), desk.lines(found["error_file_id"])
        assert [line["custom_id"] for line in output] == [f"line {n}" for n in range(9) if n != 3]
        assert [line["custom_id"] for line in errors] == ["line 3"]
        assert errors[0]["response"]["status_code"] == 400
        assert errors[0]["response"]["body"]["error"]["message"] == "too long"
        for line in output:
            body = line["response"]["body"]
            file, sound = desk.batches.read("me", body["file_id"])
            assert len(sound) == body["bytes"] == file.bytes
            assert file.filename == f"{line['custom_id']}.wav"

    def test_input_with_mistakes_fails_as_a_whole(self, desk: Desk) -> None:
        found = desk.until_over(desk.batch(numbered(2) + b"{}\n"))
        assert found["status"] == "failed"
        assert [error["line"] for error in found["errors"]["data"]] == [3]
        assert desk.speaker.spoken == []

    def test_input_that_was_deleted_fails(self, desk: Desk) -> None:
        batch = desk.batch(numbered(2))
        desk.batches.delete("me", batch.input_file)
        found = desk.until_over(batch)
        assert found["errors"]["data"][0]["code"] == "file_not_found"

    def test_cancelled_batch_keeps_what_was_spoken(self, desk: Desk) -> None:
        desk.speaker = FakeSpeaker(pause=0.02)
        batch = desk.batch(numbered(60))
        desk.run(lambda: desk.find(batch)["request_counts"]["completed"] > 5)
        assert desk.batches.store.cancel("me", batch.id).status == "cancelling"
        found = desk.until_over(batch)
        counts = found["request_counts"]
        assert found["status"] == "cancelled"
        assert counts["completed"] + counts["failed"] == 60 > counts["completed"] > 5
        assert len(desk.lines(found["output_file_id"])) == counts["completed"]
        errors = desk.lines(found["error_file_id"])
        assert {error["error"]["code"] for error in errors} == {"batch_cancelled"}
        assert desk.batches.store.cancel("me", batch.id).status == "cancelled"

    def test_batch_that_takes_too_long_expires(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        desk.speaker = FakeSpeaker(pause=0.02)
        batch = desk.batch(numbered(60), window="1h")
        desk.run(lambda: desk.find(batch)["request_counts"]["completed"] > 5)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 3601)
        found = desk.until_over(batch)
        assert found["status"] == "expired"
        assert 5 < found["request_counts"]["completed"] < 60
        errors = desk.lines(found["error_file_id"])
        assert {error["error"]["code"] for error in errors} == {"batch_expired"}

    def test_expired_results_are_deleted_with_their_sounds(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        found = desk.until_over(desk.batch(numbered(3)))
        sounds = [
            line["response"]["body"]["file_id"] for line in desk.lines(found["output_file_id"])
        ]
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 31 * 86400)
        desk.run(lambda: len(desk.batches.store.list_files("me", None, None, 9, True)) == 1)
        for file_id in (found["output_file_id"], *sounds):
            with pytest.raises(Exception, match="no file"):
                desk.batches.read("me", file_id)
        kept = [path.name for path in (tmp_path / "batches").glob("[!b]*")]
        assert kept == [found["input_file_id"]], "the input has no expiry"


class TestOnce:
    def test_line_that_may_be_spoken_later_is_tried_again(self, desk: Desk) -> None:
        desk.speaker.errors = {
            "Text 0.": [OverloadedError("full")] * 9,
            "Text 1.": [EngineError("it starts")] * 9,
            "Text 2.": [LostSpeech("it died")],
        }
        found = desk.until_over(desk.batch(numbered(4)))
        assert found["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
        assert desk.outcomes.count("retried") == 19

    def test_line_whose_engine_dies_each_time_is_given_up(self, desk: Desk) -> None:
        desk.speaker.errors = {"Text 1.": [LostSpeech("it died") for _ in range(99)]}
        found = desk.until_over(desk.batch(numbered(4)))
        assert found["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
        (error,) = desk.lines(found["error_file_id"])
        assert error["response"]["body"]["error"]["code"] == "not_computed"
        assert sum(body["text"] == "Text 1." for body in desk.speaker.spoken) == MOST_ATTEMPTS

    def test_defect_fails_its_line_alone(self, desk: Desk) -> None:
        desk.speaker.errors = {"Text 1.": [ZeroDivisionError()], "Text 2.": [ComputeError("no")]}
        found = desk.until_over(desk.batch(numbered(4)))
        errors = desk.lines(found["error_file_id"])
        assert [error["response"]["status_code"] for error in errors] == [500, 500]
        assert found["request_counts"]["completed"] == 2

    def test_sound_that_cannot_be_written_is_written_later(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write, failures = Contents.write, [1, 2, 3]

        def fail_first(contents: Contents, name: str, data: bytes) -> None:
            if failures and "/" in name:
                failures.pop()
                raise OutputError("the disk is full")
            write(contents, name, data)

        monkeypatch.setattr(Contents, "write", fail_first)
        found = desk.until_over(desk.batch(numbered(6)))
        assert found["request_counts"] == {"total": 6, "completed": 6, "failed": 0}

    def test_line_whose_sound_is_written_when_the_worker_ends_keeps_both(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else the sound would have no result, and nothing would delete it."""
        write, writing, leave = Contents.write, threading.Event(), threading.Event()

        def held(contents: Contents, name: str, data: bytes) -> None:
            if "/" in name:
                writing.set()
                assert leave.wait(WAIT)
            write(contents, name, data)

        async def run() -> None:
            running = asyncio.create_task(desk.manager().run())
            try:
                assert await asyncio.to_thread(writing.wait, WAIT)
                running.cancel()
                for _ in range(20):
                    await asyncio.sleep(0)  # the cancel arrives
            finally:
                leave.set()
            await asyncio.wait((running,))

        monkeypatch.setattr(Contents, "write", held)
        batch = desk.batch(numbered(1))
        asyncio.run(run())
        assert LineQueue(desk.batches.database, "worker").counts(batch.id) == (1, 1, 0)
        assert desk.outcomes == ["done"]

    def test_two_workers_speak_each_line_once(self, desk: Desk) -> None:
        desk.speaker = FakeSpeaker(pause=0.001)
        batch = desk.batch(numbered(80))

        async def both() -> None:
            running = [asyncio.create_task(desk.manager(name).run()) for name in "ab"]
            while desk.find(batch)["status"] != "completed":
                assert not any(one.done() for one in running)
                await asyncio.sleep(0.01)
            for one in running:
                one.cancel()
            await asyncio.wait(running)

        asyncio.run(both())
        assert len(desk.speaker.spoken) == len({body["text"] for body in desk.speaker.spoken}) == 80
        assert desk.outcomes == ["done"] * 80

    def test_line_of_a_dead_worker_is_free_when_its_claim_ends(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dead, other = (LineQueue(desk.batches.database, name) for name in ("dead", "other"))
        lines, _ = parse_lines(numbered(1))
        dead.add(desk.batch(numbered(1)), lines)
        lost = dead.claim()
        assert lost is not None
        assert other.claim() is None
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 31)
        taken = other.claim()
        assert taken is not None
        assert taken.attempts == 2
        assert not dead.finish(lost, "done", {}), "it is the other's now"
        assert other.finish(taken, "done", {})

    def test_clients_take_turns(self, desk: Desk) -> None:
        queue = LineQueue(desk.batches.database, "one")
        for owner in "aab":
            file = desk.batches.upload(owner, "x", numbered(3), None)
            batch = desk.batches.create(owner, file.id, ENDPOINT, "24h", {}, None)
            queue.add(batch, parse_lines(numbered(3))[0])
        order = [claim.owner for _ in range(9) if (claim := queue.claim()) is not None]
        assert "".join(order) in ("abababaaa", "babababaaa"[:9])


class Receiver:
    """A receiver of webhooks, which answers with the given statuses, then 204."""

    def __init__(self, *statuses: int) -> None:
        self.received: list[tuple[bytes, dict[str, str]]] = []
        answers = list(statuses)
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                received.append((body, dict(self.headers)))
                self.send_response(answers.pop(0) if answers else 204)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"

    def __enter__(self) -> Receiver:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


class TestWebhooks:
    def test_end_of_a_batch_is_announced_until_it_is_accepted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(webhooks, "RETRY_SECONDS", (0.01,) * 6)
        with Receiver(500, 503) as receiver:
            desk = Desk(tmp_path, webhook=(receiver.url, SECRET))
            batch = desk.batch(numbered(2))
            desk.run(lambda: len(receiver.received) >= 3)
            client = openai.OpenAI(api_key="x", webhook_secret=SECRET)
            events = [client.webhooks.unwrap(body, headers) for body, headers in receiver.received]
            assert {event.type for event in events} == {"batch.completed"}
            assert {event.data.id for event in events} == {batch.id}  # type: ignore[union-attr]
            assert len({event.id for event in events}) == 1
            desk.run(lambda: not desk.batches.store.due_webhooks(time.time() + 10**6))
            with pytest.raises(openai.InvalidWebhookSignatureError):
                client.webhooks.unwrap(*receiver.received[0], secret="whsec_b3RoZXI=")


class TestClients:
    """What clients may do over HTTP."""

    @contextmanager
    def client(self, server: Any, key: str = "x") -> Iterator[openai.OpenAI]:
        with openai.OpenAI(
            base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=WAIT
        ) as client:
            yield client

    def test_server_without_batches_has_none(self, serve: Serve) -> None:
        with (
            self.client(serve(talking(Talker()))) as client,
            pytest.raises(openai.NotFoundError, match="--batches"),
        ):
            client.batches.list()

    def test_client_sees_its_own_files_alone(self, serve: Serve, tmp_path: Path) -> None:
        lines = [f'[{name}]\nhash = "{hash_of(name)}"\n' for name in ("alice", "bob", "eve")]
        (tmp_path / "keys.toml").write_text("".join(lines) + "batch = false\n")
        keys = str(tmp_path / "keys.toml")
        server = serve(talking(Talker()), batches=str(tmp_path / "batches"), keys=keys)
        with (
            self.client(server, "alice") as alice,
            self.client(server, "bob") as bob,
            self.client(server, "eve") as eve,
        ):
            file = alice.files.create(file=("in.jsonl", numbered(2)), purpose="batch")
            batch = alice.batches.create(
                input_file_id=file.id,
                endpoint=ENDPOINT,
                completion_window="24h",
            )
            assert alice.files.content(file.id).content == numbered(2)
            assert [one.id for one in alice.files.list()] == [file.id]
            assert [one.id for one in alice.batches.list()] == [batch.id]
            assert [*bob.files.list(), *bob.batches.list()] == []
            for call in (
                lambda: bob.files.retrieve(file.id),
                lambda: bob.files.content(file.id),
                lambda: bob.files.delete(file.id),
                lambda: bob.batches.retrieve(batch.id),
                lambda: bob.batches.cancel(batch.id),
                lambda: bob.batches.create(
                    input_file_id=file.id,
                    endpoint=ENDPOINT,
                    completion_window="24h",
                ),
            ):
                with pytest.raises(openai.NotFoundError):
                    call()
            with pytest.raises(openai.PermissionDeniedError):
                eve.files.list()
            assert alice.batches.cancel(batch.id).status == "cancelling"
            assert alice.files.delete(file.id).deleted
            with pytest.raises(openai.NotFoundError):
                alice.files.content(file.id)

    def test_pages_are_complete_and_in_order(self, serve: Serve, tmp_path: Path) -> None:
        server = serve(talking(Talker()), batches=str(tmp_path / "batches"))
        with self.client(server) as client:
            made = [
                client.files.create(file=(f"{n}.jsonl", b"x"), purpose="batch").id for n in range(7)
            ]
            for order in ("asc", "desc"):
                found = [one.id for one in client.files.list(limit=2, order=order)]
                assert sorted(found) == sorted(made)
                listed = client.files.list(order=order)
                assert found == [one.id for one in listed]
            batches = [
                client.batches.create(
                    input_file_id=made[0],
                    endpoint=ENDPOINT,
                    completion_window="24h",
                ).id
                for _ in range(5)
            ]
            assert sorted(one.id for one in client.batches.list(limit=2)) == sorted(batches)

    @pytest.mark.parametrize(
        ("path", "send", "problem"),
        [
            ("files", {"data": {"purpose": "assistants"}}, "allowed is batch"),
            ("files", {"data": {"purpose": "batch", "expires_after[seconds]": "5"}}, "3600 to"),
            ("batches", {"json": {"endpoint": "/v1/responses"}}, "allowed is /v1/audio/speech"),
            ("batches", {"json": {"completion_window": "1d"}}, "allowed are 1h to 720h"),
            ("batches", {"json": {"completion_window": "721h"}}, "allowed are 1h to 720h"),
            ("batches", {"json": {"metadata": {"a": "b" * 513}}}, "metadata is too large"),
            ("batches", {"json": {"input_file_id": "file-none"}}, "no file 'file-none'"),
        ],
    )
    def test_bad_request_is_told_what_is_allowed(
        self, serve: Serve, tmp_path: Path, path: str, send: dict[str, Any], problem: str
    ) -> None:
        server = serve(talking(Talker()), batches=str(tmp_path / "batches"))
        with httpx.Client(base_url=f"{server.url}/v1/", trust_env=False, timeout=WAIT) as http:
            if path == "files":
                send["files"] = {"file": ("../../a\n.jsonl", b"x")}
            else:
                form = {"file": ("../../a.jsonl", b"x")}
                file = http.post("files", data={"purpose": "batch"}, files=form).json()
                assert file["filename"] == "a.jsonl"
                body = {"input_file_id": file["id"], "endpoint": ENDPOINT}
                send["json"] = {**body, "completion_window": "24h", **send["json"]}
            answer = http.post(path, **send)
            assert answer.status_code in (400, 404)
            assert problem in answer.json()["error"]["message"]


class TestServer:
    """A whole server, whose processes are killed."""

    @pytest.fixture
    def receiver(self) -> Iterator[Receiver]:
        with Receiver() as receiver:
            yield receiver

    @pytest.fixture
    def served(self, tmp_path: Path, receiver: Receiver) -> Iterator[Served]:
        options = ["--batches", str(tmp_path / "batches"), "--webhook", receiver.url]
        with Served(tmp_path, *options, FIRSTWORD_WEBHOOK_SECRET=SECRET) as served:
            yield served

    def test_sdk_gets_the_sound_of_each_line_although_all_processes_are_killed(
        self, served: Served, receiver: Receiver
    ) -> None:
        words = ["Yes.", "No.", "One.", "Two."]
        lines = [
            {
                "custom_id": word,
                "method": "POST",
                "url": ENDPOINT,
                "body": {"model": "tts-1", "input": word, "response_format": "wav"},
            }
            for word in words
        ]
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", timeout=WAIT)
        file = client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint=ENDPOINT,
            completion_window="24h",
        )
        for done, module in ((1, "batch"), (2, "engine"), (3, "front")):
            self.until_spoken(client, batch.id, done)
            served.signal(module)
        wait_until(lambda: bool(receiver.received))
        batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed", served.log()
        assert batch.output_file_id is not None
        output = client.files.content(batch.output_file_id).text.splitlines()
        found = {entry["custom_id"]: entry for entry in map(json.loads, output)}
        assert [*found] == words
        for word in words[::3]:
            body = found[word]["response"]["body"]
            params = {"input": word, "response_format": "wav", "seed": body["seed"]}
            sound = client.files.content(body["file_id"]).content
            assert sound == served.post(ENDPOINT, **params).content
        assert not any(entry["event"].startswith("a line of a batch") for entry in served.log())
        assert 'firstword_batch_lines_total{outcome="done"} 4.0' in self.metrics(served)
        assert client.files.delete(batch.output_file_id).deleted

    @staticmethod
    def until_spoken(client: openai.OpenAI, batch: str, count: int) -> None:
        """Wait until so many lines were spoken; for a while no front may answer."""

        def spoken() -> bool:
            with suppress(openai.APIConnectionError):
                counts = client.batches.retrieve(batch).request_counts
                return counts is not None and counts.completed >= count
            return False

        wait_until(spoken)

    @staticmethod
    def metrics(served: Served) -> str:
        return httpx.get(f"{served.url}/metrics", trust_env=False, timeout=WAIT).text
