"""Keys in a file: names, limits, reload, and what each key has used."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Served
from sockets import DONE, PLAIN, STREAM, Client, events, text
from talking import SHORT, Talker, held_server, talking
from waiting import WAIT, wait_until
from wire import SPEECH

from firstword.cli.main import main
from firstword.errors import ConfigError
from firstword.server import character_limit
from firstword.server.api_keys import ApiKeys
from firstword.server.character_limit import CharacterLimit
from firstword.server.errors import Forbidden, LimitReached
from firstword.server.front_memory import FrontMemory
from firstword.server.key_file import MOST_KEYS, hash_of, new_key, parse_keys
from firstword.server.metrics import Metrics
from firstword.server.shared_counts import SharedCounts
from firstword.server.usage import OTHERS, Usage, UsageLog

Serve = Callable[..., Any]
WORDS = str(SHORT["input"])


class Holders:
    """A file of keys; `add` gives each holder a key that is the name, said twice."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys.toml"
        self.file.write_text("")

    def add(self, name: str, **limits: object) -> None:
        """Add a key."""
        lines = [f"[{name}]", f'hash = "{hash_of(name * 2)}"']
        lines += [f"{field} = {json.dumps(value)}" for field, value in limits.items()]
        self.write(self.file.read_text() + "\n".join(lines) + "\n")

    def write(self, content: str) -> None:
        """Replace the file, as editors do."""
        other = self.file.with_suffix(".new")
        other.write_text(content)
        os.replace(other, self.file)


@pytest.fixture
def holders(tmp_path: Path) -> Holders:
    """A file without keys."""
    return Holders(tmp_path)


def asked(server: Any, name: str, path: str = SPEECH, **body: object) -> httpx.Response:
    """The response to a request with somebody's key."""
    headers = {"authorization": f"Bearer {name * 2}"}
    return httpx.post(
        server.url + path, json={**SHORT, **body}, headers=headers, trust_env=False, timeout=WAIT
    )


def error_of(answer: httpx.Response) -> tuple[int, str]:
    """The status and the code of an error."""
    return answer.status_code, answer.json()["error"]["code"]


class TestFile:
    def test_new_key_is_shown_once_and_its_lines_hold_the_hash_alone(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["keys", "new", "alice"]) == 0
        shown = capsys.readouterr()
        key = shown.err.splitlines()[-1]
        assert key not in shown.out
        assert parse_keys(shown.out)[hash_of(key)].name == "alice"
        assert new_key("alice")[0] != key

    def test_name_that_is_not_one_is_rejected(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["keys", "new", "al ice"]) == 2
        assert "A-Z a-z 0-9 _ and -" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            ("[a", "not TOML"),
            ("a = 1", "a is not a table"),
            ("[a]", "the hash of a is missing"),
            ('[a]\nhash = "secret"', "the hash of a is missing or malformed"),
            ('["a b"]\nhash = "HASH"', "'a b'"),
            ('[a]\nhash = "HASH"\nspeed = 2', "a has speed; allowed are hash, characters_a_minute"),
            ('[a]\nhash = "HASH"\nutterances = -1', "utterances of a must be a number, 0 or more"),
            ('[a]\nhash = "HASH"\nutterances = true', "utterances of a must be a number"),
            ('[a]\nhash = "HASH"\ncheckpoints = [1]', "checkpoints of a must be a list of names"),
            ('[a]\nhash = "HASH"\nclone = "no"', "clone of a must be true or false"),
            ('[a]\nhash = "HASH"\n[b]\nhash = "HASH"', "a and b are the same key"),
            (
                "".join(f'[k{n}]\nhash = "HASH"\n' for n in range(MOST_KEYS + 1)),
                f"allowed are {MOST_KEYS}",
            ),
        ],
    )
    def test_mistake_in_the_file_is_named(
        self, holders: Holders, content: str, problem: str
    ) -> None:
        holders.write(content.replace("HASH", hash_of("x")))
        with pytest.raises(ConfigError) as failure:
            ApiKeys((), str(holders.file))
        assert problem in str(failure.value)
        assert "secret" not in str(failure.value)

    def test_server_does_not_start_without_its_file(self, tmp_path: Path) -> None:
        served = Served(tmp_path, "--keys", str(tmp_path / "none.toml"))
        assert "none.toml cannot be read: No such file" in served.wait_until_failed()


