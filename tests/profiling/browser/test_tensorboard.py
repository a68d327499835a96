"""TensorBoard in a real browser shows what our callbacks wrote: the windows, their step times, and the scalars."""

import re

import keras
import numpy as np
import pytest
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException, TimeoutException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from keras_paragrad.profiling.schedule import ProfileSchedule
from keras_paragrad.profiling.telemetry import GradientTelemetry
from keras_paragrad.profiling.throughput import Throughput
from keras_paragrad.profiling.tracer import Profiler

SECONDS = 60
NO_STEPS = "No step marker"


def fit(callbacks, jit_compile=False):
    """Forty steps of a small model."""
    layers = [keras.layers.Dense(64, activation="relu", name="first"), keras.layers.Dense(1, name="second")]
    model = keras.Sequential([keras.Input((32,)), *layers])
    model.compile("adam", "mse", jit_compile=jit_compile)
    x = np.random.default_rng(0).normal(size=(640, 32)).astype("float32")
    model.fit(x, x[:, :1], batch_size=16, verbose=0, callbacks=callbacks)


def profiler(log_dir):
    return Profiler(str(log_dir), schedule=ProfileSchedule(skip_first=10, active=10), summary=False)


def wait_for(browser, found, what):
    """What `found` returns as soon as it is something; pages build themselves up as they please."""
    ignored = (NoSuchElementException, StaleElementReferenceException)
    try:
        return WebDriverWait(browser, SECONDS, 0.2, ignored).until(lambda _: found())
    except TimeoutException:
        text = browser.find_element(By.TAG_NAME, "body").text
        pytest.fail(f"{what} didn't appear in {SECONDS} s, but:\n{text[:3000]}")


def profile_page(browser, address):
    """The text of the Profile tab's overview, once it has its figures."""
    browser.get(f"{address}#profile")
    frame = wait_for(browser, lambda: browser.find_element(By.TAG_NAME, "iframe"), "The Profile tab")
    browser.switch_to.frame(frame)

    def text():
        found = browser.find_element(By.TAG_NAME, "body").text
        return found if "Host Compute Time" in found and "Run Environment" in found else ""

    return wait_for(browser, text, "The overview")


def times(text):
    """The figures of the performance summary, in milliseconds."""
    found = re.findall(r"^([A-Z][\w ]+ Time)\n(?:\(.*\)\n)?([\d.]+) ms$", text, flags=re.MULTILINE)
    assert len(found) >= 5, text
    return {name: float(milliseconds) for name, milliseconds in found}


@pytest.fixture(scope="module")
def address(tensorboard, tmp_path_factory):
    """The address of a TensorBoard on two trainings, one with scalars, too, which takes seconds to start."""
    logs = tmp_path_factory.mktemp("logs")
    scalars = [GradientTelemetry(logs / "scalars", every=1), Throughput(logs / "scalars")]
    fit([profiler(logs / "one")])
    fit([profiler(logs / "other"), *scalars])
    return tensorboard(logs)


@pytest.mark.long
def test_every_window_is_listed_and_the_overview_has_step_times(browser, address):
    assert_windows(browser, address)


@pytest.mark.long
def test_every_window_of_compiled_steps_is_listed(browser, tensorboard, tmp_path):
    for name in ("one", "other"):
        fit([profiler(tmp_path / "logs" / name)], jit_compile=True)
    assert_windows(browser, tensorboard(tmp_path / "logs"))


def assert_windows(browser, address):
    text = profile_page(browser, address)
    assert re.search(r"Sessions \(2\)\s+(one|other)/\d{4}_\d\d_\d\d", text)
    assert NO_STEPS not in text
    found = times(text)
    assert sum(found.values()) > 0.1
    assert found["Host Compute Time"] > 0


@pytest.mark.long
def test_the_overview_of_kerass_callback_has_none(browser, tensorboard, tmp_path):
    """What the test above would see if there were no step markers."""
    fit([keras.callbacks.TensorBoard(tmp_path / "logs", profile_batch=(10, 20))])
    text = profile_page(browser, tensorboard(tmp_path / "logs"))
    assert NO_STEPS in text
    assert sum(times(text).values()) == 0


# In `make test`, test_files.py and test_throughput.py read them as TensorBoard does.
@pytest.mark.long
def test_our_scalars_are_on_their_tab(browser, address):
    cards = ("telemetry/gradient_norm", "telemetry/learning_rate", "throughput/examples_per_second")
    # Without a filter, groups of cards are folded up; and cards that can't be seen are not drawn.
    browser.get(f"{address}?tagFilter={'|'.join(cards)}#timeseries")

    def text():
        found = browser.find_element(By.TAG_NAME, "body").text
        return found if all(card.replace("/", "\n/") in found for card in cards) else ""

    wait_for(browser, text, f"A card for each of {', '.join(cards)}")
    lines = wait_for(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "line-chart"), "A chart")
    assert len(lines) == len(cards)
    assert all(line.size["width"] > 100 and line.size["height"] > 50 for line in lines)
