"""The page in a real browser: it draws, responds to clicks, and makes no network request."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chromium import WIDTHS, barriers, fetched, launched
from fedcams.experiment import Experiment
from fedcams.report import PROFILES, collect, report, summarize
from fedcams.report.profiles import latency_share, time_to
from fedcams.report.series import AVERAGED, CONSTANTS
from fedcams.runs import run
from test_report import averaging, rising, write_run
from test_report_theory import TINY

WINDOW = {"width": 1360, "height": 5000}
"""As high as the page, since a chart is drawn when it is near the window."""
HOSTILE = "<b>bold</b> & <img src='http://example.invalid/x.png'>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods: two seeds, compressed with q and γ, and one whose label is not harmless."""
    root = tmp_path_factory.mktemp("report")
    runs = root / "runs"
    write_run(runs / "a" / "1", rising(0.8), up=4_000_000, down=4_000_000, seed=1, label="dense", server="fedavg")
    write_run(runs / "a" / "2", rising(0.9), up=4_000_000, down=4_000_000, seed=2, label="dense", server="fedavg")
    write_run(runs / "b", rising(0.85), up=60_000, down=4_000_000, label="sparse", uplink="sign", q=0.8, gamma=0.4)
    write_run(
        runs / "c",
        rising(0.4),
        up=90_000,
        down=4_000_000,
        label=HOSTILE,
        uplink="randk(ratio=1/4)",
        q=0.7,
        seconds=None,
    )
    report([runs], root / "out", target=0.7)
    return root


