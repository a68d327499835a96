"""Makes the pictures of `guides/profiling.md`: trains on images that load slowly.

Run it as `python docs/images/make.py`; it wants Chromium with its driver, and takes a minute. Look at what it has made.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from PIL import Image
from selenium import webdriver

from keras_paragrad import GradientTelemetry, Profiler, ProfileSchedule, Throughput, write_report

HERE = Path(__file__).parent
BATCHES, EPOCHS, BATCH = 96, 4, 64
# By file: how wide, how high, in which colours, and from which part of the report on.
PICTURES = {
    "report_time": (1000, 1006, "light", None),
    "report_layers": (1000, 1090, "light", ".window .charts"),
    "report_throughput": (1000, 480, "light", "#throughput"),
    "report_gradient": (1000, 1010, "light", "#gradient"),
    "report_phone": (375, 1350, "dark", None),
}


def images():
    """Made-up images of 28 x 28 pixels, with a stripe where their class says."""
    generator = np.random.default_rng(0)
    classes = generator.integers(0, 10, BATCHES * BATCH)
    pixels = generator.normal(scale=1.5, size=(len(classes), 28, 28, 1))
    pixels[np.arange(len(classes)), 2 * classes + 4] += 0.7
    return pixels.astype("float32"), classes


def train(folder):
    """Trains with everything that there is to see it by."""

    def load(pixels):
        time.sleep(0.014)
        return pixels

    def loaded(pixels, classes):
        return tf.ensure_shape(
            tf.numpy_function(load, [pixels], tf.float32), (None, 28, 28, 1)
        ), classes

    data = tf.data.Dataset.from_tensor_slices(images()).batch(BATCH)
    data = data.map(loaded)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(8, 3, activation="relu", name="edges"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(16, 3, activation="relu", name="shapes"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu", name="mix"),
            keras.layers.Dense(10, name="classes"),
        ],
        name="fashion",
    )
    rate = keras.optimizers.schedules.CosineDecay(0.002, BATCHES * EPOCHS)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate, clipnorm=1.0), loss)
    schedule = ProfileSchedule(skip_first=250, active=20)
    callbacks = [
        GradientTelemetry(folder, every=2),
        Throughput(folder, interval=0.25),
        Profiler(folder, schedule, summary=False, report=None),
    ]
    model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)


def browser():
    """A headless Chromium."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    # Chromium refuses to start in its sandbox as root.
    for option in (
        "--headless=new",
        "--hide-scrollbars",
        "--disable-dev-shm-usage",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ):
        options.add_argument(option)
    return webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))


def main():
    """Makes all pictures, in the place of those that are there."""
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder))
        report = write_report(folder)
        chromium = browser()
        try:
            for name, (width, height, scheme, part) in PICTURES.items():
                size = {
                    "width": width,
                    "height": height,
                    "deviceScaleFactor": 1,
                    "mobile": width < 500,
                }
                chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                colours = [{"name": "prefers-color-scheme", "value": scheme}]
                chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": colours})
                chromium.get(report.as_uri())
                if part:
                    chromium.execute_script(f"document.querySelector('{part}').scrollIntoView()")
                file = HERE / f"{name}.png"
                chromium.save_screenshot(file)
                # A page has few colours; all those between them are in the edges of letters.
                Image.open(file).convert("RGB").quantize(64).save(file, optimize=True)
        finally:
            chromium.quit()


if __name__ == "__main__":
    main()
