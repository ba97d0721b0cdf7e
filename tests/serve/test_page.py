"""The page at `/`, in a real browser."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest
from helpers.marks import thorough

from .conftest import KEYS, Running, expected

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.xdist_group("server")


@pytest.fixture(params=["light", *thorough("dark")])
def page(browser: Browser, server: Running, request: pytest.FixtureRequest) -> Iterator[Page]:
    """Open the page with a key typed in.

    It must raise no error, and must request nothing of another origin.
    """
    page = browser.new_page(color_scheme=request.param, viewport={"width": 1100, "height": 800})
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console",
        lambda said: (
            wrong.append(said.text) if said.type == "error" and "of 40" not in said.text else None
        ),
    )
    page.on(
        "request",
        lambda asked: None if asked.url.startswith(server.address) else wrong.append(asked.url),
    )
    page.goto(server.address)
    page.get_by_text("this server asks for an API key").wait_for()
    page.get_by_label("API key").fill(KEYS[0])
    page.get_by_label("API key").press("Tab")
    page.get_by_text("drafts with lookup").wait_for()
    yield page
    assert not wrong
    page.close()


def write(page: Page, prompt: str, tokens: int) -> None:
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_label("tokens", exact=True).fill(str(tokens))
    page.get_by_role("button", name="Write").click()
    page.wait_for_selector("body[data-state=done]", timeout=60_000)


def test_tokens_arrive_in_the_colours_of_those_who_proposed_them(
    page: Page, tmp_path: Path
) -> None:
    page.get_by_label("plain decoding beside it").check()
    write(page, "a b c a b c", 120)
    own, plain = page.locator("#own pre"), page.locator("#none pre")
    shown = own.evaluate("e => [...e.querySelectorAll('span')].map(s => s.textContent).join('')")
    assert shown == plain.evaluate("e => e.textContent") == expected("a b c a b c", 120, chat=True)
    for colour in ("c0", "c1"):  # lookup, skip
        assert own.locator(f"span.{colour}").count() > 0
        assert plain.locator(f"span.{colour}").count() == 0
    backgrounds = [
        own.locator(f"span.{name}").first.evaluate("e => getComputedStyle(e).backgroundColor")
        for name in ("c0", "c1")
    ]
    assert len(set(backgrounds)) == 2
    assert own.locator("del").count() > 0
    assert not own.locator("del").first.is_visible()
    page.get_by_label("show rejected tokens").check()
    assert own.locator("del").first.is_visible()
    assert (
        own.locator("del").first.evaluate("e => getComputedStyle(e).textDecorationLine")
        == "line-through"
    )
    figures = dict(
        zip(
            page.locator("#own dt").all_text_contents(),
            page.locator("#own dd").all_text_contents(),
            strict=True,
        )
    )
    assert float(figures["τ"]) > 1
    assert 0 < float(figures["α"]) < 1
    assert float(figures["tokens/s"]) > 0
    assert figures["tokens"] == "120"
    assert re.fullmatch(r"\d+\.\d\d s", figures["first token"])
    if folder := os.environ.get("SKIPSEARCH_SCREENSHOTS"):
        is_dark = page.evaluate("matchMedia(`(prefers-color-scheme: dark)`).matches")
        page.screenshot(path=f"{folder}/serve-{is_dark}.png", full_page=True)


def test_the_keyboard_alone_is_enough(page: Page) -> None:
    page.get_by_label("Prompt").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("zzz")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("body[data-state=done]", timeout=60_000)
    assert page.locator("#own pre").inner_text()
    page.get_by_label("tokens", exact=True).fill("500")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("body[data-state=writing]")
    page.locator("#own pre span").nth(3).wait_for(state="attached")
    page.keyboard.press("Escape")
    page.wait_for_selector("body[data-state=done]", timeout=10_000)
    assert page.locator("#own pre span").count() < 500
    page.get_by_label("Prompt").focus()
    reached = set()
    for _ in range(14):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"tokens", "temperature", "plain", "rejected", "key", "go"} <= reached


def test_an_error_is_said_and_a_text_that_looks_like_markup_is_text(page: Page) -> None:
    write(page, "a" * 700, 10)
    assert "maximum context length" in page.get_by_role("alert").inner_text()
    write(page, "<img src=x onerror=alert(1)>", 10)
    assert page.locator("#own pre img").count() == 0
    assert page.get_by_role("alert").inner_text() == ""


def test_it_fits_on_a_narrow_screen(page: Page) -> None:
    page.set_viewport_size({"width": 380, "height": 700})
    write(page, "zzz", 60)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_it_is_one_file_that_may_load_nothing(server: Running) -> None:
    with urlopen(server.address) as answer:
        policy, text = answer.headers["Content-Security-Policy"], answer.read().decode()
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in re.sub(r"<!doctype html>|lang=\"en\"", "", text).replace("http-equiv", "")
    assert not re.search(r"\bsrc=|\bhref=|@import|url\(", text)
