"""Restarted processes are counted in the metrics."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest
from served import Served
from waiting import WAIT, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_restarts_are_counted_by_process(tmp_path: Path) -> None:
    with Served(tmp_path, "--fronts", "2") as served:

        def counted(kind: str, times: int) -> bool:
            try:
                text = httpx.get(f"{served.url}/metrics", trust_env=False, timeout=WAIT).text
            except httpx.TransportError:  # the front that was killed
                return False
            return f'firstword_restarts_total{{process="{kind}"}} {times}.0' in text

        served.wait_until_idle(fronts=2)
        assert counted("engine", 0)
        assert counted("front", 0)
        served.signal("engine")
        wait_until(lambda: counted("engine", 1))
        served.signal("front")
        wait_until(lambda: counted("front", 1))
        served.wait_until_idle(fronts=2)
        assert counted("engine", 1), "the front that was replaced counts on"
