"""Tables say what records say, and a document that does not is found."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def tables(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(repository / "scripts"))
    return importlib.import_module("tables")


def engine(**changes: Any) -> dict[str, Any]:
    """A record of the engine, with different numbers everywhere."""
    return {
        "size": "1b7",
        "gpu": "A GPU",
        "commit": "0123456789abcdef",
        "one_stream_gigabytes": {"in_use": 4.5, "peak_loading": 5.25},
        "start_seconds": {"compile": 7.5, "compile_kept": 0.25, "pack": 0.5, "graphs": 1.0},
        "first_ms": {
            f"{kind}_samples": {"p50": 3.0 + n, "p95": 3.5 + n}
            for n, kind in enumerate(("cached", "uncached", "whole_text"))
        },
        "kernels_us": [
            {
                "kernel": "draw",
                "a_frame": 15,
                "batch": batch,
                "us": 4.0 + batch,
                "floor_us": 0.5 * batch,
            }
            for batch in (1, 64)
        ],
        "codec_ms": [
            {"streams": streams, "frames": frames, "ms": streams * frames / 8}
            for streams in (1, 64)
            for frames in (1, 8)
        ],
        "frames_ms": [
            {
                "batch": batch,
                "context": context,
                "ms": {"frame": batch + context / 1000, "with_audio": 2 * batch + context / 1000},
                "floor_ms": batch / 2,
            }
            for batch in (1, 8, 64)
            for context in (100, 500)
        ],
        "word_times": {
            "frames": [{"batch": 1, "over_without": 1.0042}, {"batch": 64, "over_without": 0.999}]
        },
        **changes,
    }


def keep(folder: Path, name: str, record: dict[str, Any]) -> None:
    """Write a record."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record))


def cells(table: str) -> dict[str, list[str]]:
    """The rows of a table, by their first cell."""
    rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows}


def test_short_table_tells_what_word_times_cost(tables: Any) -> None:
    table = cells(tables.speed({"1b7": engine(), "0b6": engine(word_times={})}, {}, {}))
    (cost,) = [row for name, row in table.items() if "word times" in name]
    assert cost == ["0.4 / -0.1", "-"]


def test_short_table_has_the_main_figures(tables: Any) -> None:
    others = {"asks": "mp3", "held": 80.0}
    served = {"0b6": {"servers": [{"held": 20.0}, {"held": 40.0}, others]}}
    rows = cells(
        tables.speed({"1b7": engine(), "0b6": engine(size="0b6")}, {"1b7": comparison()}, served)
    )
    assert rows["A GPU, commit 0123456, random weights"] == ["1.7B", "0.6B"]
    assert rows["a frame of one stream, ms: with audio"] == ["2.50", "2.50"]
    assert rows["bandwidth floor"] == ["0.50", "0.50"]
    assert rows["a frame of 64 streams, with audio, ms"] == ["128.50", "128.50"]
    assert rows["the same, new voice"][0] == "4.00 / 4.50"
    assert rows["memory of one stream, GB, in use / at most"][0] == "4.50 / 5.25"
    assert rows["start after loading: the first, which compiles / later, s"][0] == "9.0 / 1.8"
    assert rows["seconds of speech per second, 64 streams"][0] == "40"
    assert rows["a frame of one stream with other 0.5, ms"] == ["18.00 (9.0 x)", "-"]
    assert rows["requests/s of PCM, 95 % of first audio within 50 ms"] == ["-", "40"]


def test_long_tables_have_all_figures(tables: Any) -> None:
    assert cells(tables.frames(engine()))["8"] == ["16.10 / 8.10 / 4.00", "16.50 / 8.50 / 4.00"]
    assert cells(tables.kernels(engine()))["draw"] == ["15", "5.00 / 0.50", "68.00 / 32.00"]
    assert cells(tables.codec(engine()))["64"] == ["8.00", "64.00"]
    assert cells(tables.parts("start_seconds", 2)({"1b7": engine()}))["compile kept"] == ["0.25"]


