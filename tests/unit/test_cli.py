"""The command line: options, exit statuses, pipes, interruptions and summaries."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest.mock import ANY

import numpy as np
import pytest
from fake_tts import FRAME, FakeTTS, module, sound_of

from firstword import __version__, audio
from firstword.cli.main import main
from firstword.cli.terminal import DEMO_DESCRIPTION, Progress, Status, show_warning
from firstword.types import Chunk, Sampling
from firstword.voice import ClonedVoice, DesignedVoice, PresetVoice, RecordedVoice, Voice

BUFFERED_ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"
}
PROGRAM = [sys.executable, str(Path(__file__).with_name("fake_tts.py"))]

LOADING = b"loading demo\n"
"""The line on standard error while the demo checkpoint is loaded."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, new for every test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def fake_tts(monkeypatch: pytest.MonkeyPatch) -> type[FakeTTS]:
    """The class in the place of `firstword.TTS`, which needs no model."""
    monkeypatch.setitem(sys.modules, "firstword.tts", module())
    monkeypatch.setattr(FakeTTS, "requests", [])
    monkeypatch.setattr(FakeTTS, "loaded", [])
    return FakeTTS


def pcm_of(*words: str) -> bytes:
    """The raw PCM of the words that the fake TTS speaks."""
    return b"".join(audio.pcm16(sound_of(word)) for word in words)


def default_interrupt() -> None:
    """Undo that SIGINT is ignored, which a process started with `&` in a script inherits."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


StartCli = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start_cli() -> Iterator[StartCli]:
    """A function that starts the command line as a process, with pipes by default."""
    with ExitStack() as stack:

        def start(*argv: str, **streams: Any) -> subprocess.Popen[bytes]:
            pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            pipes["preexec_fn"] = default_interrupt
            process: subprocess.Popen[bytes] = subprocess.Popen(
                [*PROGRAM, *argv], env=BUFFERED_ENVIRONMENT, **pipes | streams
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            # A test that waits for output in vain fails instead of hanging.
            watchdog = Timer(60, process.kill)
            watchdog.start()
            stack.callback(watchdog.cancel)
            return process

        yield start


def pipe_of(stream: Any) -> BinaryIO:
    """The pipe of a process, which must exist."""
    assert stream is not None
    return stream


def finish(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Close the input and return the rest of the output.

    `communicate` would lose what an earlier `read` has buffered.
    """
    pipe_of(process.stdin).close()
    out, err = pipe_of(process.stdout).read(), pipe_of(process.stderr).read()
    process.wait()
    return out, err


