"""The documentation site: every page can be reached, every public name is in the reference, and it needs no network.

`make site` builds it, strictly; what is checked here needs no build, except for the tests in a browser.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fedcams
from chromium import WIDTHS, barriers, fetched, launched
from test_repository import MODULES

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
pytest.importorskip("mkdocs", reason="mkdocs is not installed: make site")
import site_pages  # noqa: E402  (needs mkdocs)

ROOT = Path(__file__).resolve().parents[2]
DOCS, SITE = ROOT / "docs", ROOT / "build" / "site"
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))


def pages_in(nav: Any) -> Iterator[str]:
    """The paths in a navigation, at any depth."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_in(entry)


NAV = list(pages_in(CONFIG["nav"]))
MADE = [f"api/{name}.md" for name in site_pages.api_modules()] + [name.lower() for name in site_pages.COPIED]


def test_every_page_is_in_the_navigation_once() -> None:
    hidden = set(CONFIG["exclude_docs"].split())
    written = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(NAV) == sorted([page for page in written if f"/{page}" not in hidden] + MADE)


def test_the_reference_covers_every_public_module() -> None:
    pages = [site_pages.api_page(name) for name in site_pages.api_modules()]
    shown = re.findall(r"^::: (\S+)$", "\n".join(pages), re.MULTILINE)
    assert sorted(shown) == sorted(name for name in MODULES if "._" not in name)


def test_the_reference_covers_every_public_name() -> None:
    page = site_pages.api_page("fedcams")
    assert all(f"'{name}'" in page for name in fedcams.__all__)


@pytest.mark.parametrize("mike", [False, True])
def test_versions_can_be_chosen_only_where_mike_lists_them(mike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if mike:
        monkeypatch.setenv(site_pages.MIKE_SAYS, "0.2")
    config = SimpleNamespace(site_name="fedcams", extra={})
    site_pages.on_config(config)
    assert config.site_name == ("fedcams" if mike else f"fedcams {fedcams.__version__}")
    assert ("version" in config.extra) == mike


def test_punctuation_stays_on_the_line_of_its_formula() -> None:
    inline = '<span class="arithmatex">\\(b\\)</span>'
    assert re.search(
        r'<span class="unbroken"><math .*</math>\),</span> so$', site_pages.on_page_content(f"{inline}), so")
    )
    assert site_pages.on_page_content(f"{inline} so").endswith("</math> so")


def test_a_bracket_before_a_link_is_no_part_of_it() -> None:
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="wire-format.md"), meta={})
    shown = site_pages.on_page_markdown("of [0, n); see the [licence](../LICENSE).", page)
    assert shown == "of [0, n); see the licence (`LICENSE`)."


# -- the built site ---------------------------------------------------------------------------------------------------

SOURCES = [ROOT / "mkdocs.yml", *DOCS.rglob("*.md"), *DOCS.rglob("*.py"), *DOCS.glob("assets/*")]
SOURCES += (ROOT / "src" / "fedcams").rglob("*.py")
LOOKED_AT = ("index", "methods", "tutorials/first-comparison", "leaderboard", "api/fedcams.feedback")


@pytest.fixture(scope="module")
def site() -> Path:
    """The folder of the site, if it was built from what the repository holds now."""
    index = SITE / "index.html"
    if not index.exists() or index.stat().st_mtime < max(path.stat().st_mtime for path in SOURCES):
        pytest.skip("the site is not built, or older than its sources: make site")
    return SITE


def test_names_and_modules_can_be_linked_to(site: Path) -> None:
    listed = zlib.decompress((site / "objects.inv").read_bytes().split(b"zlib.\n", 1)[1]).decode()
    targets = {line.split(" ", 1)[0] for line in listed.splitlines()}
    assert {f"fedcams.{name}" for name in fedcams.__all__} <= targets
    assert {name for name in MODULES if "._" not in name} <= targets


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab for pages of the site, which fetch nothing from elsewhere and complain about nothing."""
    page, heard = browser.new_page(reduced_motion="reduce"), []
    page.on("request", lambda request: heard.extend(fetched(request.url)))
    page.on("console", lambda message: heard.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: heard.append(str(error)))
    yield page
    page.close()
    assert heard == []


def test_the_search_works_from_disk_and_asks_nobody_for_anything(site: Path, tab: Any) -> None:
    tab.goto((site / "index.html").as_uri())
    tab.locator("input.md-search__input").fill("squared_error_bound")
    tab.locator(".md-search-result__item").first.wait_for()


@pytest.mark.parametrize("name", LOOKED_AT)
def test_pages_fit_and_no_reader_meets_a_barrier(site: Path, tab: Any, name: str) -> None:
    tab.goto((site / f"{name}.html").as_uri())
    for width in WIDTHS.values():
        tab.set_viewport_size({"width": width, "height": 900})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        for _ in range(2):
            tab.locator("[data-md-component=palette] label:visible").click()  # light to dark, and back
            assert barriers(tab) == [], (width, tab.evaluate("document.body.dataset.mdColorScheme"))


def test_no_page_scrolls_sideways_on_a_phone(site: Path, tab: Any) -> None:
    tab.set_viewport_size({"width": WIDTHS["phone"], "height": 900})
    wide = {}
    for page in NAV:
        tab.goto((site / page).with_suffix(".html").as_uri())
        if (width := tab.evaluate("document.documentElement.scrollWidth")) > WIDTHS["phone"]:
            wide[page] = width
    assert wide == {}