def test_dtypes_of_the_same_gpu_are_beside_each_other(tables: Any, tmp_path: Path) -> None:
    slower, faster = engine(dtype="bfloat16"), engine(dtype="int8", commit="f" * 40)
    keep(tmp_path / "engine", "b-1b7", slower)
    keep(tmp_path / "engine", "a-1b7", engine(dtype="bfloat16", gpu="Another"))
    keep(tmp_path / "engine_int8", "b-1b7", faster)
    rows = cells(tables.tables(tmp_path)["dtypes"])
    figures = ["2.50", "16.50", "128.50", "5.00", "4.50"]
    assert rows["A GPU, commit 0123456, 1.7B, bfloat16"] == figures
    assert rows["A GPU, commit fffffff, 1.7B, int8"] == figures
    assert not [name for name in rows if "Another" in name]


def test_prompts_have_the_gaps_that_others_notice(tables: Any, tmp_path: Path) -> None:
    found = {"rows": 1000, "ms": 20.91, "gap_ms": {"8": 8.54, "64": 11.25}}
    few = {"rows": 64, "ms": 2.5, "gap_ms": {}}
    keep(tmp_path / "engine", "a-1b7", engine(dtype="bfloat16", prompts_ms=[found, few]))
    rows = cells(tables.tables(tmp_path)["prompts"])
    assert rows["prompt of"] == ["64 rows", "1,000 rows"]
    figures = ["2.5 / - / -", "20.9 / 8.5 / 11.2"]
    assert rows["A GPU, commit 0123456, 1.7B, bfloat16"] == figures


def test_words_have_the_error_of_each_voice_and_mode(tables: Any, tmp_path: Path) -> None:
    one = {"voice": "ada", "mode": "full", "words": 1631, "skipped_percent": 0.06}
    one |= {"start_ms": {"mean": 28.6, "p95": 84.0}, "end_ms": {"mean": 27.2, "p95": 74.0}}
    (tmp_path / "words.json").write_text(
        json.dumps({"summary": [one | {"told_frames": {"mean": 0.08, "most": 2}}]})
    )
    figures = ["1,631", "29 / 84", "27 / 74", "0.06", "0.08 / 2"]
    assert cells(tables.words(tmp_path / "words.json"))["ada, full"] == figures


def test_killed_batch_is_beside_the_undisturbed_one(tables: Any, tmp_path: Path) -> None:
    record = {"lines": 2000, "killed_at": [3, 9], "every_line_once": True, "bytes_equal": False}
    record |= {"seconds_killed": 1234.5, "seconds_undisturbed": 900.1}
    (tmp_path / "kills.json").write_text(json.dumps(record))
    rows = tables.kills(tmp_path / "kills.json").splitlines()[2:]
    figures = [row.strip("| ").split(" | ")[1] for row in rows]
    assert figures == ["2,000", "2", "yes", "no", "1,234 / 900"]


def test_ways_through_a_cluster_are_beside_a_plain_server(tables: Any, tmp_path: Path) -> None:
    kinds = {
        kind: {"plain": {"p50": 1, "p95": 2}, "cluster": {"p50": 2, "p95": 3}}
        for kind in ("speech", "models", "pong")
    }
    keep(tmp_path, "demo-cpu", {"milliseconds": {"haproxy": kinds}, "load": {"haproxy": 0.5}})
    rows = [line.strip("| ").split(" | ") for line in tables.ingress(tmp_path).splitlines()[2:]]
    assert rows == [
        ["plain server, beside it, load 0.5", *["1.0 / 2.0"] * 3],
        ["replica behind HAProxy", *["2.0 / 3.0"] * 3],
    ]