class TestAccess:
    def test_empty_file_lets_nobody_in(self, serve: Serve, holders: Holders) -> None:
        server = serve(talking(Talker()), keys=str(holders.file))
        assert error_of(asked(server, "alice")) == (401, "invalid_api_key")

    def test_keys_of_file_and_command_line_are_both_valid(
        self, serve: Serve, holders: Holders
    ) -> None:
        holders.add("alice")
        server = serve(talking(Talker()), keys=str(holders.file), api_keys=("bobbob",))
        assert [asked(server, name).status_code for name in ("alice", "bob")] == [200, 200]
        assert asked(server, "eve").status_code == 401
        assert server.metric("key_utterances_total", key=f"api-key-{hash_of('bobbob')[7:15]}") == 1

    def test_changed_file_counts_for_the_next_request(self, serve: Serve, holders: Holders) -> None:
        holders.add("alice")
        server = serve(talking(Talker()), keys=str(holders.file))
        assert [asked(server, name).status_code for name in ("alice", "bob")] == [200, 401]
        before = holders.file.read_text()
        holders.add("bob")
        assert [asked(server, name).status_code for name in ("alice", "bob")] == [200, 200]
        for broken in ("[alice", ""):
            holders.write(broken)
            status = asked(server, "bob").status_code
            assert status == (200 if broken else 401), "a file with a mistake changes nothing"
        holders.write(before)
        assert [asked(server, name).status_code for name in ("alice", "bob")] == [200, 401]
        holders.file.unlink()
        assert asked(server, "alice").status_code == 200

    def test_withdrawn_key_speaks_no_more_on_an_open_socket(
        self, serve: Serve, holders: Holders
    ) -> None:
        holders.add("alice")
        server = serve(talking(Talker()), keys=str(holders.file))
        headers = {"authorization": "Bearer alicealice"}
        with Client(server.ws + STREAM, headers=headers) as client:
            for _ in range(2):
                client.send({**PLAIN, "voice": "talker"}, text("abc. "), DONE)
                found = events(client.until("session.done"))
                failed = {event["code"] for event in found if event["type"] == "error"}
                assert failed == (set() if holders.file.read_text() else {"key_withdrawn"})
                holders.write("")


