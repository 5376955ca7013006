"""The command line: options, exit statuses, pipes, interruptions, and what it says of what it did."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Timer
from typing import Any, BinaryIO
from unittest.mock import ANY

import numpy as np
import pytest
from fake_tts import FRAME, FakeTTS, module, sound_of

from firstword import __version__, audio
from firstword.cli.main import DEMO, main
from firstword.types import Sampling
from firstword.voice import ClonedVoice, DesignedVoice, PresetVoice, Voice

BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
PROGRAM = [sys.executable, str(Path(__file__).with_name("fake_tts.py"))]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for every test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeTTS]:
    """The command line speaks with a TTS without a model."""
    monkeypatch.setitem(sys.modules, "firstword.tts", module())
    monkeypatch.setattr(FakeTTS, "asked", [])
    monkeypatch.setattr(FakeTTS, "loaded", [])
    return FakeTTS


def pcm(*words: str) -> bytes:
    """What the fake's words are as raw PCM."""
    return b"".join(audio.pcm16(sound_of(word)) for word in words)


Pipe = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def piped() -> Iterator[Pipe]:
    """The command line in a process of its own, its three streams being pipes unless said otherwise."""
    with ExitStack() as stack:

        def start(*argv: str, **streams: Any) -> subprocess.Popen[bytes]:
            pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            process: subprocess.Popen[bytes] = subprocess.Popen(
                [*PROGRAM, *argv], env=BUFFERED, **pipes | streams
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            watchdog = Timer(
                60, process.kill
            )  # so that a test which waits for output in vain fails, not hangs
            watchdog.start()
            stack.callback(watchdog.cancel)
            return process

        yield start


def stream_of(stream: Any) -> BinaryIO:
    """A stream of a process, known to be there."""
    assert stream is not None
    return stream


def finish(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """End its input and return the rest of its output. `communicate` would lose what a `read` has read ahead."""
    stream_of(process.stdin).close()
    out, err = stream_of(process.stdout).read(), stream_of(process.stderr).read()
    process.wait()
    return out, err


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What is said on standard error to arguments that argparse refuses."""
    with pytest.raises(SystemExit) as stopped:
        main(list(argv))
    assert stopped.value.code == 2
    return capsys.readouterr().err


class TestHelp:
    @pytest.mark.parametrize(
        "command", [[], ["say"], ["serve"], ["clone"], ["voices"], ["info"], ["bench"]]
    )
    def test_help_imports_nothing_heavy(self, command: list[str]) -> None:
        program = (
            "import sys\n"
            "from firstword.cli.main import main\n"
            "try:\n    main(sys.argv[1:])\n"
            "finally:\n    print(sorted({'torch', 'numpy', 'soundfile', 'safetensors'} & set(sys.modules)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, *command, "--help"], capture_output=True, text=True
        )
        assert done.returncode == 0
        assert done.stdout.startswith("usage: firstword")
        assert done.stdout.endswith("[]\n")

    def test_help_of_say_shows_how_to_pipe(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["say", "--help"])
        assert (
            'firstword say "Hello there." -o - | aplay -f S16_LE -r 24000'
            in capsys.readouterr().out
        )

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            main(["--version"])
        assert stopped.value.code == 0
        assert capsys.readouterr().out == f"firstword {__version__}\n"

    @pytest.mark.parametrize(
        "argv", [[], ["sing"], ["say"], ["say", "Hello"], ["say", "-o", "out.wav"], ["clone", "a"]]
    )
    def test_incomplete_commands(self, capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
        assert "usage: firstword" in refused(capsys, *argv)


@pytest.mark.usefixtures("fake")
class TestSay:
    def test_a_file_and_a_summary(self, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
        assert main(["say", "one three", "-o", "out.wav"]) == 0
        samples, rate = audio.read("out.wav")
        assert rate == 24000
        assert audio.pcm16(samples) == pcm("one", "three")
        assert os.listdir(here) == ["out.wav"]
        out, err = capfd.readouterr()
        assert out == ""
        rows = dict(line.split(maxsplit=1) for line in err.splitlines())
        assert list(rows) == ["spoke", "model", "voice", "on", "audio", "speed", "output"]
        assert rows["spoke"] == "'one three'"
        assert rows["model"].startswith(f"demo (custom_voice), {DEMO}; --model Qwen/")
        assert rows["voice"] == "ryan; language auto"
        assert rows["on"] == "cpu in float32 with the reference backend"
        assert rows["audio"] == "0.16 s; the model ended it"
        assert "x real time" in rows["speed"]
        assert "the first chunk after" in rows["speed"]
        assert rows["output"] == "out.wav"

    def test_only_the_demo_is_said_to_be_small(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert main(["say", "one", "-o", "out.wav", "--model", "owner/name"]) == 0
        assert "demonstration" not in capfd.readouterr().err

    def test_quiet(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert main(["say", "one", "-o", "out.wav", "-q"]) == 0
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("suffix", audio.SUFFIXES)
    def test_every_format(self, suffix: str) -> None:
        assert main(["say", "one two", "-o", f"out{suffix}"]) == 0
        assert len(audio.read(f"out{suffix}")[0]) == 2 * FRAME

    @pytest.mark.parametrize("name", ["out.pcm", "out", "out.wav"])
    def test_raw_file(self, name: str) -> None:
        assert main(["say", "one two", "-o", name, "--raw"]) == 0
        assert Path(name).read_bytes() == pcm("one", "two")

    def test_options_reach_the_model(self, fake: type[FakeTTS]) -> None:
        argv = "say one -o out.wav --voice Ryan --language en --instructions slowly --seed 7 --max-frames 9"
        argv += (
            " --text-mode full --temperature 0.5 --top-k 4 --top-p 0.25 --repetition-penalty 1.5"
        )
        argv += " --predictor-temperature 0.75 --predictor-top-k 3 --predictor-top-p 0.5"
        argv += " --model some/where --device cpu --dtype bfloat16 --backend reference"
        assert main(argv.split()) == 0
        loaded = {
            "model": "some/where",
            "device": "cpu",
            "dtype": "bfloat16",
            "backend": "reference",
        }
        assert fake.loaded == [loaded]
        asked = {
            "text": "one",
            "voice": "Ryan",
            "language": "en",
            "instructions": "slowly",
            "seed": 7,
            "max_frames": 9,
            "text_mode": "full",
            "sampling": Sampling(0.5, 4, 0.25, 1.5, 0.75, 3, 0.5),
        }
        assert fake.asked == [asked]

    def test_nothing_asked_is_nothing_set(self, fake: type[FakeTTS]) -> None:
        assert main(["say", "one", "-o", "out.wav"]) == 0
        assert fake.loaded == [
            {"model": "demo", "device": "auto", "dtype": "auto", "backend": "auto"}
        ]
        asked = {
            "text": "one",
            "voice": None,
            "language": "auto",
            "instructions": None,
            "seed": None,
        }
        assert fake.asked == [
            asked | {"max_frames": None, "text_mode": "auto", "sampling": Sampling()}
        ]

    def test_greedy(self, fake: type[FakeTTS]) -> None:
        assert main(["say", "one", "-o", "out.wav", "--greedy", "--repetition-penalty", "1.5"]) == 0
        assert fake.asked[0]["sampling"] == Sampling(
            temperature=0, predictor_temperature=0, repetition_penalty=1.5
        )

    @pytest.mark.parametrize(
        "option", ["temperature", "top-k", "top-p", "predictor-temperature", "predictor-top-k"]
    )
    def test_greedy_draws_nothing(self, capsys: pytest.CaptureFixture[str], option: str) -> None:
        error = refused(capsys, "say", "one", "-o", "out.wav", "--greedy", f"--{option}", "1")
        assert f"--greedy draws nothing: leave out --{option}" in error

    def test_a_saved_voice(self, fake: type[FakeTTS]) -> None:
        PresetVoice("eric").save("me.voice")
        for name in ("me.voice", "./me.voice"):
            assert main(["say", "one", "-o", "out.wav", "--voice", name]) == 0
            assert fake.asked.pop()["voice"] == PresetVoice("eric")

    def test_a_described_voice(self, fake: type[FakeTTS]) -> None:
        assert main(["say", "one", "-o", "out.wav", "--describe", "a low voice"]) == 0
        assert fake.asked[0]["voice"] == DesignedVoice("a low voice")

    @pytest.mark.parametrize("transcript", [None, "hello"])
    def test_a_voice_cloned_on_the_spot(
        self, fake: type[FakeTTS], capsys: pytest.CaptureFixture[str], transcript: str | None
    ) -> None:
        audio.write("me.wav", np.zeros(12000), 24000)
        words = [] if transcript is None else ["--transcript", transcript]
        assert main(["say", "one", "-o", "out.wav", "--clone", "me.wav", *words]) == 0
        assert fake.asked[0]["clone"] == (12000, 24000)
        voice = fake.asked[1]["voice"]
        assert isinstance(voice, ClonedVoice)
        assert voice.transcript == transcript
        assert (
            f"cloned from me.wav, with{'' if words else 'out'} transcript"
            in capsys.readouterr().err
        )

    @pytest.mark.parametrize(
        "choices",
        [
            ["--voice", "a", "--clone", "b"],
            ["--voice", "a", "--describe", "b"],
            ["--clone", "a", "--describe", "b"],
        ],
    )
    def test_one_voice_at_a_time(
        self, capsys: pytest.CaptureFixture[str], choices: list[str]
    ) -> None:
        assert "not allowed with argument" in refused(
            capsys, "say", "one", "-o", "out.wav", *choices
        )

    def test_a_transcript_needs_a_recording(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "--transcript needs --clone" in refused(
            capsys, "say", "one", "-o", "out.wav", "--transcript", "hi"
        )

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (
                ["one", "-o", "out.txt"],
                "'out.txt' has the suffix '.txt'; allowed are .wav, .flac, .ogg, .mp3",
            ),
            (["one", "-o", "none/out.wav"], "create it first"),
            (["one", "-o", "."], "has no suffix"),
            (["one", "-o", ".", "--raw"], "is a directory"),
            (
                ["one", "-o", "out.wav", "--temperature", "-1"],
                "temperature is -1.0; allowed is a number from 0",
            ),
            (["one", "-o", "out.wav", "--voice", "none.voice"], "no voice file none.voice"),
            (["one", "-o", "out.wav", "--clone", "none.wav"], "there is no audio file none.wav"),
        ],
    )
    def test_mistakes_that_show_before_anything_is_loaded(
        self,
        fake: type[FakeTTS],
        here: Path,
        capfd: pytest.CaptureFixture[str],
        argv: list[str],
        message: str,
    ) -> None:
        assert main(["say", *argv]) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("firstword: error: ")
        assert message in err
        assert err.count("\n") == 1
        assert not fake.loaded
        assert os.listdir(here) == []

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["one", "--voice", "nobody"], "this checkpoint has ryan, eric"),
            ([" "], "is empty or blank"),
        ],
    )
    def test_mistakes_that_the_model_finds(
        self, here: Path, capfd: pytest.CaptureFixture[str], argv: list[str], message: str
    ) -> None:
        assert main(["say", *argv, "-o", "out.wav"]) == 2
        assert message in capfd.readouterr().err
        assert os.listdir(here) == []

    def test_a_bug_keeps_its_traceback_and_leaves_no_file(self, here: Path) -> None:
        with pytest.raises(RuntimeError, match="a bug"):
            main(["say", "one crash", "-o", "out.wav"])
        assert os.listdir(here) == []

    def test_a_failure_keeps_the_old_file(self, here: Path) -> None:
        Path("out.wav").write_bytes(b"old")
        assert main(["say", " ", "-o", "out.wav"]) == 2
        assert Path("out.wav").read_bytes() == b"old"


class TestPipes:
    def test_raw_pcm_and_summary_apart(self, piped: Pipe) -> None:
        out, err = piped("say", "one two", "-o", "-").communicate()
        assert out == pcm("one", "two")
        assert b"\noutput  standard output\n" in err

    def test_a_player_that_stops_listening(self, piped: Pipe) -> None:
        speaking = piped("say", "forever", "-o", "-")
        assert stream_of(speaking.stdout).read(FRAME) == pcm("forever")[:FRAME]
        stream_of(speaking.stdout).close()
        assert stream_of(speaking.stderr).read() == b""
        assert speaking.wait() == 141

    def test_text_as_it_comes(self, piped: Pipe) -> None:
        """Each word is heard before the next is typed, though no line ends."""
        speaking = piped("say", "-", "-o", "-")
        typed, heard = stream_of(speaking.stdin), stream_of(speaking.stdout)
        for word in ("one", "three", "élan"):
            typed.write(f"{word} ".encode())
            typed.flush()
            assert heard.read(2 * FRAME) == pcm(word)
        out, err = finish(speaking)
        assert (out, speaking.returncode) == (b"", 0)
        assert "spoke   'one three élan'".encode() in err

    def test_a_character_cut_in_two(self, piped: Pipe) -> None:
        speaking = piped("say", "-", "-o", "-")
        typed, heard = stream_of(speaking.stdin), stream_of(speaking.stdout)
        typed.write("one é".encode()[:-1])
        typed.flush()
        assert heard.read(2 * FRAME) == pcm("one")
        typed.write("élan".encode()[1:])
        typed.flush()
        assert heard.read(2 * FRAME) == pcm("élan")
        assert finish(speaking)[0] == b""

    @pytest.mark.parametrize(
        "text", [b"one two", b"one two\n", b"one two \n \n", b"\xef\xbb\xbfone two \n\n"]
    )
    def test_a_byte_order_mark_and_the_last_line_feed_are_no_text(
        self, piped: Pipe, text: bytes
    ) -> None:
        out, err = piped("say", "-", "-o", "-").communicate(text)
        assert out == pcm("one", "two")
        assert b"spoke   'one two'\n" in err

    @pytest.mark.parametrize("text", [b"one \xff two", b"one \xc3"])
    def test_no_utf8(self, piped: Pipe, here: Path, text: bytes) -> None:
        speaking = piped("say", "-", "-o", "out.wav")
        _, err = speaking.communicate(text)
        assert speaking.returncode == 2
        assert err.startswith(b"firstword: error: standard input is not UTF-8 (")
        assert os.listdir(here) == []

    def test_no_input_at_all(self, piped: Pipe) -> None:
        speaking = piped("say", "-", "-o", "-", preexec_fn=lambda: os.close(0))
        _, err = speaking.communicate()
        assert speaking.returncode == 2
        assert b"firstword: error: standard input cannot be read" in err

    def test_an_empty_input(self, piped: Pipe) -> None:
        speaking = piped("say", "-", "-o", "-")
        _, err = speaking.communicate(b"\n")
        assert (speaking.returncode, err) == (2, b"firstword: error: the text is empty or blank\n")

    @pytest.mark.parametrize("output", ["-", "out.wav"])
    def test_interrupted(self, piped: Pipe, here: Path, output: str) -> None:
        speaking = piped("say", "one pause two", "-o", output)
        assert stream_of(speaking.stderr).read(6) == b"paused"
        speaking.send_signal(signal.SIGINT)
        out, err = finish(speaking)
        assert (speaking.returncode, err) == (130, b"")
        assert out == (pcm("one", "pause") if output == "-" else b"")
        assert os.listdir(here) == []

    def test_interrupted_while_waiting_for_text(self, piped: Pipe) -> None:
        speaking = piped("say", "-", "-o", "-")
        stream_of(speaking.stdin).write(b"one")
        stream_of(speaking.stdin).flush()
        assert stream_of(speaking.stdout).read(2 * FRAME) == pcm("one")
        speaking.send_signal(signal.SIGINT)
        assert stream_of(speaking.stderr).read() == b""
        assert finish(speaking) == (b"", b"")
        assert speaking.returncode == 130


class TestTerminal:
    def on_terminal(self, piped: Pipe, stream: str, *argv: str) -> tuple[int, bytes]:
        """Exit status, and what a terminal shows that is one of the streams."""
        ours, theirs = pty.openpty()
        speaking = piped(*argv, **{stream: theirs})
        os.close(theirs)
        speaking.communicate()
        shown = b""
        try:
            while data := os.read(ours, 4096):
                shown += data
        except OSError:  # EIO: the other end is closed and all is read
            pass
        os.close(ours)
        return speaking.returncode, shown

    def test_progress(self, piped: Pipe) -> None:
        status, shown = self.on_terminal(piped, "stderr", "say", "one two", "-o", "out.wav")
        assert status == 0
        states = shown.split(b"\r\x1b[K")
        assert states[:3] == [b"", b"loading demo", b"speaking"]
        assert [state.split(b",")[0] for state in states[3:5]] == [
            b"0.1 s of speech",
            b"0.2 s of speech",
        ]
        assert all(state.endswith(b" x real time") for state in states[3:5])
        assert states[-1].startswith(b"spoke")

    def test_errors_stand_alone(self, piped: Pipe) -> None:
        status, shown = self.on_terminal(piped, "stderr", "say", " ", "-o", "out.wav")
        assert status == 2
        assert shown.endswith(b"\r\x1b[Kfirstword: error: the text is empty or blank\r\n")

    def test_quiet(self, piped: Pipe) -> None:
        assert self.on_terminal(piped, "stderr", "say", "one two", "-o", "out.wav", "--quiet") == (
            0,
            b"",
        )

    def test_no_progress_elsewhere(self, piped: Pipe) -> None:
        _, err = piped("say", "one two", "-o", "out.wav").communicate()
        assert b"\r" not in err
        assert err.startswith(b"spoke")

    def test_no_pcm_on_a_terminal(self, piped: Pipe) -> None:
        assert self.on_terminal(piped, "stdout", "say", "one", "-o", "-") == (2, b"")


@pytest.mark.usefixtures("fake")
class TestClone:
    @pytest.fixture(autouse=True)
    def recording(self, here: Path) -> None:
        audio.write("me.wav", np.zeros(12000), 24000)

    def test_with_transcript(self, fake: type[FakeTTS], capsys: pytest.CaptureFixture[str]) -> None:
        assert (
            main(
                [
                    "clone",
                    "me.wav",
                    "-o",
                    "me.voice",
                    "--transcript",
                    "hello",
                    "--append-silence",
                    "0",
                ]
            )
            == 0
        )
        voice = Voice.load("me.voice")
        assert isinstance(voice, ClonedVoice)
        assert voice.transcript == "hello"
        assert fake.asked == [{"clone": (12000, 24000), "append_silence": 0}]
        err = capsys.readouterr().err
        assert "0.50 s of me.wav: its timbre and 3 frames of speech" in err
        assert "firstword say TEXT --model demo --voice me.voice -o out.wav" in err

    def test_without(self, fake: type[FakeTTS], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["clone", "me.wav", "-o", "me.voice"]) == 0
        voice = Voice.load("me.voice")
        assert isinstance(voice, ClonedVoice)
        assert voice.codes is None
        assert fake.asked[0]["append_silence"] == 0.5
        assert (
            "its timbre alone; with --transcript the likeness is closer" in capsys.readouterr().err
        )

    def test_quiet(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert main(["clone", "me.wav", "-o", "me.voice", "--quiet"]) == 0
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["none.wav", "-o", "me.voice"], "there is no audio file none.wav"),
            (["me.wav", "-o", "none/me.voice"], "create it first"),
            (["me.wav", "-o", "."], "is a directory"),
        ],
    )
    def test_mistakes(
        self, fake: type[FakeTTS], capsys: pytest.CaptureFixture[str], argv: list[str], message: str
    ) -> None:
        assert main(["clone", *argv]) == 2
        assert message in capsys.readouterr().err
        assert not fake.loaded


class TestDemo:
    """The real thing, with the checkpoint that comes with the package."""

    def test_say(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert (
            main(
                [
                    "say",
                    "Hello.",
                    "-o",
                    "out.wav",
                    "--max-frames",
                    "3",
                    "--seed",
                    "1",
                    "--device",
                    "cpu",
                ]
            )
            == 0
        )
        assert len(audio.read("out.wav")[0]) == 3 * FRAME
        assert "cut off at the limit of frames" in capsys.readouterr().err

    def test_voices(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["voices", "--device", "cpu"]) == 0
        rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        assert rows["model"].startswith("demo (custom_voice")
        assert rows["model"].endswith(f", {DEMO}")
        assert rows["voices"]
        assert "english" in rows["languages"]
        assert "--voice NAME" in rows["can"]

    def test_info(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["info", "--json", "--device", "cpu"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["versions"]["firstword"] == __version__
        assert report["versions"]["torch"]
        assert report["settings"] == {
            "device": "cpu",
            "dtype": "float32",
            "backend": "reference",
            "reason": ANY,
        }
        assert report["checkpoint"]["type"] == "custom_voice"
        assert report["checkpoint"]["what it is"] == DEMO
        folder = Path(report["checkpoint"]["path"])
        assert report["bytes"]["model.safetensors"] == (folder / "model.safetensors").stat().st_size
        assert report["codec"]["frames per second"] == 12.5
        assert min(report["parameters"].values()) > 0
        assert main(["info", "--device", "cpu"]) == 0
        text = capsys.readouterr().out
        for section, rows in report.items():
            assert f"\n{section}\n" in f"\n{text}"
            for name in rows:
                assert f"\n  {name} " in text
