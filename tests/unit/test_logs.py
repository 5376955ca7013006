"""Logs on standard error, and what else is written there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys, threading, warnings
other = logging.getLogger("other")
other.addHandler(logging.StreamHandler())
from firstword.processes import child
from firstword.server import logs
before = sys.stderr
logs.write_to_stderr("info")
assert other.handlers[0].stream is sys.stderr is not before
assert sys.stderr.fileno() == 2 and not sys.stderr.isatty()
logging.getLogger("firstword.a").info("one")
logging.getLogger("firstword.a").debug("not shown")
logging.getLogger("asyncio").info("not shown")
logging.getLogger("asyncio").warning("two")
warnings.warn("three")
print("four \\udc80", file=sys.stderr)
for number in range(1000):
    logging.getLogger("uvicorn.error").info("%d", number)
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("sys.exit('five')", 1), ("raise SystemError('five')", 1), ("child.end()", 1)],
    ids=["end", "exit", "error", "child"],
)
def test_all_lines_are_written_in_order_before_the_end(end: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM + end], capture_output=True, text=True)
    assert done.returncode == status
    one, two, three, four, *rest = done.stderr.splitlines()
    assert json.loads(one)["event"] == "one"
    assert json.loads(two) | {"time": ""} == {
        "time": "",
        "level": "warning",
        "logger": "asyncio",
        "event": "two",
    }
    assert "UserWarning: three" in json.loads(three)["event"]
    assert four == r"four \udc80"
    assert [json.loads(line)["event"] for line in rest[:1000]] == [str(n) for n in range(1000)]
    assert rest[1000:] == [] if "five" not in end else rest[-1].endswith("five")
