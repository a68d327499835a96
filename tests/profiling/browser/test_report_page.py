"""The report in a real browser: nothing is fetched, every chart is there, and it can be read everywhere."""

import base64
import json

import pytest
from sample_models.log_directories import TELEMETRY, make_run, write_rows
from selenium.webdriver import ActionChains, Keys
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
def page(tmp_path_factory):
    """The report of a run."""
    return write_report(make_run(tmp_path_factory.mktemp("run"), steps=300, layers=12))


def test_it_opens_without_a_network_and_without_errors(browser, page):
    look_at(browser, page)
    assert requested(browser) == {page.as_uri()}
    assert browser.get_log("browser") == []


def test_it_says_what_was_measured(browser, page):
    look_at(browser, page)
    browser.execute_script("document.querySelectorAll('details').forEach(details => details.open = true)")
    words = " ".join(browser.find_element(By.TAG_NAME, "body").text.split())
    for expected in (
        "Step time, median 10 ms Step time, 95th percentile 30 ms Waiting for input 50%",
        "Time to the first step 1.5 s FLOPs per step 3 GFLOP Retraces 1",
        "prefetch(tf.data.AUTOTUNE). Because: 50% of the step waits for input",
        "digits/dense/MatMul 1.5 ms 60% 40 MatMul dense",
        "<b>loss</b> & more 125 µs 5.0% 20 Sum –",
        "block_with_a_long_name/multi_head_attention_1 1.5 ms 500 µs 800 µs 200 µs – 52%",
        "3 other kinds 2.7 ms 12% 120",
        "Collectives take 2 ms per batch. 25% of this time is hidden",
        "allocator GPU_0_bfc 1 MiB (batch 100) 4.5 MiB 8 MiB (batch 100.8) 8 MiB",
        "host 3 GiB",
        "Stages wait 40% of the time between their first and last operation",
        "learning rate 3.33e-6 (update 299) 6.64e-6 0.001 (update 0) 3.33e-6",
    ):
        assert expected in words, expected
    labels = browser.execute_script(
        "return [...document.querySelectorAll('figure svg[role=img]')].map(plot => plot.getAttribute('aria-label'))"
    )
    assert len(labels) == len(browser.find_elements(By.TAG_NAME, "figure"))
    assert any("Median 10 ms, 95th percentile 30 ms" in label for label in labels)
    assert any("after clipping: smallest 1 (update 0)" in label for label in labels)


AXES = [
    # The unit, the values, and the marks of their axis.
    ("number", [0.2, 3.7], ["0", "1", "2", "3", "4"]),
    ("number", [-3, 0.5], ["-3", "-2", "-1", "0", "1"]),
    ("number", [0.001, 20], ["0.001", "0.01", "0.1", "1", "10", "100"]),
    ("number", [1e-12, 0, 1], ["1e-12", "1e-10", "1e-8", "1e-6", "0.0001", "0.01", "1"]),
    ("number", ["NaN", "∞"], ["0", "0.25", "0.5", "0.75", "1"]),
    ("B", [1.3 * 2**30], ["0", "512 MiB", "1 GiB", "1.5 GiB"]),
    ("count", [0, 1], ["0", "1"]),
    ("share", [0.012, 0.34], ["0%", "10%", "20%", "30%", "40%"]),
    ("ms", [0.0007], ["0", "0.2 µs", "0.4 µs", "0.6 µs", "0.8 µs"]),
]
NUMBERS = {
    "ms": {0: "0", 0.0004: "0.4 µs", 0.25: "250 µs", 12345: "12.3 s", 61000: "61 s", 0.9996: "1,000 µs"},
    "B": {1023: "1,023 B", 3 * 2**30: "3 GiB"},
    "share": {0: "0%", 0.573: "57%", 0.0123: "1.2%"},
    "number": {999.6: "1,000", 12345: "12,345", 0.00001234: "1.23e-5", 0.5: "0.5", 2.5e9: "2.5e+9"},
    "FLOP": {2.5e9: "2.5 GFLOP"},
    "count": {1234: "1,234", 100.875: "100.8"},
}


