"""The report in a real browser: it opens, asks for nothing, sorts, and tells on hover and focus."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcptool.report import page

SECTIONS = ["answer", "architecture", "selection", "features", "training", "classes", "latency"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium or chromedriver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield found
    finally:
        found.quit()


@pytest.fixture(scope="module")
def run(whole_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(whole_run, tmp_path_factory.mktemp("pages") / whole_run.name)
    page.write(folder)
    return Path(folder)


def opened(browser: Any, path: Path, *, width: int = 1100, scheme: str = "light") -> list[str]:
    """Show a page; returns the addresses that were asked for."""
    browser.get_log("performance")
    browser.get_log("browser")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(path.as_uri())
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    return [entry["request"]["url"] for entry in sent]


def test_opens_without_a_word_and_asks_for_nothing(browser, run):
    asked = opened(browser, run / "report.html")
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in asked if url.startswith("file:")]) == 1
    assert browser.get_log("browser") == []
    found = browser.execute_script(
        "return Array.from(document.querySelectorAll('section')).map(s => s.id)"
    )
    assert found == SECTIONS
    assert browser.execute_script("return document.querySelectorAll('script').length") == 1
    assert browser.execute_script("return document.querySelectorAll('img[src=x]').length") == 0


def column(browser: Any, table: str, number: int) -> list[str]:
    found: list[str] = browser.execute_script(
        "return Array.from(document.querySelector(arguments[0]).tBodies[0].rows)"
        ".map(row => row.cells[arguments[1]].textContent)",
        table,
        number,
    )
    return found


def test_sorts_by_number_and_by_name(browser, run, hostile):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    opened(browser, run / "report.html")
    buttons = browser.find_elements(By.CSS_SELECTOR, "#profile th button")
    assert column(browser, "#profile", 2) == ["0.300", "0.900", "0.100"]
    buttons[2].click()
    assert column(browser, "#profile", 2) == ["0.100", "0.300", "0.900"]
    buttons[2].send_keys(Keys.ENTER)
    assert column(browser, "#profile", 2) == ["0.900", "0.300", "0.100"]
    buttons[0].click()
    assert column(browser, "#profile", 0) == [hostile, "conv2", "conv10"]
    heads = browser.find_elements(By.CSS_SELECTOR, "#profile th")
    assert [h.get_attribute("aria-sort") for h in heads[:3]] == ["ascending", None, None]
    macs = browser.find_elements(By.CSS_SELECTOR, "#layers th button")[7]
    macs.click()
    # 640 for the classifier comes before thousands and millions, whatever their units.
    assert column(browser, "#layers", 7)[0] == "640"


def test_tells_on_hover_and_on_focus(browser, run):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    opened(browser, run / "report.html")
    tip = browser.find_element(By.ID, "tip")
    assert not tip.is_displayed()
    bars = browser.find_elements(By.CSS_SELECTOR, "#architecture .bar")
    ActionChains(browser).move_to_element(bars[1]).perform()
    assert tip.text == "layer1.0.conv1: 16 to 8 channels, 50 % removed; pruned"
    ActionChains(browser).move_to_element(bars[2]).perform()
    assert tip.text.startswith("layer1.0.conv2: 16 to 16 channels; coupled: ")
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    assert not tip.is_displayed()
    browser.execute_script("arguments[0].focus({focusVisible: true})", bars[1])
    assert tip.text.startswith("layer1.0.conv1: ")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
def test_fits_its_window_in_both_colours(browser, run, width, scheme):
    opened(browser, run / "report.html", width=width, scheme=scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(18, 22, 28)" if scheme == "dark" else "rgb(255, 255, 255)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dense_and_slim_have_one_colour_each(browser, run, scheme):
    opened(browser, run / "report.html", scheme=scheme)
    found = browser.execute_script(
        "return ['dense', 'slim'].map(name => ["
        "getComputedStyle(document.querySelector(`#architecture .bar .${name}`)).fill,"
        "getComputedStyle(document.querySelector(`#latency .line.${name}`)).stroke])"
    )
    assert found[0][0] == found[0][1] != found[1][0] == found[1][1]


def test_a_lone_chart_is_not_blown_up(browser, run):
    opened(browser, run / "report.html")
    wide = "return document.querySelector(arguments[0]).getBoundingClientRect().width"
    assert len(browser.find_elements("css selector", "#latency figure")) == 1
    chart = browser.execute_script(wide, "#latency figure")
    assert chart < 0.6 * browser.execute_script(wide, "#latency")


def test_curves_stand_below_each_other_on_a_phone(browser, run):
    opened(browser, run / "report.html", width=390)
    columns = browser.execute_script(
        "return getComputedStyle(document.querySelector('.grid-of')).gridTemplateColumns"
    )
    assert len(columns.split()) == 1


@pytest.mark.parametrize("part", ["#selection", "#training", "#latency"])
def test_text_of_charts_can_be_read_on_a_phone(browser, run, part):
    opened(browser, run / "report.html", width=390)
    size = browser.execute_script(
        "const chart = document.querySelector(arguments[0] + ' figure .chart');"
        "const font = parseFloat(getComputedStyle(chart.querySelector('.tick')).fontSize);"
        "return font * chart.getBoundingClientRect().width / chart.viewBox.baseVal.width",
        part,
    )
    assert size >= 9


def test_headings_stay_with_what_follows_on_paper(browser, run):
    opened(browser, run / "report.html")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    for name in ("h2", "h3", "summary"):
        rule = "return getComputedStyle(document.querySelector(arguments[0])).breakAfter"
        assert browser.execute_script(rule, name) == "avoid"
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_nothing_is_folded_on_paper(browser, run):
    browser.get((run / "report.html").as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = false)")
    browser.print_page()
    assert browser.execute_script(
        "return [...document.querySelectorAll('details')].every(d => d.open)"
    )


def test_several_runs(browser, run):
    other = run.parent / "other"
    shutil.copytree(run, other)
    page.compare([run, other])
    opened(browser, run.parent / "comparison.html")
    assert browser.get_log("browser") == []
    assert len(column(browser, "#runs", 0)) == 2
    from selenium.webdriver.common.by import By

    browser.find_element(By.CSS_SELECTOR, "#runs td a").click()
    assert browser.current_url.endswith("/report.html")
    assert browser.find_element(By.ID, "answer").is_displayed()