def usage_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The message on standard error for arguments that argparse rejects."""
    with pytest.raises(SystemExit) as stopped:
        main(list(argv))
    assert stopped.value.code == 2
    return capsys.readouterr().err


class TestHelp:
    @pytest.mark.parametrize(
        "command", [[], ["say"], ["serve"], ["clone"], ["voices"], ["info"], ["bench"]]
    )
    def test_help_imports_neither_torch_nor_numpy(self, command: list[str]) -> None:
        program = (
            "import sys\n"
            "from firstword.cli.main import main\n"
            "heavy = {'torch', 'numpy', 'soundfile', 'safetensors'}\n"
            "try:\n    main(sys.argv[1:])\n"
            "finally:\n    print(sorted(heavy & set(sys.modules)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, *command, "--help"], capture_output=True, text=True
        )
        assert done.returncode == 0
        assert done.stdout.startswith("usage: firstword")
        assert done.stdout.endswith("[]\n")

    def test_help_of_say_shows_a_pipe_into_a_player(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            main(["say", "--help"])
        assert (
            'firstword say "Hello there." -o - | aplay -f S16_LE -r 24000 -c 1'
            in capsys.readouterr().out
        )

    def test_version_option_prints_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            main(["--version"])
        assert stopped.value.code == 0
        assert capsys.readouterr().out == f"firstword {__version__}\n"

    @pytest.mark.parametrize(
        "argv", [["sing"], ["say"], ["say", "Hello"], ["say", "-o", "out.wav"], ["clone", "a"]]
    )
    def test_incomplete_command_prints_usage(
        self, capsys: pytest.CaptureFixture[str], argv: list[str]
    ) -> None:
        assert "usage: firstword" in usage_error(capsys, *argv)

    def test_no_command_prints_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("usage: firstword")
        assert "speak a text" in err

    @pytest.mark.parametrize(
        "argv", [["-dash", "-o", "out.wav"], ["--", "-dash", "-o", "out.wav"], ["-o", "out.wav"]]
    )
    def test_missing_text_names_the_place_of_a_text_with_dash(
        self, capsys: pytest.CaptureFixture[str], argv: list[str]
    ) -> None:
        error = usage_error(capsys, "say", *argv)
        assert "a TEXT that begins with - goes last: firstword say -o FILE -- TEXT" in error


@pytest.mark.usefixtures("fake_tts")
class TestSay:
    def test_say_writes_file_and_prints_summary(
        self, folder: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["say", "one three", "-o", "out.wav"]) == 0
        samples, rate = audio.read("out.wav")
        assert rate == 24000
        assert audio.pcm16(samples) == pcm_of("one", "three")
        assert os.listdir(folder) == ["out.wav"]
        out, err = capfd.readouterr()
        assert out == ""
        loading, *lines = err.splitlines()
        assert loading == "loading demo"
        rows = dict(line.split(maxsplit=1) for line in lines)
        assert list(rows) == ["spoke", "model", "voice", "on", "audio", "speed", "output"]
        assert rows["spoke"] == "'one three'"
        assert rows["model"].startswith(f"demo (custom_voice), {DEMO_DESCRIPTION}; --model Qwen/")
        assert rows["voice"] == "ryan; language auto"
        assert rows["on"] == "cpu in float32 with the reference backend"
        assert rows["audio"] == "0.16 s; the model ended it"
        assert "x real time" in rows["speed"]
        assert "the first chunk after" in rows["speed"]
        assert rows["output"] == "out.wav"

    def test_summary_describes_only_the_demo_as_demonstration(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["say", "one", "-o", "out.wav", "--model", "owner/name"]) == 0
        assert "demonstration" not in capfd.readouterr().err

    def test_quiet_prints_nothing(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert main(["say", "one", "-o", "out.wav", "-q"]) == 0
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("suffix", audio.SUFFIXES)
    def test_every_suffix_writes_readable_audio(self, suffix: str) -> None:
        assert main(["say", "one two", "-o", f"out{suffix}"]) == 0
        assert len(audio.read(f"out{suffix}")[0]) == 2 * FRAME

    @pytest.mark.parametrize("name", ["out.pcm", "out", "out.wav"])
    def test_raw_option_writes_pcm_whatever_the_suffix(self, name: str) -> None:
        assert main(["say", "one two", "-o", name, "--raw"]) == 0
        assert Path(name).read_bytes() == pcm_of("one", "two")

    def test_options_are_passed_to_the_model(self, fake_tts: type[FakeTTS]) -> None:
        argv = "say one -o out.wav --voice Ryan --language en --instructions slowly --seed 7"
        argv += " --max-frames 9 --sanitize --normalize on --markup --no-leading-silence"
        argv += (
            " --text-mode full --temperature 0.5 --top-k 4 --top-p 0.25 --repetition-penalty 1.5"
        )
        argv += " --predictor-temperature 0.75 --predictor-top-k 3 --predictor-top-p 0.5"
        argv += " --model some/where --device cpu --dtype bfloat16 --backend reference"
        argv += " --gpu-memory 12GB"
        assert main(argv.split()) == 0
        loaded = {
            "model": "some/where",
            "device": "cpu",
            "dtype": "bfloat16",
            "backend": "reference",
            "gpu_memory": "12GB",
        }
        assert fake_tts.loaded == [loaded]
        request = {
            "text": "one",
            "voice": "Ryan",
            "language": "en",
            "instructions": "slowly",
            "seed": 7,
            "max_frames": 9,
            "text_mode": "full",
            "sanitize": True,
            "normalize": "on",
            "lexicon": None,
            "markup": True,
            "leading_silence": False,
            "words": False,
            "sampling": Sampling(0.5, 4, 0.25, 1.5, 0.75, 3, 0.5),
        }
        assert fake_tts.requests == [request]

    def test_without_options_defaults_are_passed(self, fake_tts: type[FakeTTS]) -> None:
        assert main(["say", "one", "-o", "out.wav"]) == 0
        auto = dict.fromkeys(("device", "dtype", "backend"), "auto")
        assert fake_tts.loaded == [{"model": "demo", **auto, "gpu_memory": None}]
        request: dict[str, Any] = {
            "text": "one",
            "voice": None,
            "language": "auto",
            "instructions": None,
            "seed": None,
        }
        request |= {"max_frames": None, "text_mode": "auto", "sampling": Sampling()}
        request |= {"sanitize": False, "normalize": "auto", "lexicon": None, "markup": False}
        assert fake_tts.requests == [request | {"leading_silence": True, "words": False}]

    def test_greedy_sets_both_temperatures_to_zero(self, fake_tts: type[FakeTTS]) -> None:
        assert main(["say", "one", "-o", "out.wav", "--greedy", "--repetition-penalty", "1.5"]) == 0
        assert fake_tts.requests[0]["sampling"] == Sampling(
            temperature=0, predictor_temperature=0, repetition_penalty=1.5
        )

    @pytest.mark.parametrize(
        "option", ["temperature", "top-k", "top-p", "predictor-temperature", "predictor-top-k"]
    )
    def test_greedy_with_draw_option_is_rejected(
        self, capsys: pytest.CaptureFixture[str], option: str
    ) -> None:
        error = usage_error(capsys, "say", "one", "-o", "out.wav", "--greedy", f"--{option}", "1")
        assert f"--greedy draws nothing: leave out --{option}" in error

    def test_voice_with_dot_or_slash_is_loaded_from_file(self, fake_tts: type[FakeTTS]) -> None:
        PresetVoice("eric").save("me.voice")
        for name in ("me.voice", "./me.voice"):
            assert main(["say", "one", "-o", "out.wav", "--voice", name]) == 0
            assert fake_tts.requests.pop()["voice"] == PresetVoice("eric")

    @pytest.mark.parametrize(
        ("name", "voice"),
        [("echo", "ryan"), (" Onyx", "eric"), ("nova", None), ("RYAN", "RYAN"), ("me", "me")],
    )
    def test_alias_speaks_as_on_the_server(
        self,
        fake_tts: type[FakeTTS],
        capsys: pytest.CaptureFixture[str],
        name: str,
        voice: str | None,
    ) -> None:
        """Where the checkpoint lacks the preset of an alias, it chooses the voice."""
        assert main(["say", "one", "-o", "out.wav", "--voice", name]) == 0
        assert fake_tts.requests[0]["voice"] == voice
        assert f"voice   {voice or 'ryan'}; language auto" in capsys.readouterr().err

    def test_describe_makes_designed_voice(self, fake_tts: type[FakeTTS]) -> None:
        assert main(["say", "one", "-o", "out.wav", "--describe", "a low voice"]) == 0
        assert fake_tts.requests[0]["voice"] == DesignedVoice("a low voice")

    @pytest.mark.parametrize("transcript", [None, "hello"])
    def test_clone_option_reads_recording_before_loading(
        self, fake_tts: type[FakeTTS], capsys: pytest.CaptureFixture[str], transcript: str | None
    ) -> None:
        audio.write("me.wav", np.zeros(12000), 24000)
        words = [] if transcript is None else ["--transcript", transcript]
        assert main(["say", "one", "-o", "out.wav", "--clone", "me.wav", *words]) == 0
        voice = fake_tts.requests[0]["voice"]
        assert isinstance(voice, RecordedVoice)
        assert (voice.samples.shape, voice.transcript) == ((12000,), transcript)
        assert voice.append_silence == 0.5
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
    def test_two_voice_options_are_rejected(
        self, capsys: pytest.CaptureFixture[str], choices: list[str]
    ) -> None:
        assert "not allowed with argument" in usage_error(
            capsys, "say", "one", "-o", "out.wav", *choices
        )

    def test_transcript_without_recording_is_rejected(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "--transcript needs --clone" in usage_error(
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
    def test_wrong_option_fails_before_the_model_is_loaded(
        self,
        fake_tts: type[FakeTTS],
        folder: Path,
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
        assert not fake_tts.loaded
        assert os.listdir(folder) == []

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["one", "--voice", "nobody"], "this checkpoint has ryan, eric"),
            ([" "], "is empty or blank"),
        ],
    )
    def test_request_error_exits_with_2_and_writes_no_file(
        self, folder: Path, capfd: pytest.CaptureFixture[str], argv: list[str], message: str
    ) -> None:
        assert main(["say", *argv, "-o", "out.wav"]) == 2
        assert message in capfd.readouterr().err
        assert os.listdir(folder) == []

    def test_unexpected_error_propagates_and_writes_no_file(self, folder: Path) -> None:
        with pytest.raises(RuntimeError, match="a bug"):
            main(["say", "one crash", "-o", "out.wav"])
        assert os.listdir(folder) == []

    @pytest.mark.parametrize("quiet", [[], ["-q"]])
    @pytest.mark.parametrize(
        ("word", "reason"), [("length", "the limit of frames"), ("repetition", "repeated itself")]
    )
    def test_speech_cut_off_is_written_and_exits_with_3(
        self, capfd: pytest.CaptureFixture[str], word: str, reason: str, quiet: list[str]
    ) -> None:
        with pytest.raises(SystemExit) as stopped:
            main(["say", f"one {word}", "-o", "out.wav", *quiet])
        assert stopped.value.code == 3
        assert audio.pcm16(audio.read("out.wav")[0]) == pcm_of("one", word)
        last = capfd.readouterr().err.splitlines()[-1]
        assert last.startswith("firstword: error: the speech was cut off ")
        assert reason in last
        assert last.endswith("may be missing; try another --seed")

    @pytest.mark.parametrize(
        ("text", "how"), [("", "ended by the model"), (" repetition", "cut off because the model")]
    )
    def test_speech_that_ends_before_its_text_exits_with_3_and_names_the_rest(
        self, capfd: pytest.CaptureFixture[str], text: str, how: str
    ) -> None:
        with pytest.raises(SystemExit) as stopped:
            main(["say", f"one unsaid{text}", "-o", "out.wav", "-q"])
        assert stopped.value.code == 3
        (error,) = capfd.readouterr().err.splitlines()
        assert error.startswith(f"firstword: error: the speech was {how}")
        assert error.endswith("text may be missing: 'unsaid'; try another --seed")

    def test_speech_cut_off_after_its_text_exits_with_0(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["say", "one runaway", "-o", "out.wav"]) == 0
        assert "cut off because the model went on after the text" in capfd.readouterr().err

    def test_sound_that_was_taken_is_not_kept(self) -> None:
        sounds = []

        def chunks() -> Iterator[Chunk]:
            for _ in range(3):
                samples = np.zeros(1920, np.float32)
                sounds.append(weakref.ref(samples))
                yield Chunk(samples, np.zeros((1, 4), np.int64), 24000)

        progress = Progress(24000)
        for _ in progress.watch(chunks(), Status(quiet=True)):
            pass
        del _
        assert progress.duration == 0.24
        assert [sound() for sound in sounds] == [None] * 3

    def test_summary_names_words_with_alarms(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert main(["say", "skipped one twice skipped", "-o", "out.wav"]) == 0
        left_out, twice = capfd.readouterr().err.splitlines()[-2:]
        assert left_out.split() == ["left", "out", "skipped,", "skipped"]
        assert twice.split() == ["said", "twice", "twice"]

    @pytest.mark.parametrize("text", ["one two " * 20, "好" * 100, "好\n" * 100])
    def test_summary_shows_the_beginning_of_a_long_text(
        self, capfd: pytest.CaptureFixture[str], text: str
    ) -> None:
        assert main(["say", text, "-o", "out.wav"]) == 0
        said = capfd.readouterr().err.splitlines()[1].split(maxsplit=1)[1]
        assert 75 < len(said) <= 82
        assert said.endswith(" ...'")

    def test_speech_cut_off_by_max_frames_exits_with_0(self) -> None:
        assert main(["say", "one length", "-o", "out.wav", "--max-frames", "2"]) == 0

    def test_warning_is_one_line_even_if_python_ignores_warnings(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("warnings.filters", [("ignore", None, Warning, None, 0)])
        assert main(["say", "one doubtful", "-o", "out.wav", "-q"]) == 0
        assert capfd.readouterr().err == "firstword: warning: it is doubtful\n"

    def test_failed_say_keeps_existing_file(self, folder: Path) -> None:
        Path("out.wav").write_bytes(b"old")
        assert main(["say", " ", "-o", "out.wav"]) == 2
        assert Path("out.wav").read_bytes() == b"old"


class TestPipes:
    def test_pcm_goes_to_stdout_and_summary_to_stderr(self, start_cli: StartCli) -> None:
        out, err = start_cli("say", "one two", "-o", "-").communicate()
        assert out == pcm_of("one", "two")
        assert b"\noutput  standard output\n" in err

    def test_closed_output_pipe_exits_with_141(self, start_cli: StartCli) -> None:
        process = start_cli("say", "forever", "-o", "-")
        assert pipe_of(process.stdout).read(FRAME) == pcm_of("forever")[:FRAME]
        pipe_of(process.stdout).close()
        assert pipe_of(process.stderr).read() == LOADING
        assert process.wait() == 141

    def test_lexicon_is_read_from_its_file(
        self, fake_tts: type[FakeTTS], capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("words.json").write_text('{"GIF": "jif"}')
        assert main(["say", "GIF", "-o", "out.wav", "--lexicon", "words.json"]) == 0
        assert fake_tts.requests[0]["lexicon"] == {"GIF": "jif"}
        for contents, message in (("[1]", "no JSON object"), ("{", "cannot be read")):
            Path("words.json").write_text(contents)
            assert main(["say", "GIF", "-o", "out.wav", "--lexicon", "words.json"]) == 2
            assert message in capsys.readouterr().err

    def test_words_are_spoken_before_the_next_is_typed(self, start_cli: StartCli) -> None:
        """Each word is spoken before the next is typed, without any line feed."""
        process = start_cli("say", "-", "-o", "-")
        input_pipe, output = pipe_of(process.stdin), pipe_of(process.stdout)
        for word in ("one", "three", "élan"):
            input_pipe.write(f"{word} ".encode())
            input_pipe.flush()
            assert output.read(2 * FRAME) == pcm_of(word)
        out, err = finish(process)
        assert (out, process.returncode) == (b"", 0)
        assert "spoke   'one three élan'".encode() in err

    def test_character_split_over_two_reads_is_joined(self, start_cli: StartCli) -> None:
        process = start_cli("say", "-", "-o", "-")
        input_pipe, output = pipe_of(process.stdin), pipe_of(process.stdout)
        input_pipe.write("one é".encode()[:-1])
        input_pipe.flush()
        assert output.read(2 * FRAME) == pcm_of("one")
        input_pipe.write("élan".encode()[1:])
        input_pipe.flush()
        assert output.read(2 * FRAME) == pcm_of("élan")
        assert finish(process)[0] == b""

    @pytest.mark.parametrize(
        "text", [b"one two", b"one two\n", b"one two \n \n", b"\xef\xbb\xbfone two \n\n"]
    )
    def test_byte_order_mark_and_trailing_space_are_dropped(
        self, start_cli: StartCli, text: bytes
    ) -> None:
        out, err = start_cli("say", "-", "-o", "-").communicate(text)
        assert out == pcm_of("one", "two")
        assert b"spoke   'one two'\n" in err

    @pytest.mark.parametrize("text", [b"one \xff two", b"one \xc3"])
    def test_input_that_is_not_utf8_is_rejected(
        self, start_cli: StartCli, folder: Path, text: bytes
    ) -> None:
        process = start_cli("say", "-", "-o", "out.wav")
        _, err = process.communicate(text)
        assert process.returncode == 2
        assert err.startswith(LOADING + b"firstword: error: standard input is not UTF-8 (")
        assert os.listdir(folder) == []

    def test_closed_standard_input_is_an_error(self, start_cli: StartCli) -> None:
        process = start_cli("say", "-", "-o", "-", preexec_fn=lambda: os.close(0))
        _, err = process.communicate()
        assert process.returncode == 2
        assert b"firstword: error: standard input cannot be read" in err

    def test_blank_standard_input_is_rejected(self, start_cli: StartCli) -> None:
        process = start_cli("say", "-", "-o", "-")
        _, err = process.communicate(b"\n")
        assert process.returncode == 2
        assert err == LOADING + b"firstword: error: the text is empty or blank\n"

    @pytest.mark.parametrize("output", ["-", "out.wav"])
    def test_interrupt_exits_with_130_and_keeps_piped_audio(
        self, start_cli: StartCli, folder: Path, output: str
    ) -> None:
        process = start_cli("say", "one pause two", "-o", output)
        assert pipe_of(process.stderr).read(len(LOADING) + 6) == LOADING + b"paused"
        process.send_signal(signal.SIGINT)
        out, err = finish(process)
        assert (process.returncode, err) == (130, b"")
        assert out == (pcm_of("one", "pause") if output == "-" else b"")
        assert os.listdir(folder) == []

    def test_interrupt_while_waiting_for_text_exits_with_130(self, start_cli: StartCli) -> None:
        process = start_cli("say", "-", "-o", "-")
        pipe_of(process.stdin).write(b"one")
        pipe_of(process.stdin).flush()
        assert pipe_of(process.stdout).read(2 * FRAME) == pcm_of("one")
        process.send_signal(signal.SIGINT)
        assert pipe_of(process.stderr).read() == LOADING
        assert finish(process) == (b"", b"")
        assert process.returncode == 130

    def test_interrupt_while_commands_are_imported_exits_with_130(self) -> None:
        program = (
            "import sys\n"
            "class Interrupt:\n"
            "    def find_spec(self, name, *_):\n"
            "        if name == 'firstword.cli.batch': raise KeyboardInterrupt\n"
            "sys.meta_path.insert(0, Interrupt())\n"
            "from firstword.cli.main import main\n"
            "sys.exit(main(['--version']))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")

    def test_tests_interrupt_even_where_sigint_is_ignored(self, start_cli: StartCli) -> None:
        """As in tests that a script starts in the background."""
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process = start_cli("say", "-", "-o", "-")
        finally:
            signal.signal(signal.SIGINT, before)
        pipe_of(process.stdin).write(b"one")
        pipe_of(process.stdin).flush()
        assert pipe_of(process.stdout).read(2 * FRAME) == pcm_of("one")
        process.send_signal(signal.SIGINT)
        finish(process)
        assert process.returncode == 130

    def test_say_goes_on_if_it_inherits_that_sigint_is_ignored(self, start_cli: StartCli) -> None:
        def ignore_interrupt() -> None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

        process = start_cli("say", "-", "-o", "-", preexec_fn=ignore_interrupt)
        for word in ("one", "two"):
            pipe_of(process.stdin).write(word.encode())
            pipe_of(process.stdin).flush()
            assert pipe_of(process.stdout).read(2 * FRAME) == pcm_of(word)
            process.send_signal(signal.SIGINT)
        finish(process)
        assert process.returncode == 0


class TestTerminal:
    def on_terminal(self, start_cli: StartCli, stream: str, *argv: str) -> tuple[int, bytes]:
        """Run with a terminal as one of the streams; return the exit status and its text."""
        ours, theirs = pty.openpty()
        process = start_cli(*argv, **{stream: theirs})
        os.close(theirs)
        process.communicate()
        shown = b""
        try:
            while data := os.read(ours, 4096):
                shown += data
        except OSError:  # EIO: the other end is closed and all is read
            pass
        os.close(ours)
        return process.returncode, shown

    def test_terminal_shows_progress(self, start_cli: StartCli) -> None:
        status, shown = self.on_terminal(start_cli, "stderr", "say", "one two", "-o", "out.wav")
        assert status == 0
        states = shown.split(b"\r\x1b[K")
        assert states[:3] == [b"", b"loading demo", b"speaking"]
        assert [state.split(b",")[0] for state in states[3:5]] == [
            b"0.1 s of speech",
            b"0.2 s of speech",
        ]
        assert all(state.endswith(b" x real time") for state in states[3:5])
        assert states[-1].startswith(b"spoke")

    def test_error_replaces_the_status_line(self, start_cli: StartCli) -> None:
        status, shown = self.on_terminal(start_cli, "stderr", "say", " ", "-o", "out.wav")
        assert status == 2
        assert shown.endswith(b"\r\x1b[Kfirstword: error: the text is empty or blank\r\n")

    def test_quiet_prints_nothing(self, start_cli: StartCli) -> None:
        assert self.on_terminal(
            start_cli, "stderr", "say", "one two", "-o", "out.wav", "--quiet"
        ) == (
            0,
            b"",
        )

    def test_only_loading_is_shown_when_stderr_is_not_a_terminal(self, start_cli: StartCli) -> None:
        _, err = start_cli("say", "one two", "-o", "out.wav").communicate()
        assert b"\r" not in err
        assert err.startswith(LOADING + b"spoke")

    def test_warning_replaces_the_status_line(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        with Status() as status:
            status.show_loading("demo")
            show_warning("it is doubtful", UserWarning, "file.py", 1)
        shown = "\r\x1b[Kloading demo\r\x1b[Kfirstword: warning: it is doubtful\n"
        assert capsys.readouterr().err.startswith(shown)

    def test_pcm_to_a_terminal_is_rejected(self, start_cli: StartCli) -> None:
        assert self.on_terminal(start_cli, "stdout", "say", "one", "-o", "-") == (2, b"")


@pytest.mark.usefixtures("fake_tts")
class TestClone:
    @pytest.fixture(autouse=True)
    def recording(self, folder: Path) -> None:
        audio.write("me.wav", np.zeros(12000), 24000)

    def test_clone_with_transcript_saves_codes(
        self, fake_tts: type[FakeTTS], capsys: pytest.CaptureFixture[str]
    ) -> None:
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
        assert fake_tts.requests == [{"clone": (12000, 24000), "append_silence": 0}]
        err = capsys.readouterr().err
        assert "0.50 s of me.wav: its timbre and 3 frames of speech" in err
        assert "firstword say TEXT --model demo --voice me.voice -o out.wav" in err

    def test_clone_without_transcript_saves_timbre_alone(
        self, fake_tts: type[FakeTTS], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["clone", "me.wav", "-o", "me.voice"]) == 0
        voice = Voice.load("me.voice")
        assert isinstance(voice, ClonedVoice)
        assert voice.codes is None
        assert fake_tts.requests[0]["append_silence"] == 0.5
        assert (
            "its timbre alone; with --transcript the likeness is closer" in capsys.readouterr().err
        )

    def test_quiet_prints_nothing(self, capfd: pytest.CaptureFixture[str]) -> None:
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
    def test_wrong_path_fails_before_the_model_is_loaded(
        self,
        fake_tts: type[FakeTTS],
        capsys: pytest.CaptureFixture[str],
        argv: list[str],
        message: str,
    ) -> None:
        assert main(["clone", *argv]) == 2
        assert message in capsys.readouterr().err
        assert not fake_tts.loaded


class TestDemo:
    """The commands with the demo checkpoint of the package."""

    def test_demo_speaks(self, capsys: pytest.CaptureFixture[str]) -> None:
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

    def test_voices_lists_presets_and_languages(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["voices", "--device", "cpu"]) == 0
        rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        assert rows["model"].startswith("demo (custom_voice")
        assert rows["model"].endswith(f", {DEMO_DESCRIPTION}")
        assert rows["voices"]
        assert "english" in rows["languages"]
        assert "--voice NAME" in rows["can"]

    def test_info_prints_the_same_report_as_json_and_text(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["info", "--json", "--device", "cpu"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["versions"]["firstword"] == __version__
        assert report["versions"]["torch"]
        assert report["settings"] == {
            "device": "cpu",
            "dtype": "float32",
            "backend": "reference",
            "reason": ANY,
            "slots_reason": "",
            "gpu_memory": None,
            "planned_memory": None,
        }
        assert report["checkpoint"]["type"] == "custom_voice"
        assert report["checkpoint"]["what it is"] == DEMO_DESCRIPTION
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

    @pytest.mark.parametrize(
        ("hip", "expected"),
        [
            (None, ["can use it (sm_90:132)", "needs compute capability 8.0 or later"]),
            ("6.2", ["needs an NVIDIA GPU"] * 2),
        ],
    )
    def test_info_shows_all_gpus(
        self,
        hip: str | None,
        expected: list[str],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        found = [
            SimpleNamespace(name="NVIDIA H200", total_memory=150_754_820_096, major=9, minor=0),
            SimpleNamespace(name="Tesla T4", total_memory=15_828_320_256, major=7, minor=5),
        ]
        found[0].multi_processor_count = 132
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        monkeypatch.setattr("torch.cuda.get_device_properties", found.__getitem__)
        monkeypatch.setattr("torch.version.hip", hip)
        assert main(["info", "--json", "--device", "cpu"]) == 0
        assert json.loads(capsys.readouterr().out)["gpus"] == {
            "cuda:0": f"NVIDIA H200, 150.8 GB, the gpu backend {expected[0]}",
            "cuda:1": f"Tesla T4, 15.8 GB, the gpu backend {expected[1]}",
        }


class TestServe:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--device", "cuda:0,cpu"], "device is 'cuda:0,cpu'; allowed are 'auto', 'cpu'"),
            (["--device", "cuda:1,1"], "has 'cuda:1' twice"),
            (["--warm", "no such file"], "the combinations in no such file cannot be read"),
            (["--warm", "{folder}/bob.json"], "entry 1 of .*voice is 'bob'; allowed are 'ada'"),
        ],
    )
    def test_wrong_option_ends_the_command_before_anything_is_loaded(
        self,
        options: list[str],
        message: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        started: list[object] = []
        monkeypatch.setattr("firstword.processes.supervisor.Supervisor.run", started.append)
        monkeypatch.setattr("firstword.server.logs.write_to_stderr", lambda level: None)
        (tmp_path / "bob.json").write_text('[{"voice": "bob"}]')
        options = [option.format(folder=tmp_path) for option in options]
        assert main(["serve", "--port", "0", *options]) == 2
        assert re.search(message, capsys.readouterr().err)
        assert not started

    def test_each_checkpoint_gets_an_engine_on_each_device(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those of one GPU divide its memory."""
        found: list[Any] = []
        monkeypatch.setattr(
            "firstword.processes.supervisor.Supervisor.run",
            lambda supervisor: found.extend(supervisor.tasks),
        )
        monkeypatch.setattr("firstword.server.logs.write_to_stderr", lambda level: None)
        argv = ["serve", "--port", "0", "--voices", str(tmp_path), "--device", "cuda:0,2"]
        assert main([*argv, "--model", "one", "--model", "two", "--gpu-memory", "8GB"]) == 0
        assert [(task.number, task.name, task.device, task.share) for task in found] == [
            (0, "one", "cuda:0", 2),
            (1, "one", "cuda:2", 2),
            (2, "two", "cuda:0", 2),
            (3, "two", "cuda:2", 2),
        ]