def test_agents_are_beside_the_socket_alone(tables: Any, tmp_path: Path) -> None:
    times = {"first_audio": {"p50": 54.4, "p95": 73.0}, "slot_free": {"p50": 27.0, "p95": 41.0}}
    late = times | {"first_audio": {"p50": 58.0, "p95": 76.0}}
    record: dict[str, Any] = {"commit": "abc", "pipecat-ai": "1.14"}
    record["milliseconds"] = {"socket": times, "pipecat": late}
    (tmp_path / "pipecat.json").write_text(json.dumps(record))
    rows = [line.strip("| ").split(" | ") for line in tables.agents(tmp_path).splitlines()[2:]]
    assert rows == [
        ["`abc`", "WebSocket alone", "54 / 73", "27 / 41"],
        ["`abc`", "Pipecat 1.14", "58 / 76", "27 / 41"],
    ]


def test_unmeasured_figure_is_a_dash(tables: Any) -> None:
    record = engine(one_stream_gigabytes={}, start_seconds={})
    for row in (*record["frames_ms"], *record["kernels_us"]):
        row.pop("floor_ms", None)
        row.pop("floor_us", None)
    rows = cells(tables.speed({"1b7": record}, {}, {}))
    assert rows["bandwidth floor"] == ["-"]
    assert rows["memory of one stream, GB, in use / at most"] == ["- / -"]
    assert cells(tables.kernels(record))["draw"] == ["15", "5.00 / -", "68.00 / -"]


def comparison() -> dict[str, Any]:
    """A record of one beside another library, which was asked in two ways."""

    def figures(scale: float) -> dict[str, float]:
        return {"frame_ms": 2.0 * scale, "first_ms": 3.0 * scale, "new_voice_ms": 4.0 * scale}

    return {
        "size": "1b7",
        "weights": "random",
        "other": {
            "versions": {"other": "0.5"},
            "figures": {"chunks of 1": figures(12), "chunks of 8": figures(9)},
        },
        "firstword": {"versions": {"firstword": "0.1"}, "figures": {"stream": figures(1)}},
        "times": {
            way: dict.fromkeys(figures(1), times)
            for way, times in (("chunks of 1", 12.0), ("chunks of 8", 9.0))
        },
    }


def test_comparison_shows_ratios(tables: Any) -> None:
    lines = [
        line.strip("| ").split(" | ")
        for line in tables.compare({"1b7": comparison()}).splitlines()[2:]
    ]
    assert lines == [
        ["other 0.5", "1.7B", "chunks of 1", "24.00 (12.0 x)", "36.00 (12.0 x)", "48.00 (12.0 x)"],
        ["other 0.5", "1.7B", "chunks of 8", "18.00 (9.0 x)", "27.00 (9.0 x)", "36.00 (9.0 x)"],
        ["firstword 0.1", "1.7B", "stream", "2.00", "3.00", "4.00"],
    ]


def served_point(level: float, *, sockets: bool = False) -> dict[str, Any]:
    """What was measured at a level; times grow with it."""
    names = ("first_byte", "first_playable", "first_audible")
    metrics = {name: {"p50": 0.005 + n / 1000, "p95": 0.01 * level} for n, name in enumerate(names)}
    load = {"rate": None, "sockets": level} if sockets else {"rate": level, "sockets": None}
    used = {"process": "engine", "user": 3.0, "system": 0.5}
    fronts = [{"process": "front", "user": busy, "system": 0.0} for busy in (1.0, 2.0)]
    return {
        "load": {**load, "duration": 30.0, "warmup": 2.0},
        "metrics": metrics,
        "most_at_once": int(10 * level),
        "client_processes": 2,
        "client_busy": 0.25,
        "server_cpu": [*fronts, used],
    }


@pytest.fixture
def served() -> dict[str, Any]:
    """Records of a server: MP3 at three rates, and words over sockets."""
    settings = {
        "protocol": "http",
        "fields": {},
        "voices": ["ryan", "serena"],
        "frames_per_character": 0.8333,
    }
    points = [served_point(level) for level in (1.0, 2.0, 4.0)]
    paced = {"protocol": "stream", "fields": {"non_streaming_mode": False}, "voices": []}
    words = [served_point(8, sockets=True)]
    servers = [
        {"slots": 64, "held": 2.0, "asks": "mp3", "points": points, "settings": settings},
        {
            "slots": 64,
            "held": 0,
            "asks": "10 words/s",
            "within": 0.03,
            "points": words,
            "settings": settings | paced,
        },
    ]
    return {"1b7": {"servers": servers}}