@contextlib.contextmanager
def heard_out(browser: Any, folder: Path) -> Iterator[tuple[Any, list[str]]]:
    """The opened page, and what it must not do: complain, or fetch something."""
    context = browser.new_context(viewport=WINDOW)
    page, heard = context.new_page(), []
    page.on("request", lambda request: heard.extend(fetched(request.url)))
    page.on("console", lambda message: heard.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.goto((folder / "out" / "index.html").as_uri())
    wait_for_charts(page)
    yield page, heard
    context.close()


def wait_for_charts(page: Any) -> None:
    for chart in page.locator(".chart").all():
        chart.locator(".main-svg").first.wait_for()


@pytest.fixture(scope="module")
def seen(browser: Any, folder: Path) -> Iterator[tuple[Any, list[str]]]:
    with heard_out(browser, folder) as opened:
        yield opened


@pytest.fixture(scope="module")
def changed(browser: Any, folder: Path) -> Iterator[tuple[Any, list[str]]]:
    with heard_out(browser, folder) as opened:
        yield opened


@pytest.fixture
def page(seen: tuple[Any, list[str]]) -> Iterator[Any]:
    """The page as it was opened, for tests that only look at it."""
    page, heard = seen
    yield page
    page.wait_for_timeout(50)
    assert heard == []


@pytest.fixture
def own_page(changed: tuple[Any, list[str]]) -> Iterator[Any]:
    """Another one for tests that change it: each of them a part of its own, or back again."""
    page, heard = changed
    yield page
    page.set_viewport_size(WINDOW)
    page.wait_for_timeout(50)
    assert heard == []


def drawn(page: Any, chart: str, what: str = ".scatterlayer .trace .js-line") -> int:
    return int(page.locator(f"#chart-{chart} {what}").count())


def visible(page: Any, chart: str) -> list[Any]:
    found: list[Any] = page.evaluate(f"document.getElementById('chart-{chart}').data.map(t => t.visible ?? true)")
    return found


def test_every_chart_is_drawn(page: Any) -> None:
    assert page.locator(".chart").count() == 3 + 2 + 1 + 1
    for chart in ("test_accuracy", "test_loss", "train_loss"):
        assert len(visible(page, chart)) == 3 + 1 + 1  # two seeds: lowest, highest and mean
        assert page.locator(f"#chart-{chart} + .legend button").count() == 3
        assert drawn(page, chart) >= 3
    assert (drawn(page, "q"), drawn(page, "gamma")) == (2, 1)
    assert drawn(page, "network", ".barlayer .trace") == 3
    assert drawn(page, "partition-1", ".heatmaplayer image") == 1


def test_measured_constants_are_drawn_with_the_estimate_in_another_dash(browser: Any, tmp_path: Path) -> None:
    run(Experiment.from_dict({**TINY, "theory_every": 3}), tmp_path / "run")
    report([tmp_path / "run"], tmp_path / "out")
    with heard_out(browser, tmp_path) as (page, heard):
        assert [drawn(page, metric.key) for metric in CONSTANTS] == [2, 1, 1, 1, 1]
        legend = page.locator("#chart-measured_gradient_sq + .legend button")
        assert legend.all_inner_texts() == ["tiny", "tiny, estimate from updates"]
        assert [button.locator(".dot").get_attribute("data-dash") for button in legend.all()] == ["solid", "dot"]
        assert page.get_by_role("figure", name="Smoothness L, lower bound").count() == 1
        assert heard == []


def test_charts_are_not_offered_to_a_cloud(page: Any) -> None:
    titles = page.locator(".modebar-btn").evaluate_all("all => all.map(b => b.dataset.title)")
    assert "Download plot as a PNG" in titles
    assert not [title for title in titles if "hare" in title or "cloud" in title.lower()]
    contexts = page.locator(".chart").evaluate_all(
        "all => all.map(c => [c._context.showSendToCloud, c._context.plotlyServerURL])"
    )
    assert contexts == [[False, ""]] * len(contexts)


def test_labels_are_shown_as_they_are(page: Any) -> None:
    assert HOSTILE in page.locator("#summary tbody .method").all_inner_texts()
    assert HOSTILE in page.locator("#chart-q + .legend button").all_inner_texts()
    assert page.locator("img").count() == 0


AXES = {
    "Bytes up + down": ("log", 40.6e6),
    "Bytes up": ("log", 6e5),
    "Paper bits": ("log", 4000),
    "Rounds": ("linear", 10),
}


def test_curves_move_to_the_axis_that_is_chosen_and_hidden_ones_stay_hidden(own_page: Any) -> None:
    page, chart = own_page, "document.getElementById('chart-test_accuracy')"
    page.locator("#chart-test_accuracy + .legend button").first.click()
    hidden = ["legendonly"] * 3 + [True, True]  # the band goes with the mean
    assert visible(page, "test_accuracy") == hidden
    assert visible(page, "test_loss") == [True] * 5
    for button, (kind, last) in AXES.items():
        page.locator("#axes").get_by_role("button", name=button, exact=True).click()
        assert page.evaluate(f"{chart}._fullLayout.xaxis.type") == kind
        assert page.evaluate(f"[...{chart}._fullData[3].x].at(-1)") == pytest.approx(last)
        assert page.locator("#axes [aria-pressed=true]").inner_text() == button
        assert visible(page, "test_accuracy") == hidden
        buttons = page.locator("#chart-test_accuracy + .legend button")
        assert buttons.evaluate_all("all => all.map(b => b.ariaPressed)") == ["false", "true", "true"]


def test_a_double_click_in_a_legend_shows_one_method_alone(own_page: Any) -> None:
    own_page.locator("#chart-train_loss + .legend button").nth(1).dblclick()
    assert visible(own_page, "train_loss") == ["legendonly"] * 3 + [True, "legendonly"]


def test_a_chart_is_downloaded_with_its_legend(own_page: Any) -> None:
    page = own_page
    before = page.locator("#chart-q").bounding_box()
    with page.expect_download() as started:
        page.locator("#chart-q .modebar-btn[data-title='Download plot as a PNG']").click()
    assert started.value.suggested_filename == "q.png"
    width, height = struct.unpack(">II", Path(started.value.path()).read_bytes()[16:24])
    assert width == 2 * before["width"]
    assert height > 2 * before["height"]


def times(page: Any, row: int) -> list[float | None]:
    cells = page.locator("#times tbody tr").nth(row).locator("td[data-seconds]")
    return [float(text) if text else None for text in cells.evaluate_all("c => c.map(x => x.dataset.seconds)")]


def test_times_are_those_that_python_computes(page: Any, folder: Path) -> None:
    collection = collect([folder / "runs"])
    target = summarize(collection, 0.7).target
    assert target is not None
    for row, method in enumerate(collection.methods):
        shares = [latency_share(method, profile) for profile in PROFILES]
        cells = page.locator("#times tbody tr").nth(row).locator("td[data-latency]")
        assert [float(v) for v in cells.evaluate_all("c => c.map(x => x.dataset.latency)")] == pytest.approx(shares)
        expected = [time_to(method, profile, target) for profile in PROFILES]
        if None in expected:
            assert times(page, row) == expected
        else:
            assert times(page, row) == pytest.approx(expected, rel=1e-6)


def test_the_times_of_averaged_models_can_be_chosen(browser: Any, tmp_path: Path) -> None:
    runs = averaging(tmp_path / "runs")
    page = browser.new_page(viewport=WINDOW)
    page.goto(report([runs], tmp_path / "out", target=0.45).as_uri())
    page.locator("#chart-network .main-svg").first.wait_for()
    last = times(page, 0)
    page.locator("#averaged").check()
    method = collect([runs]).methods[0]
    assert times(page, 0) == pytest.approx([time_to(method, profile, 0.45, AVERAGED) for profile in PROFILES], rel=1e-6)
    assert times(page, 0) != last
    assert times(page, 1) == [None] * 4, "it has no average"
    page.close()


def test_accuracy_against_all_bytes_comes_first_then_the_time_on_a_network(page: Any) -> None:
    assert page.locator("#axes [aria-pressed=true]").inner_text() == "Bytes up + down"
    assert page.evaluate("document.getElementById('chart-test_accuracy')._fullLayout.xaxis.type") == "log"
    order = page.locator(".chart, #summary, .facts").evaluate_all("all => all.map(e => e.id || e.className)")
    assert order[:4] == ["chart-test_accuracy", "chart-network", "facts", "summary"]


def test_buttons_stand_above_the_plot_of_their_chart(page: Any) -> None:
    gap = """chart => {
        const box = part => chart.querySelector(part).getBoundingClientRect();
        return box(".nsewdrag").top - box(".modebar").bottom;
    }"""
    assert min(chart.evaluate(gap) for chart in page.locator(".chart").all()) >= 0


def test_a_table_that_is_too_wide_shows_it_and_accuracy_comes_before_specs(own_page: Any) -> None:
    heads = own_page.locator("#summary thead th").all_inner_texts()
    assert heads[1] == "Final accuracy"
    assert heads.index("Server") > heads.index("Seeds")
    own_page.set_viewport_size({**WINDOW, "width": 390})
    box = own_page.locator("#summary").evaluate(
        "t => [t.scrollWidth > t.parentElement.clientWidth, getComputedStyle(t.parentElement).backgroundAttachment]"
    )
    assert box == [True, "local, local, scroll, scroll"], "shadows at the ends, which the table covers"
    seen = own_page.locator("#summary tbody td").first.bounding_box()
    assert seen["x"] + seen["width"] <= 390, "the first accuracy is visible without scrolling"


def test_what_is_entered_changes_the_times_unless_it_makes_no_sense(own_page: Any) -> None:
    page = own_page
    before, bars = times(page, 0), page.evaluate("document.getElementById('chart-network').data[0].y")
    page.get_by_label("3G: up").fill("0.5")
    after = times(page, 0)
    assert after[2] is not None
    assert before[2] is not None
    # 2 MB of one client at 1 Mbit/s take 16 s; at half the rate, and in each of 8.5 rounds on average, 16 s more.
    assert after[2] - before[2] == pytest.approx(8.5 * 16)
    assert [after[i] for i in (0, 1, 3)] == [before[i] for i in (0, 1, 3)]
    assert page.evaluate("document.getElementById('chart-network').data[0].y") == after != bars
    page.get_by_label("Target accuracy").fill("85")
    assert times(page, 0) == [None] * 4  # one of the two seeds ends at 80%
    page.get_by_label("Target accuracy").fill("8")
    computed = times(page, 1)
    page.get_by_label("Computation").fill("0")
    assert times(page, 1) == pytest.approx([t - 0.5 for t in computed if t is not None])
    before = times(page, 1)
    page.get_by_label("3G: up").fill("-1")
    page.get_by_label("4G: down").fill("")
    assert times(page, 1) == before


def test_the_table_sorts_and_the_page_is_light_or_dark(own_page: Any) -> None:
    page = own_page
    head = page.locator("#summary th button").filter(has_text="Bytes up")
    labels = page.locator("#summary tbody .method")
    head.click()
    assert labels.all_inner_texts() == ["sparse", HOSTILE, "dense"]
    head.click()
    assert labels.all_inner_texts() == ["dense", HOSTILE, "sparse"]
    page.locator("#summary th button").filter(has_text="Bytes to").click()
    assert labels.all_inner_texts()[-1] == HOSTILE  # it never reached the target
    ink = "getComputedStyle(document.body).color"
    text = "document.getElementById('chart-q')._fullLayout.font.color"
    light = page.evaluate(ink), page.evaluate(text)
    page.locator("#theme").click()
    dark = page.evaluate(ink), page.evaluate(text)
    assert light[0] != dark[0]
    assert light[1] != dark[1]


def test_charts_are_drawn_when_they_come_near(browser: Any, folder: Path) -> None:
    page = opened(browser.new_context(viewport={"width": 390, "height": 500}), folder / "out" / "index.html")
    last = page.locator("#chart-partition-1 .main-svg")
    page.wait_for_timeout(200)
    assert last.count() == 0
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    last.first.wait_for()
    page.context.close()


def within(page: Any, expression: str, limit: int) -> bool:
    """Whether a number on the page comes under a limit, for which a busy machine gets some seconds."""
    for _ in range(100):
        if page.evaluate(expression) <= limit:
            return True
        page.wait_for_timeout(100)
    return False


@pytest.mark.parametrize("entered", ["0.5", ""], ids=["a number", "nothing"])
def test_charts_are_drawn_for_the_window_and_nothing_sticks_out_sideways(own_page: Any, entered: str) -> None:
    own_page.reload()
    wait_for_charts(own_page)
    own_page.get_by_label("3G: up").fill(entered)
    for width in (1360, 900, 420):
        own_page.set_viewport_size({**WINDOW, "width": width})
        assert within(own_page, "document.documentElement.scrollWidth", width)
    assert within(own_page, "document.getElementById('chart-q')._fullLayout.width", 399)


def test_a_browser_that_cannot_inflate_says_so_and_keeps_the_table(browser: Any, folder: Path) -> None:
    page = browser.new_page()
    page.add_init_script("delete window.DecompressionStream")
    page.goto((folder / "out" / "index.html").as_uri())
    page.get_by_text("this browser cannot inflate them").wait_for()
    assert page.locator(".chart:visible").count() == 0
    page.locator("#summary th button").filter(has_text="Bytes up").click()
    assert page.locator("#summary tbody .method").all_inner_texts() == ["sparse", HOSTILE, "dense"]
    page.locator("#theme").click()
    page.close()


def test_a_damaged_page_says_what_is_wrong(browser: Any, folder: Path) -> None:
    text = (folder / "out" / "index.html").read_text("utf-8")
    start = text.index('id="data">') + 200
    (folder / "damaged.html").write_text(text[:start] + "AAAAAAAA" + text[start + 8 :], "utf-8")
    page = browser.new_page()
    page.goto((folder / "damaged.html").as_uri())
    page.get_by_text("The charts are missing: ").wait_for()
    page.close()


def test_a_chart_that_cannot_be_drawn_says_so(browser: Any, folder: Path) -> None:
    page = browser.new_page()
    page.add_init_script("Object.defineProperty(window, 'Plotly', { value: {}, writable: false })")
    page.goto((folder / "out" / "index.html").as_uri())
    page.get_by_text("The charts are missing: TypeError").wait_for()
    page.close()


def test_without_javascript_the_table_is_there_and_the_rest_is_explained(browser: Any, folder: Path) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto((folder / "out" / "index.html").as_uri())
    assert page.get_by_text("The charts need JavaScript").is_visible()
    assert page.locator("#summary tbody tr:visible").count() == 3
    assert page.locator(".chart:visible").count() == 0
    page.close()


# -- other readers -----------------------------------------------------------------------------------------------------


def opened(context: Any, html: Path) -> Any:
    page = context.new_page()
    page.goto(html.as_uri())
    page.locator("#chart-test_accuracy .main-svg").first.wait_for()
    return page


def test_a_print_is_light_and_whole_and_leaves_the_page_as_it_was(browser: Any, folder: Path) -> None:
    page = opened(browser.new_context(color_scheme="dark"), folder / "out" / "index.html")
    state = "[document.documentElement.dataset.theme, document.getElementById('chart-test_accuracy')._fullLayout.width]"
    before = page.evaluate(state)
    fits = "[...document.querySelectorAll('.chart')].every(c => c._fullLayout.width === c.clientWidth)"
    # Once the browser has got ready to print, it lays the page out anew; what it prints is measured then.
    page.evaluate(f"addEventListener('beforeprint', () => {{ window.printed = [{state}, {fits}]; }})")
    page.pdf()
    (theme, width), fitting = page.evaluate("printed")
    assert (theme, fitting) == ("light", True)
    assert width < before[1] < 1280
    assert page.evaluate(state) == before
    page.context.close()


def test_a_finger_scrolls_the_page_over_a_chart(browser: Any, folder: Path) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = opened(context, folder / "out" / "index.html")
    assert page.evaluate("document.getElementById('chart-test_accuracy')._fullLayout.dragmode") is False
    page.locator("#chart-test_accuracy").evaluate("chart => chart.scrollIntoView()")
    before, touch = page.evaluate("scrollY"), context.new_cdp_session(page)
    for y in range(300, 100, -10):
        kind = "touchStart" if y == 300 else "touchMove"
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": 200, "y": y}]})
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    page.wait_for_timeout(500)
    assert page.evaluate("scrollY") > before + 50
    context.close()


FOCUSED = """(() => {
    const element = document.activeElement, style = getComputedStyle(element), bar = element.closest(".modebar");
    const opaque = !bar || getComputedStyle(bar).opacity > 0;
    const shown = style.outlineStyle !== "none" && style.visibility === "visible" && opaque;
    return [element.id || element.textContent || element.dataset.title, shown];
})()"""


def test_the_keyboard_reaches_everything_from_top_to_bottom_and_shows_where_it_is(page: Any) -> None:
    names: list[str] = []
    while not names or names[-1] != "Seeds":
        page.keyboard.press("Tab")
        name, shown = page.evaluate(FOCUSED)
        assert shown, name
        names.append(name)
        assert len(names) < 200
    order = [
        "theme",
        "Bytes up + down",
        "Rounds",
        "Download plot as a PNG",
        "down-0",
        "target",
        "factor",
        "Final accuracy",
    ]
    assert [name for name in dict.fromkeys(names) if name in order] == order


def test_no_reader_meets_a_barrier(own_page: Any) -> None:
    for width in WIDTHS.values():
        own_page.set_viewport_size({**WINDOW, "width": width})
        for theme in ("light", "dark"):
            own_page.evaluate(
                "theme => { if (document.documentElement.dataset.theme !== theme) "
                "document.getElementById('theme').click(); }",
                theme,
            )
            assert barriers(own_page) == [], (width, theme)


def test_rows_and_columns_have_heads(page: Any) -> None:
    for table in ("#summary", "#times", ".rates"):
        assert page.locator(f"{table} tbody tr > th[scope=row]").count() == page.locator(f"{table} tbody tr").count()
        assert page.locator(f"{table} thead th:not([scope=col])").count() == 0
    assert page.get_by_role("figure", name="Test accuracy").count() == 1


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty methods that were evaluated once, the first with a label longer than a chart is wide."""
    root = tmp_path_factory.mktemp("crowd")
    for i in range(20):
        label = "twenty words and more " * 5 if i == 0 else f"method {i}"
        write_run(root / "runs" / f"{i:02}", [0.5 + i / 100], label=label.strip(), server=f"fedavg(lr={i + 1})")
    return report([root / "runs"], root / "out")


def test_what_many_methods_say_is_not_cut_off_and_one_evaluation_is_a_point(browser: Any, crowd: Path) -> None:
    page = opened(browser.new_context(viewport={**WINDOW, "width": 420}), crowd)
    wait_for_charts(page)
    assert page.locator("#chart-test_accuracy .scatterlayer .point").count() == 20
    for chart in ("test_accuracy", "network"):
        inside = page.evaluate(f"""(chart => {{
            const right = chart.getBoundingClientRect().right, names = chart.nextElementSibling.children;
            return [...names].map(name => name.getBoundingClientRect().right <= right);
        }})(document.getElementById("chart-{chart}"))""")
        assert inside == [True] * 20
    page.locator("#chart-test_accuracy .nsewdrag").hover()
    page.locator("#chart-test_accuracy .hoverlayer text").first.wait_for(state="attached")
    assert page.locator("#chart-test_accuracy .hoverlayer .legend").count() == 0  # a box for all would be too high
    page.context.close()
