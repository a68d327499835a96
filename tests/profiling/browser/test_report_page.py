"""The report in a real browser: nothing is fetched, every chart is there, and it can be read everywhere."""

import base64
import json

import pytest
from made_runs import make_run
from selenium.webdriver.common.by import By

from keras_paragrad.profiling.report import write_report

WIDTHS = {"desktop": 1280, "phone": 360}
# What is drawn in each chart: its caption, its own size, the largest of its shapes, and names of marks that overlap.
CHARTS = """
const overlap = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
return [...document.querySelectorAll("figure")].map(figure => {
  const svg = figure.querySelector("svg[role=img]");
  const boxes = [...svg.querySelectorAll("polyline, .part, circle")].map(shape => shape.getBoundingClientRect());
  const ticks = [...svg.querySelectorAll(".tick")].map(tick => [tick.textContent, tick.getBoundingClientRect()]);
  const collisions = ticks.flatMap(([text, box], index) =>
    ticks.slice(index + 1).filter(([_, other]) => overlap(box, other)).map(([other]) => text + " on " + other));
  const size = svg.getBoundingClientRect();
  const all = [...boxes, ...ticks.map(([_, box]) => box)];
  return {
    caption: figure.querySelector("figcaption").textContent,
    size: [size.width, size.height],
    widest: Math.max(...boxes.map(box => box.width)),
    tallest: Math.max(...boxes.map(box => box.height)),
    outside: all.filter(box => box.left < 0 || box.right > document.documentElement.clientWidth + 1).length,
    collisions,
  };
});
"""
# Texts whose contrast with what is behind them is less than 4.5 to 1, as WCAG 2.2 asks (success criterion 1.4.3).
PALE = """
const light = colour => {
  const parts = colour.match(/[\\d.]+/g).map(Number);
  const [r, g, b] = parts.map(part => part / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = element => {
  for (; element; element = element.parentElement) {
    const colour = getComputedStyle(element).backgroundColor;
    if (colour && !colour.endsWith(", 0)")) return colour;
  }
};
const own = element => [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
return [...document.querySelectorAll("body *")].filter(own).filter(element => {
  if (!element.getClientRects().length || element.closest("title")) return false;
  const style = getComputedStyle(element);
  const colours = [element instanceof SVGElement ? style.fill : style.color, behind(element)].map(light);
  return (Math.max(...colours) + 0.05) / (Math.min(...colours) + 0.05) < 4.5;
}).map(element => element.tagName + " " + element.textContent.trim().slice(0, 40));
"""
# Everything that is drawn, whose contrast with the page is less than 3 to 1 (success criterion 1.4.11).
FAINT = (
    PALE.split("const own")[0]
    + """
const page = light(behind(document.body));
return [...document.querySelectorAll(".line, .part, .mark, .meter rect")].filter(shape => {
  const style = getComputedStyle(shape);
  const ink = light(style.stroke === "none" ? style.fill : style.stroke);
  return (Math.max(ink, page) + 0.05) / (Math.min(ink, page) + 0.05) < 3;
}).map(shape => shape.getAttribute("class"));
"""
)


def look_at(browser, path, width=1280, scheme="light"):
    """Opens a report without a network."""
    browser.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(path.as_uri())
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", {**offline, "offline": False})


def requested(browser):
    """The addresses that the page asked for."""
    messages = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    sent = (message["params"] for message in messages if message["method"] == "Network.requestWillBeSent")
    return {params["request"]["url"] for params in sent}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The reports of a run and of two runs compared."""
    folder = tmp_path_factory.mktemp("runs")
    one = make_run(folder / "one", steps=300, layers=12)
    other = make_run(folder / "other", steps=200, layers=12, scale=0.4)
    return {"report": write_report(one), "comparison": write_report(one, compare=other)}


@pytest.mark.parametrize("page", ["report", "comparison"])
def test_it_opens_without_a_network_and_without_errors(browser, pages, page):
    look_at(browser, pages[page])
    assert requested(browser) == {pages[page].as_uri()}
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("page", "expected"), [("report", 15), ("comparison", 13)])
def test_every_chart_is_drawn(browser, pages, page, expected, width):
    look_at(browser, pages[page], WIDTHS[width])
    charts = browser.execute_script(CHARTS)
    assert len(charts) >= expected
    for chart in charts:
        assert chart["size"][0] > 200, chart
        assert chart["size"][1] >= 30, chart
        assert chart["widest"] > 2, chart
        assert max(chart["tallest"], chart["widest"]) > 20, chart
        assert chart["outside"] == 0, chart
        assert chart["collisions"] == [], chart
    captions = " ".join(chart["caption"] for chart in charts)
    for expected_caption in (
        "Time of each step",
        "Shares of the time",
        "Step time over the run",
        "Learning rate",
        "Loss scale",
        "Stages in step 104",
    ):
        assert expected_caption in captions


@pytest.mark.covering
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", ["report", "comparison"])
def test_it_can_be_read(browser, pages, page, width, scheme):
    look_at(browser, pages[page], WIDTHS[width], scheme)
    browser.execute_script("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert browser.execute_script(PALE) == []
    assert browser.execute_script(FAINT) == []
    # The page itself never scrolls sideways; wide tables do, in a frame of their own.
    across = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    wanted, there = browser.execute_script(across)
    assert wanted <= there


def test_what_is_left_out_is_marked_and_named(browser, pages):
    look_at(browser, pages["report"])
    found = browser.execute_script("""
        const figure = [...document.querySelectorAll("figure")].find(each => each.innerText.includes("Throughput"));
        const size = figure.querySelector("svg[role=img]").getBoundingClientRect();
        const marks = [...figure.querySelectorAll("svg[role=img] .mark")].map(mark => mark.getBoundingClientRect());
        return [figure.innerText, marks.map(mark => [(mark.left - size.left) / size.width, mark.height / size.height])];
    """)
    assert "steps that compiled, left out: 2 s" in found[0]
    assert "pauses by Profiler, left out: 8 s" in found[0]
    assert [round(place, 1) for place, _ in found[1]] == [0, 0.5, 1]
    assert min(height for _, height in found[1]) > 0.95


def test_the_tables_behind_the_charts_open(browser, pages):
    look_at(browser, pages["report"])
    details = browser.find_elements(By.TAG_NAME, "details")
    assert len(details) >= 12
    for one in details:
        assert not one.find_element(By.TAG_NAME, "table").is_displayed()
        one.find_element(By.TAG_NAME, "summary").click()
        assert one.find_element(By.TAG_NAME, "table").is_displayed()
        assert one.find_element(By.CSS_SELECTOR, "td.number").text


def test_parts_of_a_step_differ_without_colour(browser, pages):
    look_at(browser, pages["report"])
    drawings = browser.execute_script(
        "return [...document.querySelectorAll('pattern')].map(pattern => pattern.innerHTML.replace(/ground/g, ''))"
    )
    # Those of steps, and those of stages, which are in other charts.
    assert len(drawings) == 8
    assert (len(set(drawings[:6])), len(set(drawings[6:]))) == (6, 2)
    dashes = browser.execute_script(
        "return [0, 1, 2, 3, 4].map(index => document.querySelector('.line-' + index))"
        ".map(line => getComputedStyle(line).strokeDasharray)"
    )
    assert len(dashes) == len(set(dashes)) == 5


def test_it_prints_on_white_paper(browser, pages):
    look_at(browser, pages["report"], scheme="dark")
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": dark})
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.execute_script(PALE) == []
    printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})["data"])
    assert printed.startswith(b"%PDF")
    assert 2 <= printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page ") <= 12