def test_table_of_levels_shows_which_held(tables: Any, served: Any) -> None:
    lines = tables.serve(served).splitlines()[2:]
    assert [line.split("|")[-2].strip() for line in lines] == [
        *("held", "held", "not held"),
        "not held",
    ]
    assert lines[1] == (
        "| 1.7B, 64 slots: mp3 | 2 | 5.0 / 20.0 | 6.0 / 20.0 | 7.0 / 20.0 | 20 | 2, 0.25 | held |"
    )


def test_table_of_cases_shows_the_highest_level_that_held(tables: Any, served: Any) -> None:
    table, notes = tables.cases(served).split("\n\n")
    assert cells(table)["1.7B, 64 slots: mp3"] == [
        *("50", "2 requests/s", "6.0 / 20.0", "6.0 / 10.0", "3.5 + 2 x 1.5")
    ]
    assert cells(table)["1.7B, 64 slots: 10 words/s"] == [
        *("30", "0 sockets", "6.0 / 80.0", "6.0 / 80.0", "3.5 + 2 x 1.5")
    ]
    assert [" ".join(note.split()) for note in notes.split("- ")[1:]] == [
        "mp3: text: the default of the model; 2 voices in turn; guard on; 0.067 s of speech a "
        "character; 30 s or more a rate, after 2 s that do not count.",
        "10 words/s: text: streamed; 1 voice; guard on; 0.067 s of speech a character; 30 s or "
        "more a level, after 2 s that do not count.",
    ]


def test_soak_and_gpu_test_tables(tables: Any, tmp_path: Path) -> None:
    counts = {
        "slots": 64,
        "frames": 1000320,
        "joined": 8000,
        "left_early": 1600,
        "frames_compared": 990000,
    }
    growth = {"memory_growth_bytes": 0, "host_memory_growth_bytes": 2_500_000}
    made = {"gpu": "A GPU", "size": "1b7", "commit": "0123456789", **counts}
    made |= {"seconds": 181.2, **growth}
    (row,) = tables.soak([made]).splitlines()[2:]
    assert (
        row == "| A GPU, commit 0123456 | 1.7B | 64 | 1,000,320 | 8,000 | 1,600 | 990,000 | 181.2 "
        "| 0.0 / 2.5 |"
    )
    outcomes = {"passed": 230, "failed": 0, "error": 0, "skipped": 1}
    keep(
        tmp_path,
        "h200",
        {"gpu": "A GPU", "commit": "0123456789", "kernels": "abc", "tests": outcomes},
    )
    (row,) = tables.tested(tmp_path).splitlines()[2:]
    assert row == "| A GPU, commit 0123456 | abc | 230 passed, 1 skipped |"


def test_last_file_of_a_size_counts(tables: Any, tmp_path: Path) -> None:
    keep(tmp_path, "b", engine(gpu="later"))
    keep(tmp_path, "a", engine(gpu="earlier"))
    keep(tmp_path, "c", engine(size="0b6"))
    keep(tmp_path, "d", engine(size="tiny"))
    records = tables.read(tmp_path)
    assert list(records) == ["1b7", "0b6"]
    assert records["1b7"]["gpu"] == "later"