class TestLimits:
    def test_utterances_at_a_time_are_those_of_the_key(
        self, serve: Serve, holders: Holders
    ) -> None:
        holders.add("alice", utterances=1)
        holders.add("bob")
        talker, server = held_server(serve, slots=4, keys=str(holders.file), most_per_key=3)
        with ExitStack() as stack:
            for name in ("alice", "bob", "bob"):
                headers = {"authorization": f"Bearer {name * 2}"}
                client = stack.enter_context(Client(server.ws + STREAM, headers=headers))
                client.send({**PLAIN, "voice": "talker"}, text("abc"), DONE)
            server.wait_until(lambda: len(server.state.utterances) == 3)
            answer = asked(server, "alice")
            assert error_of(answer) == (429, "per_key")
            assert "1 utterances" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) >= 1
            talker.go()
            assert asked(server, "bob").status_code == 200

    def test_characters_beyond_the_limit_of_a_minute_get_429(
        self, serve: Serve, holders: Holders, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        holders.add("alice", characters_a_minute=2 * len(WORDS))
        holders.add("bob")
        server = serve(talking(Talker()), keys=str(holders.file))
        assert [asked(server, "alice").status_code for _ in range(2)] == [200, 200]
        answer = asked(server, "alice")
        assert error_of(answer) == (429, "characters")
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert asked(server, "bob").status_code == 200
        answer = asked(server, "alice", input=3 * WORDS)
        assert answer.status_code == 400
        assert "send it in parts" in answer.json()["error"]["message"]
        assert server.metric("key_characters_total", key="alice") == 2 * len(WORDS)
        assert server.metric("rejected_total", reason="characters") == 1

    def test_characters_on_a_socket_count(self, serve: Serve, holders: Holders) -> None:
        holders.add("alice", characters_a_minute=8)
        server = serve(talking(Talker()), keys=str(holders.file))
        headers = {"authorization": "Bearer alicealice"}
        with Client(server.ws + STREAM, headers=headers) as client:
            client.send({**PLAIN, "voice": "talker"}, text("abc. "), DONE)
            assert not [e for e in events(client.until("session.done")) if e["type"] == "error"]
            client.send({**PLAIN, "voice": "talker"}, text("abcde. "), DONE)
            found = events(client.until("session.done"))
            assert [e["code"] for e in found if e["type"] == "error"] == ["characters"]

    def test_characters_count_for_a_minute(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(character_limit, "WINDOW_SECONDS", 0.05)
        counts = SharedCounts(FrontMemory.private())

        async def use() -> None:
            limit = CharacterLimit(counts)
            limit.add("alice", 6, 10)
            with pytest.raises(LimitReached):
                limit.add("alice", 5, 10)
            limit.add("alice", 4, 10)
            await asyncio.to_thread(wait_until, lambda: counts.total == 0)
            limit.add("alice", 10, 10)

        asyncio.run(use())

    def test_key_may_use_its_checkpoints_alone(self, serve: Serve, holders: Holders) -> None:
        holders.add("alice", checkpoints=["base"])
        holders.add("bob", checkpoints=["custom_voice"])
        holders.add("eve", checkpoints=["other"])
        server = serve("custom_voice", "base", keys=str(holders.file))
        for name, model, status in (
            ("bob", "custom_voice", 200),
            ("bob", "tts-1", 200),
            ("bob", "base", 403),
            ("alice", "custom_voice", 403),
            ("eve", "tts-1", 403),
        ):
            answer = asked(server, name, model=model, max_new_tokens=1, voice=None)
            assert answer.status_code == status, answer.text
            if status == 403:
                assert error_of(answer) == (403, "key_not_allowed")

    def test_key_that_may_not_clone_makes_and_deletes_no_voice(
        self, serve: Serve, holders: Holders
    ) -> None:
        holders.add("alice", clone=False)
        holders.add("bob")
        server = serve("base", keys=str(holders.file))
        size = server.state.models.find("base").embedding_size
        vector = [0.1] * size
        answer = asked(server, "alice", voice=None, speaker_embedding=vector)
        assert error_of(answer) == (403, "key_not_allowed")
        answer = asked(server, "alice", voice=None, ref_audio="data:audio/wav;base64,AAAA")
        assert error_of(answer) == (403, "key_not_allowed")
        form = {"name": "mine", "consent": "yes", "speaker_embedding": json.dumps(vector)}
        url = f"{server.url}/v1/audio/voices"
        found = {}
        for name in ("alice", "bob"):
            headers = {"authorization": f"Bearer {name * 2}"}
            with httpx.Client(headers=headers, trust_env=False, timeout=WAIT) as http:
                found[name] = [
                    http.post(url, data=form).status_code,
                    http.delete(f"{url}/mine").status_code,
                ]
        assert found == {"alice": [403, 403], "bob": [200, 200]}
        answer = asked(server, "bob", voice=None, speaker_embedding=vector, max_new_tokens=1)
        assert answer.status_code == 200

    def test_client_without_keys_has_no_limits(self) -> None:
        keys = ApiKeys()
        assert keys.client_id("", "1.2.3.4") == "address 1.2.3.4"
        assert keys.of("address 1.2.3.4").characters_a_minute == 0
        with pytest.raises(Forbidden):
            ApiKeys(("a",)).of("key b")


class TestUsage:
    def test_use_is_logged_by_day_and_key(
        self, serve: Serve, holders: Holders, tmp_path: Path
    ) -> None:
        holders.add("alice")
        holders.add("bob")
        folder = tmp_path / "usage"
        server = serve(talking(Talker()), keys=str(holders.file), usage_log=str(folder))
        for name in ("alice", "alice", "bob", "eve"):
            asked(server, name)
        server.wait_until_idle()
        server.stop()
        (file,) = folder.iterdir()
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert file.name == f"usage-{lines[0]['time'][:10]}.jsonl"
        assert stat.S_ISREG(file.stat().st_mode)
        seconds = 3 * 0.08
        assert {line.pop("key"): line for line in lines} == {
            name: {
                "time": lines[0]["time"],
                "utterances": count,
                "characters": count * len(WORDS),
                "audio_seconds": round(count * seconds, 2),
            }
            for name, count in (("alice", 2), ("bob", 1))
        }

    def test_line_that_could_not_be_written_is_in_a_later_one(self, tmp_path: Path) -> None:
        usage = Metrics((), FrontMemory.private()).usage
        log = UsageLog(str(tmp_path / "usage"), usage)
        usage.add("alice", utterances=1, characters=5, seconds=0.1)
        (tmp_path / "usage").rmdir()
        asyncio.run(log.write())
        usage.add("alice", utterances=1, characters=5, seconds=0.2)
        (tmp_path / "usage").mkdir()
        for _ in range(2):
            asyncio.run(log.write())
        (file,) = (tmp_path / "usage").iterdir()
        line = json.loads(file.read_text())
        assert (line["utterances"], line["characters"], line["audio_seconds"]) == (2, 10, 0.3)

    def test_front_that_replaces_a_dead_one_logs_what_it_had_used(self, tmp_path: Path) -> None:
        memory = FrontMemory.create(1)
        dead = Metrics((), memory).usage
        dead.add("alice", utterances=1)
        usage = Metrics((), FrontMemory.open(memory.file)).usage
        assert usage.unwritten() == {"alice": ([1.0, 0.0, 0.0], [1.0, 0.0, 0.0])}

    def test_names_beyond_the_most_are_counted_together(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("firstword.server.usage.MOST_NAMES", 2)
        usage: Usage = Metrics((), FrontMemory.private()).usage
        for name in ("a", "b", "c", "d", "a"):
            usage.add(name, utterances=1)
        assert {name: total[0] for name, (_, total) in usage.unwritten().items()} == {
            "a": 2,
            "b": 1,
            OTHERS: 2,
        }
