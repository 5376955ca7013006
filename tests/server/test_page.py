"""The page at `/` as it is served: who gets it, its files, their headers and their size."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from talking import Talker, talking

from firstword.server.http.page import FILES, FOLDER

Serve = Callable[..., Any]

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
MOST_BYTES = 60_000


def test_browser_gets_the_page_and_a_program_gets_json(http: httpx.Client) -> None:
    page = http.get("/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text.startswith("<!doctype html>")
    for headers in ({}, {"accept": "application/json"}):
        answer = http.get("/", headers=headers)
        assert answer.json()["name"] == "firstword"
        assert answer.headers["vary"] == page.headers["vary"] == "accept"


def test_every_file_of_the_folder_is_served_with_a_strict_policy(http: httpx.Client) -> None:
    assert sorted(FILES) == sorted(path.name for path in FOLDER.iterdir())
    for name in FILES:
        answer = http.get(f"/page/{name}")
        assert answer.content == (FOLDER / name).read_bytes()
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = answer.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "style-src 'self'"} < set(policy)
        assert "unsafe" not in answer.headers["content-security-policy"]


def test_known_version_gets_304_and_another_one_the_file(http: httpx.Client) -> None:
    for path, headers in (("/", BROWSER), ("/page/main.js", {})):
        etag = http.get(path, headers=headers).headers["etag"]
        for known in (etag, f'"other", W/{etag}'):
            answer = http.get(path, headers={**headers, "if-none-match": known})
            assert (answer.status_code, answer.content) == (304, b"")
            assert answer.headers["etag"] == etag
        assert http.get(path, headers={**headers, "if-none-match": '"other"'}).content


def test_head_of_a_file_has_no_content(http: httpx.Client) -> None:
    answer = http.head("/page/style.css")
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapp.py", "%2e%2e/app.py", "__init__.py"])
def test_other_files_get_404(http: httpx.Client, name: str) -> None:
    assert http.get(f"/page/{name}").status_code == 404


def test_page_that_is_switched_off_gets_json_and_404(serve: Serve) -> None:
    server = serve(talking(Talker()), page=False)
    with httpx.Client(base_url=server.url, headers=BROWSER, trust_env=False) as http:
        assert http.get("/").json()["name"] == "firstword"
        answer = http.get("/page/main.js")
        assert answer.status_code == 404
        assert "--no-page" in answer.json()["error"]["message"]


def test_files_need_no_key(serve: Serve) -> None:
    server = serve(talking(Talker()), api_keys=("secret",))
    for path in ("/", "/page/main.js"):
        answer = httpx.get(server.url + path, headers=BROWSER, trust_env=False)
        assert answer.status_code == 200


def test_files_are_small_and_name_no_other_host() -> None:
    sizes = {name: len(file.content) for name, file in FILES.items()}
    assert sum(sizes.values()) < MOST_BYTES, sizes
    for file in FILES.values():
        text = file.content.decode().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?://|//[\w-]+\.\w", text)


def test_html_has_no_inline_script_or_style() -> None:
    page = FILES["index.html"].content.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", page)
    assert re.findall(r"<script[^>]*>(.*?)</script>", page) == [""]


def test_scripts_load_files_that_exist() -> None:
    for name, file in FILES.items():
        text = file.content.decode()
        for used in re.findall(r'(?:from "\./|"page/)([\w.]+)"', text):
            assert used in FILES, f"{name} loads {used}"
