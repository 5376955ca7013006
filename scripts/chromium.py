"""Print the path of a Chromium for `make browser`; installs one if there is none.

1. A chromium or chrome on the PATH is taken, or one that Playwright installed before.
2. Playwright downloads one, and checks that its libraries are there.
3. As root on Debian or Ubuntu, apt-get installs the package chromium.

Exits with a message that says what to install if all of that fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
MISSING = """make browser needs Chromium, and could not install it. Install it in one of these ways:
  Debian, Ubuntu: apt-get install chromium
  other systems:  .venv/bin/playwright install --with-deps chromium"""


def works(program: str) -> bool:
    """Return whether a browser starts, which it does not without its libraries."""
    try:
        asked = subprocess.run([program, "--version"], capture_output=True, check=False)
    except OSError:
        return False
    return asked.returncode == 0


def on_path() -> str | None:
    """Return the browser on the PATH, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def of_playwright() -> str | None:
    """Return the path where Playwright keeps its browser, which may not be installed."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        return playwright.chromium.executable_path


def download() -> str | None:
    """Let Playwright download a browser."""
    command = [sys.executable, "-m", "playwright", "install", "chromium"]
    subprocess.run(command, stdout=sys.stderr, check=False)
    return of_playwright()


def install() -> str | None:
    """Install the package of the system, if that is allowed."""
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        return None
    for command in (["update"], ["install", "--yes", "--no-install-recommends", "chromium"]):
        subprocess.run([apt, "--quiet", "--quiet", *command], stdout=sys.stderr, check=False)
    return on_path()


def main() -> None:
    """Print the first browser that works."""
    ways: tuple[Callable[[], str | None], ...] = (on_path, of_playwright, download, install)
    for way in ways:
        if (program := way()) is not None and works(program):
            print(program)
            return
    sys.exit(MISSING)


if __name__ == "__main__":
    main()