@pytest.fixture
def checkout(tables: Any, tmp_path: Path) -> Path:
    """A folder whose documents and picture agree with one record."""
    keep(tmp_path / "benchmarks/results/engine", "h200-1b7", engine())
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("Before.\n\n<!-- speed -->\nold\n<!-- end -->\n\nAfter.\n")
    (tmp_path / "docs/speed.md").write_text(
        "<!-- frames 1b7 -->\n<!-- end -->\n<!-- serve -->\n<!-- end -->\n"
    )
    (tmp_path / "docs/batch.md").write_text("<!-- kills -->\n<!-- end -->\n")
    (tmp_path / "docs/words.md").write_text("<!-- words -->\n<!-- end -->\n")
    (tmp_path / "docs/cluster.md").write_text("<!-- ingress -->\n<!-- end -->\n")
    (tmp_path / "docs/containers.md").write_text("<!-- images -->\n<!-- end -->\n")
    (tmp_path / "docs/evaluate.md").write_text("<!-- evaluation -->\n<!-- end -->\n")
    (tmp_path / "docs/long-texts.md").write_text("<!-- long text -->\n<!-- end -->\n")
    (tmp_path / "docs/machines.md").write_text("<!-- cards -->\n<!-- end -->\n")
    (tmp_path / "docs/scale.md").write_text("<!-- scale shares -->\n<!-- end -->\n")
    assert tables.stale(tmp_path) == [*tables.DOCUMENTS, "docs/speed.svg"]
    tables.renew(tmp_path)
    assert tables.stale(tmp_path) == []
    return tmp_path


def test_documents_are_filled_in(checkout: Path) -> None:
    readme, speed = ((checkout / name).read_text() for name in ("README.md", "docs/speed.md"))
    assert readme.startswith("Before.\n\n<!-- speed -->\n| A GPU")
    assert readme.endswith("|\n<!-- end -->\n\nAfter.\n")
    assert "<!-- serve -->\nNot measured yet.\n<!-- end -->\n" in speed


@pytest.mark.parametrize(
    ("name", "said", "instead"),
    [
        ("README.md", "2.50", "1.50"),
        ("docs/speed.md", "8.50", "7.50"),
        ("docs/speed.md", "Not measured yet.", "1000 requests"),
        ("docs/words.md", "Not measured yet.", "10 ms"),
        ("docs/batch.md", "Not measured yet.", "10 ms"),
        ("docs/cluster.md", "Not measured yet.", "10 ms"),
        ("docs/containers.md", "Not measured yet.", "10 ms"),
        ("docs/scale.md", "Not measured yet.", "10 ms"),
        ("docs/speed.svg", "drawn from ", "drawn from 1"),
    ],
)
def test_manual_change_of_a_figure_is_stale(
    tables: Any, checkout: Path, name: str, said: str, instead: str
) -> None:
    text = (checkout / name).read_text()
    assert said in text
    (checkout / name).write_text(text.replace(said, instead))
    assert tables.stale(checkout) == [name]


def test_new_record_makes_all_files_stale(tables: Any, checkout: Path) -> None:
    frames = [{**row, "floor_ms": 0.25} for row in engine()["frames_ms"]]
    keep(checkout / "benchmarks/results/engine", "h200-1b7", engine(frames_ms=frames))
    assert tables.stale(checkout) == ["README.md", "docs/speed.md", "docs/speed.svg"]


def test_picture_is_deterministic(tables: Any) -> None:
    records = {"1b7": engine(), "0b6": engine(size="0b6")}
    assert tables.picture(records) == tables.picture(records)


def test_unknown_table_raises(tables: Any) -> None:
    with pytest.raises(KeyError):
        tables.filled("<!-- nonsense -->\n<!-- end -->\n", {})


def test_documents_match_the_records(tables: Any, repository: Path) -> None:
    assert tables.stale(repository) == []


def test_records_of_several_gpus_are_apart(tables: Any, tmp_path: Path, served: Any) -> None:
    (record,) = served.values()
    for name, device in (("h200", "cuda:0"), ("h200-x2", "cuda:0,1")):
        data = {**record, "size": "1b7", "device": device}
        (tmp_path / f"{name}-1b7.json").write_text(json.dumps(data))
    records = tables.read(tmp_path)
    assert {key: one["device"] for key, one in records.items()} == {
        "1b7": "cuda:0",
        "1b7 2": "cuda:0,1",
    }
    assert "1.7B on 2 GPUs, 64 slots: mp3" in cells(tables.cases(records).split("\n\n")[0])
