"""The browser for the tests, and the accessibility problems that axe finds on a page."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = ["--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking"]
WIDTHS = {"desktop": 1280, "phone": 390}
MINOR = "minor"
"""The only impact that axe's findings may have."""


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """A browser, closed at the end; skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield browser
        browser.close()


def barriers(page: Any) -> list[str]:
    """What keeps some readers, such as those with a screen reader, from the page as it is now; minor things aside."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    found = axe.run(page, options={"resultTypes": ["violations"], "preload": False}).response["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html']}" for each in found if each["impact"] != MINOR]


def fetched(url: str) -> list[str]:
    """The address, if a page that fetches it needs a network."""
    return [] if urlsplit(url).scheme in ("file", "data", "blob") else [url]
