"""What tests of pages need of a browser. ``PYSPEC_PICTURES=FOLDER`` saves pictures of what they see."""

import os
import shutil
import time
from pathlib import Path

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


def browsers(test):
    missing = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium chromium-driver")
    return pytest.mark.browser(pytest.mark.slow(missing(test)))


def start():
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    assert DRIVER is not None, "chromium is here, and its driver is not: apt-get install chromium-driver"
    options = Options()
    options.binary_location = CHROMIUM
    quiet = ("--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1180,1560", *quiet):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options, Service(DRIVER))


def text(browser, name):
    return browser.execute_script("return document.getElementById(arguments[0]).textContent", name)


def picture(browser, name):
    if folder := os.environ.get("PYSPEC_PICTURES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(Path(folder) / name))


def pictures(browser, name, colours="light", height=640):
    """One picture of the page as a window and as a telephone have it, scrolled to its end."""
    if not os.environ.get("PYSPEC_PICTURES"):
        return
    scheme(browser, colours)
    shots = []
    for width in (960, 360):
        size(browser, width, height)
        time.sleep(0.3)  # for transitions
        browser.execute_script("document.getElementById('scroll').scrollTop = 1e6")
        time.sleep(0.1)
        shots.append(browser.get_screenshot_as_base64())
    here = browser.current_window_handle
    browser.switch_to.new_window("tab")
    size(browser, 1350, height + 20)
    images = "".join(f'<img src="data:image/png;base64,{shot}" style="margin:10px 0 10px 10px;float:left">' for shot in shots)
    browser.get(f'data:text/html,<body style="margin:0;overflow:hidden;background:%23888">{images}')
    picture(browser, name)
    browser.close()
    browser.switch_to.window(here)
    size(browser, 1180, 1560)
    scheme(browser, "light")


def scheme(browser, name):
    """ "light" or "dark"."""
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": name}]})


def size(browser, width: int, height: int = 780) -> None:
    """The page as a window or telephone of that size has it."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def overflow(browser):
    """What is wider than the page: there would be a bar to scroll it with."""
    return browser.execute_script(
        "const w = document.documentElement.clientWidth; if (document.documentElement.scrollWidth <= w) return [];"
        "return [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > w + 1).map(e => e.id || e.tagName)"
    )


def unnamed(browser):
    """Controls that a screen reader could not name."""
    return browser.execute_script(
        "return [...document.querySelectorAll('button, input, select, textarea, summary, [role=region], [role=img], [role=group]')]"
        ".filter(e => !(e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label') || e.getAttribute('aria-labelledby')))"
        ".map(e => e.id || e.outerHTML.slice(0, 80))"
    )


def contrasts(browser, pairs: str) -> dict[str, float]:
    """Contrast of colours of the style sheet, by pairs of their names."""
    colours = browser.execute_script(
        "const s = getComputedStyle(document.documentElement), p = document.createElement('p'); document.body.append(p);"
        "const out = Object.fromEntries(arguments[0].map(n => { p.style.color = s.getPropertyValue('--' + n); return [n, getComputedStyle(p).color]; }));"
        "p.remove(); return out;",
        pairs.replace(",", " ").split(),
    )

    def luminance(colour):
        parts = [float(v) / 255 for v in colour.strip("rgba()").split(",")[:3]]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    out = {}
    for pair in pairs.split(", "):
        low, high = sorted(luminance(colours[name]) for name in pair.split())
        out[pair] = (high + 0.05) / (low + 0.05)
    return out