def test_axes_and_numbers(browser, page, tmp_path):
    heads = [["unit", ""], *([unit, unit] for unit in NUMBERS)]
    columns = [list(values.items()) for values in NUMBERS.values()]
    rows = [["", *(column[index % len(column)][0] for column in columns)] for index in range(6)]
    blocks = [{"type": "table", "caption": "numbers", "heads": heads, "rows": rows, "class": ""}]
    for unit, values, _ in AXES:
        line = {"name": "a", "steps": [7 * step for step in range(len(values))], "values": values, "last": values[-1]}
        chart = {"type": "lines", "title": unit, "unit": unit, "counted": "update", "logarithmic": unit == "number"}
        blocks.append({**chart, "lines": [line], "marks": [], "notes": []})
    made = {"title": "", "subtitle": "", "headlines": [], "notes": [], "sections": [{"title": "", "blocks": blocks}]}
    html = page.read_text("utf-8")
    begin = html.index('"application/json">') + len('"application/json">')
    (tmp_path / "made.html").write_text(
        html[:begin] + json.dumps(made) + html[html.index("</script>", begin) :], "utf-8"
    )
    look_at(browser, tmp_path / "made.html")
    assert browser.get_log("browser") == []
    plots = browser.find_elements(By.CLASS_NAME, "plot")
    assert [heights_of(plot) for plot in plots] == [marks for _, _, marks in AXES]
    # Steps are whole, whatever their range is.
    assert [shown_by(plot)[1] for plot in plots[3:6]] == [["0", "5", "10"], ["0", "2", "4", "6"], ["0"]]
    written = (
        "return [...document.querySelectorAll('tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    expected = [[column[index % len(column)][1] for column in columns] for index in range(6)]
    assert [row[1:] for row in browser.execute_script(written)[:6]] == expected


@pytest.mark.parametrize("width", WIDTHS)
def test_every_chart_is_drawn(browser, page, width):
    look_at(browser, page, WIDTHS[width])
    charts = browser.execute_script(CHARTS)
    assert len(charts) >= 15
    for chart in charts:
        assert chart["size"][0] > 200, chart
        assert chart["size"][1] >= 30, chart
        assert chart["widest"] > 2, chart
        assert max(chart["tallest"], chart["widest"]) > 20, chart
        assert chart["outside"] == 0, chart
        assert chart["collisions"] == [], chart
    captions = " ".join(chart["caption"] for chart in charts)
    for expected_caption in (
        "Time of each batch",
        "Shares of the time",
        "Step time over the run",
        "Learning rate",
        "Loss scale",
        "Memory in use in the window",
    ):
        assert expected_caption in captions


@pytest.mark.covering
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_can_be_read(browser, page, width, scheme):
    look_at(browser, page, WIDTHS[width], scheme)
    browser.execute_script("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert browser.execute_script(PALE) == []
    assert browser.execute_script(FAINT) == []
    # The page itself never scrolls sideways; wide tables do, in a frame of their own.
    across = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    wanted, there = browser.execute_script(across)
    assert wanted <= there


def test_what_is_left_out_is_marked_and_named(browser, page):
    look_at(browser, page)
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


def test_the_tables_behind_the_charts_open(browser, page):
    look_at(browser, page)
    details = browser.find_elements(By.TAG_NAME, "details")
    assert len(details) >= 12
    for one in details:
        assert not one.find_element(By.TAG_NAME, "table").is_displayed()
        one.find_element(By.TAG_NAME, "summary").click()
        assert one.find_element(By.TAG_NAME, "table").is_displayed()
        assert one.find_element(By.CSS_SELECTOR, "td.number").text


def test_parts_of_a_step_differ_without_colour(browser, page):
    look_at(browser, page)
    drawings = browser.execute_script(
        "return [...document.querySelectorAll('pattern')].map(pattern => pattern.innerHTML.replace(/ground/g, ''))"
    )
    # Those of batches, and those of passes, which are in other charts.
    assert len(drawings) == 10
    assert (len(set(drawings[:6])), len(set(drawings[6:]))) == (6, 4)
    dashes = browser.execute_script(
        "return [0, 1, 2, 3, 4].map(index => document.querySelector('.line-' + index))"
        ".map(line => getComputedStyle(line).strokeDasharray)"
    )
    assert len(dashes) == len(set(dashes)) == 5


def test_it_prints_on_white_paper(browser, page):
    look_at(browser, page, scheme="dark")
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": dark})
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.execute_script(PALE) == []


def test_it_prints_on_four_pages(browser, page):
    look_at(browser, page)
    # Letter and A4, in inches.
    for width, height in ((8.5, 11), (8.27, 11.69)):
        paper = {"printBackground": False, "paperWidth": width, "paperHeight": height}
        printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", paper)["data"])
        assert printed.startswith(b"%PDF")
        assert 2 <= printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page ") <= 4
        assert len(printed) < 8e6


def plot_of(browser, caption):
    """The plot of a chart, in the middle of the window."""
    return browser.execute_script(
        "const wanted = figure => figure.querySelector('figcaption').textContent.includes(arguments[0]);"
        "const figure = [...document.querySelectorAll('figure')].find(wanted);"
        "figure.scrollIntoView({block: 'center', behavior: 'instant'}); return figure.querySelector('.plot')",
        caption,
    )


def shown_by(plot):
    """What a chart says of the place that is pointed at, and what is written below it."""
    return plot.parent.execute_script(
        "const plot = arguments[0], seen = element => element.getBoundingClientRect().width > 0;"
        "const below = tick => seen(tick) && tick.getAttribute('dy') === '1.5em';"
        "return [[...plot.parentElement.querySelectorAll('.tip span')].filter(seen).map(line => line.textContent),"
        " [...plot.querySelectorAll('.tick')].filter(below).map(tick => tick.textContent)]",
        plot,
    )


def drag(browser, plot, begin, end, low=0.5, high=0.5):
    """Drags from one place of a plot to another, as parts of its width and of its height from the bottom."""
    width, height = plot.rect["width"], plot.rect["height"]
    start = round((begin - 0.5) * width), round((0.5 - low) * height)
    mouse = ActionChains(browser, 20).move_to_element_with_offset(plot, *start)
    mouse.click_and_hold().move_by_offset(
        round((end - begin) * width), round((low - high) * height)
    ).release().perform()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_values_are_shown_at_the_pointer(browser, page, scheme):
    look_at(browser, page, scheme=scheme)
    lines = plot_of(browser, "Gradient of the whole model")
    ActionChains(browser, 20).move_to_element(lines).perform()
    words, _ = shown_by(lines)
    step = int(words[0].removeprefix("update "))
    assert 147 <= step <= 152
    assert words[1:] == [f"before clipping: {step + 2}", "after clipping: 1"]
    assert browser.execute_script(PALE) == []
    ActionChains(browser, 20).move_to_element(steps := plot_of(browser, "Time of each batch")).perform()
    assert shown_by(lines)[0] == []
    assert {"update: 27", "time: 10 ms", "waiting for input: 5 ms", "idle: 500 µs"} <= set(shown_by(steps)[0])
    layers = plot_of(browser, "Time per batch by layer")
    ActionChains(browser, 20).move_to_element(layers.find_element(By.CLASS_NAME, "recompute")).perform()
    assert shown_by(layers)[0] == ["block_with_a_long_name/multi_head_attention_1, recompute: 200 µs"]
    memory = plot_of(browser, "Memory in use")
    ActionChains(browser, 20).move_to_element_with_offset(memory, 2 - memory.rect["width"] // 2, 0).perform()
    assert shown_by(memory)[0] == ["batch 100.1", "allocator GPU_0_bfc: 2 MiB"]


def test_values_are_shown_by_the_keyboard(browser, page, tmp_path):
    look_at(browser, page)
    plot = plot_of(browser, "Time of each batch")
    browser.execute_script("arguments[0].focus()", plot)
    assert shown_by(plot)[0][0] == "batch: 100"
    for keys, step in ((Keys.ARROW_RIGHT * 2, 102), (Keys.END, 119), (Keys.ARROW_LEFT, 118), (Keys.HOME, 100)):
        plot.send_keys(keys)
        assert shown_by(plot)[0][0] == f"batch: {step}"
    browser.execute_script("arguments[0].blur()", plot)
    assert shown_by(plot)[0] == []
    # A line without a value at a step says of which it is.
    rows = [(step, 0, "", "", "gradient_norm", 10.0 * step) for step in range(9)]
    clipped = [(step, 0, "", "", "clipped_gradient_norm", 1.0) for step in (0, 8)]
    write_rows(tmp_path / "telemetry.csv", TELEMETRY, rows + clipped)
    look_at(browser, write_report(tmp_path))
    plot = plot_of(browser, "Gradient of the whole model")
    plot.send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert shown_by(plot)[0] == ["update 2", "before clipping: 20", "after clipping: 1 (update 0)"]


def test_dragging_zooms_and_a_double_click_shows_all(browser, page):
    look_at(browser, page)
    plot = plot_of(browser, "Gradient of the whole model")
    before = shown_by(plot)[1]
    drag(browser, plot, 1 / 3, 2 / 3)
    first, last = (int(name) for name in shown_by(plot)[1])
    assert 97 <= first <= 101 and 197 <= last <= 202
    # The range fills the chart: the point in the middle is where its step is.
    ActionChains(browser, 20).move_to_element(plot).perform()
    assert abs(int(shown_by(plot)[0][0].removeprefix("update ")) - (first + last) / 2) <= 1
    drawn = "const [line, plot] = ['.line', '.view'].map(name => arguments[0].querySelector(name));"
    scale = browser.execute_script(
        drawn + "return line.getBoundingClientRect().width / plot.parentElement.clientWidth", plot
    )
    assert scale == pytest.approx(299 / (last - first), rel=0.02)
    assert browser.execute_script(drawn + "return getComputedStyle(plot).overflow", plot) == "hidden"
    plot.find_element(By.XPATH, "..").find_element(By.TAG_NAME, "button").click()
    assert shown_by(plot)[1] == before
    drag(browser, plot, 0.6, 0.2)
    assert shown_by(plot)[1] != before
    ActionChains(browser, 20).double_click(plot).perform()
    assert shown_by(plot)[1] == before
    steps = plot_of(browser, "Time of each batch")
    drag(browser, steps, 0.52, 0.63)
    assert shown_by(steps)[1] == ["110", "111", "112"]
    steps.send_keys(Keys.ESCAPE, Keys.END, "+")
    (first, *_), ticks = shown_by(steps)
    assert len(ticks) == 2 and ticks[-1] == first.removeprefix("batch: ") == "119"
    layers = plot_of(browser, "Time per batch by layer")
    drag(browser, layers, 0.25, 0.5)
    low, high = (float(name.split()[0]) * (1e-3 if name.endswith("µs") else 1) for name in shown_by(layers)[1])
    assert high == pytest.approx(2 * low, rel=0.05)


def heights_of(plot):
    """The labels of a plot's axis of values, from the bottom."""
    ticks = "[...arguments[0].querySelectorAll('.tick')].filter(tick => tick.getAttribute('text-anchor') === 'end')"
    shown = f"{ticks}.filter(tick => tick.getAttribute('x') === '-8' && tick.getBoundingClientRect().width > 0)"
    return plot.parent.execute_script(
        f"return {shown}.sort((a, b) => b.getBoundingClientRect().top - a.getBoundingClientRect().top)"
        ".map(tick => tick.textContent)",
        plot,
    )


def test_dragging_up_zooms_the_values(browser, page):
    look_at(browser, page)
    steps = plot_of(browser, "Time of each batch")
    before, across = heights_of(steps), shown_by(steps)[1]
    top = float(before[-1].removesuffix(" ms"))
    drag(browser, steps, 0.5, 0.5, low=0.25, high=0.75)
    named = [float(name.removesuffix(" ms")) for name in heights_of(steps)]
    assert named == pytest.approx([top / 4, top / 2, 3 * top / 4], rel=0.03)
    assert shown_by(steps)[1] == across
    scale = browser.execute_script(
        "const [content, plot] = ['.content', '.view'].map(name => arguments[0].querySelector(name));"
        "return parseFloat(content.getAttribute('height')) / 100",
        steps,
    )
    assert scale == pytest.approx(2, rel=0.03)
    # A box zooms both, again from what is in sight.
    drag(browser, steps, 0.2, 0.6, low=0.8, high=0.3)
    assert shown_by(steps)[1] != across and heights_of(steps) != before
    steps.send_keys(Keys.ESCAPE)
    assert (heights_of(steps), shown_by(steps)[1]) == (before, across)
    # Values that are small fill the chart if they are fitted.
    rate = plot_of(browser, "Learning rate")
    whole = heights_of(rate)
    drag(browser, rate, 0.5, 0.9)
    assert heights_of(rate) == whole
    rate.send_keys("f")
    assert float(heights_of(rate)[-1]) < 1e-5 < float(whole[-1])
    # On a logarithmic axis, the middle is the geometric mean of the ends.
    norms = plot_of(browser, "Gradient by layer")
    drag(browser, norms, 0.5, 0.5, low=0.2, high=0.7)
    low, middle, high = map(float, heights_of(norms))
    assert middle == pytest.approx((low * high) ** 0.5, rel=0.02)
    # Lanes have no values upward.
    layers = plot_of(browser, "Time per batch by layer")
    lanes = shown_by(layers)[1]
    drag(browser, layers, 0.5, 0.5, low=0.1, high=0.9)
    assert shown_by(layers)[1] == lanes


def test_a_finger_scrolls_over_charts(browser, page):
    look_at(browser, page, WIDTHS["phone"])
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    plot = plot_of(browser, "Learning rate")
    middle = browser.execute_script(
        "const box = arguments[0].getBoundingClientRect(); return [box.left + box.width / 2, box.top + box.height / 2]",
        plot,
    )

    def swipe(across, down):
        before = browser.execute_script("return scrollY")
        for step in range(11):
            point = {"x": middle[0] + across * step / 10, "y": middle[1] + down * step / 10}
            kind = "touchMove" if step else "touchStart"
            browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [point]})
        browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        return browser.execute_script("return scrollY") - before

    try:
        assert swipe(80, 0) == 0
        assert len(shown_by(plot)[1]) == 2
        assert swipe(0, -150) > 100
    finally:
        browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_without_its_script_it_says_so(browser, page):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        look_at(browser, page)
        assert "A script in this file draws it" in browser.find_element(By.TAG_NAME, "main").text
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
