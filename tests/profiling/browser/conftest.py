"""A headless Chromium that reaches nothing but this machine, and a TensorBoard on its loopback."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from runner import left_out

SECONDS = 90
# No name but that of this machine can be looked up: what a page wants of the internet fails at once, and everywhere.
OPTIONS = (
    "--headless=new",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--window-size=1400,1000",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)


def _installed(*names):
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(left_out.NO_BROWSER)
    return found


@pytest.fixture(scope="session")
def driver():
    """Chromium, driven by Selenium."""
    binary = _installed("chromium", "chromium-browser", "google-chrome")
    chromedriver = _installed("chromedriver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    # Chromium refuses to start in its sandbox as root, as which CI often runs.
    for option in (*OPTIONS, *(["--no-sandbox"] if os.geteuid() == 0 else [])):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(chromedriver)
    found = webdriver.Chrome(options, service)
    try:
        found.set_page_load_timeout(SECONDS)
        found.set_script_timeout(SECONDS)
        yield found
    finally:
        found.quit()
        if service.process is not None and service.process.poll() is None:
            service.process.kill()


@pytest.fixture
def browser(driver):
    """Chromium with an empty log, in its usual size and colours."""
    driver.switch_to.default_content()
    driver.get("about:blank")
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    for log in ("browser", "performance"):
        driver.get_log(log)
    return driver


@pytest.fixture(scope="module")
def tensorboard(tmp_path_factory):
    """Starts TensorBoard on a log directory, and returns its address."""
    started = []

    def start(log_dir):
        output = tmp_path_factory.mktemp("tensorboard") / "printed.txt"
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(log_dir), "--host", "127.0.0.1"]
        with output.open("w") as file:
            process = subprocess.Popen(
                [*command, "--port", "0", "--load_fast", "false"], stdout=file, stderr=subprocess.STDOUT
            )
        started.append(process)
        deadline = time.monotonic() + SECONDS
        while not (address := re.search(r"http://127\.0\.0\.1:\d+/", output.read_text())):
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, "TensorBoard didn't start in time"
            time.sleep(0.1)
        return address[0]

    yield start
    for process in started:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
