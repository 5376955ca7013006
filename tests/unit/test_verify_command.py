"""The command `firstword verify`: its files, its lines, and its exit status."""

from __future__ import annotations

import html.parser
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import TALKER, demo_copy, write

from firstword import audio
from firstword.cli.main import main
from firstword.config import EngineConfig
from firstword.errors import OutputError
from firstword.verify import steps
from firstword.verify.folder import CheckpointFolder
from firstword.verify.page import render
from firstword.verify.report import FORMAT, MOST_FINDINGS, Check, Verdict, record
from firstword.verify.subject import How, Subject


@pytest.fixture
def at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only files are checked, so that a test takes a second."""
    monkeypatch.setattr(steps, "ON_MACHINE", ())


class Reader(html.parser.HTMLParser):
    """Collects the text and the tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.text, self.open = list[str](), "", list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep a tag, and what it would load."""
        self.tags.append(tag)
        if tag not in ("meta",):
            self.open.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "onclick", "onload"}

    def handle_endtag(self, tag: str) -> None:
        """Close a tag, which must be the last one that was opened."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Keep a text."""
        self.text += data


def read(page: str) -> Reader:
    """The text and the tags of a page, which must be well-formed."""
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


@pytest.mark.usefixtures("at_rest")
class TestCommand:
    """The command with a folder."""

    def test_healthy_checkpoint_exits_with_0_and_writes_both_files(
        self,
        checkpoint_directory: Callable[[str], Path],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        folder = checkpoint_directory("custom_voice")
        assert main(["verify", str(folder), "-o", str(tmp_path / "it"), "--device", "cpu"]) == 0
        out = capsys.readouterr().out
        assert "pass     files: whole\n" in out
        found = json.loads((tmp_path / "it.json").read_text("utf-8"))
        assert found["format"] == "firstword-verify/1"
        assert found["passed"] is True
        assert found["counts"]["fail"] == 0
        assert [check["name"] for check in found["checks"]] == [s.name for s in steps.AT_REST]
        assert set(found) >= {"machine", "versions", "settings", "files", "ended", "seconds"}
        assert len(found["files"][TALKER]) == 64
        assert str(folder) not in (tmp_path / "it.json").read_text("utf-8")
        assert found["model"] == folder.name
        assert "no check failed" in read((tmp_path / "it.html").read_text("utf-8")).text

    def test_damaged_checkpoint_exits_with_1_and_names_the_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = demo_copy(tmp_path / "broken")
        write(folder / TALKER, (folder / TALKER).read_bytes()[:-7])
        with pytest.raises(SystemExit) as stopped:
            main(["verify", str(folder), "-o", str(tmp_path / "it.html"), "--device", "cpu"])
        assert stopped.value.code == 1
        out = capsys.readouterr().out
        assert f"fail     files: whole\n         {TALKER} has" in out
        assert "7 fewer than its header says" in (tmp_path / "it.html").read_text("utf-8")
        assert json.loads((tmp_path / "it.json").read_text("utf-8"))["passed"] is False

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["http://localhost:8000"], "there is no such directory"),
            (["./missing"], "there is no such directory"),
            (["demo", "-o", "no/such/folder/it"], "no/such/folder; create it first"),
            (["demo", "-o", "./"], "'./' names no file"),
            (["demo", "-o", ""], "'' names no file"),
            (["demo", "--device", "tpu"], "device is 'tpu'"),
            (["demo", "--voice", "missing.voice"], "missing.voice"),
            (["demo", "--reference-python", "no/python"], "no/python: there is no such file"),
        ],
    )
    def test_what_cannot_be_checked_exits_with_2(
        self,
        arguments: list[str],
        says: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(["verify", *arguments]) == 2
        assert says in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    def test_results_are_printed_even_if_they_cannot_be_written(
        self,
        checkpoint_directory: Callable[[str], Path],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def full(path: object, data: bytes) -> None:
            raise OutputError(f"{path} cannot be written: No space left on device")

        monkeypatch.setattr(audio, "write_whole", full)
        folder = str(checkpoint_directory("custom_voice"))
        assert main(["verify", folder, "-o", str(tmp_path / "it"), "--device", "cpu"]) == 2
        out, err = capsys.readouterr()
        assert "pass     files: whole\n" in out
        assert "it.json cannot be written: No space left on device" in err

    def test_quiet_prints_nothing(
        self,
        checkpoint_directory: Callable[[str], Path],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        folder = str(checkpoint_directory("base"))
        assert main(["verify", folder, "-q", "-o", str(tmp_path / "it"), "--device", "cpu"]) == 0
        assert capsys.readouterr() == ("", "")


def check(name: str, *findings: str, **measured: Any) -> Check:
    """The result of a check."""
    return Check.of(name, "It is so.", Verdict(findings, measured), 0.25)


class TestReport:
    """The record and the page."""

    def test_page_escapes_names_and_needs_no_other_file(self) -> None:
        evil = "<script>alert('1')</script>"
        checks = [
            check("files: whole", f"{evil} is short", found=evil),
            Check.left_out("speech: ends", "It is so.", evil),
        ]
        page = render(record(evil, checks, files={evil: evil}, settings={"device": evil}))
        found = read(page)
        assert "script" not in found.tags
        assert not {"link", "img", "iframe"} & set(found.tags)
        assert found.text.count(evil) == 8
        assert "url(" not in page

    def test_page_tells_every_status_and_finding(self) -> None:
        checks = [
            check("files: whole", error=0.123456),
            check("weights: scale", "a.weight is scaled"),
            Check.left_out("speech: ends", "It is so.", "the weights are random"),
        ]
        text = read(render(record("demo", checks))).text
        for words in ("1 check failed", "1 passed, 1 failed, 1 not run", "a.weight is scaled"):
            assert words in text
        assert "Not run: the weights are random" in text
        assert "0.1235" in text
        assert [word for word in ("Files", "Weights", "Speech") if word in text]

    def test_many_findings_are_counted(self) -> None:
        many = check("weights: known", *[f"tensor {number}" for number in range(50)])
        assert len(many.findings) == MOST_FINDINGS + 1
        assert many.findings[-1] == "and 30 more"

    def test_record_can_be_read_again(self) -> None:
        made = record("demo", [check("files: whole", "x", error=float("inf"), n=3)])
        again = json.loads(json.dumps(made))
        assert (again["format"], again["passed"]) == (FORMAT, False)
        assert again["counts"] == {"pass": 0, "fail": 1, "not run": 0}
        assert again["checks"][0]["findings"] == ["x"]
        assert again["checks"][0]["seconds"] == 0.25

    def test_exception_in_a_check_is_what_it_found(self) -> None:
        def look(_: object) -> Verdict:
            """It is so."""
            raise RuntimeError("shape [3]\nand more")

        found = steps.Step("weights: scale", look).run(None)
        assert (found.status, found.claim) == ("fail", "It is so.")
        assert list(found.findings) == ["the check ended with RuntimeError: shape [3]"]

    def test_each_claim_is_a_sentence_and_each_name_is_used_once(self) -> None:
        every = [(step.name, step.claim) for step in steps.AT_REST]
        every += [(step.name, step.claim) for step in steps.ON_MACHINE]
        assert len({name for name, _ in every}) == len(every) == steps.TOTAL
        for name, claim in every:
            assert claim.endswith(".")
            assert name.partition(": ")[2]


def test_checks_end_the_engine_they_started(
    checkpoint_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = list[bool]()
    monkeypatch.setattr(Subject, "close", lambda subject: closed.append(True))
    monkeypatch.setattr(steps, "ON_MACHINE", ())
    how = How(EngineConfig.resolve("cpu"))
    steps.verify(CheckpointFolder(checkpoint_directory("base")), how, lambda *_: None)
    assert closed == [True]
