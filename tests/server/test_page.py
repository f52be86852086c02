"""The page of speculation in Debian's chromium: what it shows is what the server counts, it works by keyboard, and pages load nothing from elsewhere."""

import hashlib
import json
import re
import threading
from pathlib import Path

import pytest
from server.browsing import browsers, contrasts, overflow, picture, scheme, text, unnamed
from server.running import Running, serving, wait_for

from pyggml_spec.server import page as page_module

pytestmark = pytest.mark.slow
FOLDER = Path(page_module.__file__).parent


def test_pages_are_small_and_our_own(server):
    """No framework, nothing from elsewhere, no script or style that the policy would have to allow."""
    texts = {path.name: path.read_text("utf-8") for path in FOLDER.iterdir() if path.suffix in (".html", ".js", ".css")}
    assert sum(map(len, texts.values())) < 110_000
    for name, text in texts.items():
        assert not re.search(r"(?:src|href|url|import|fetch)\s*[=(]\s*[\"'`]?(?:https?:)?//", text), name
        assert not re.search(r"<script>|<style|\son\w+=|style=|innerHTML|eval\(", text), name
    for path in ("/", "/speculation"):
        response = server.http.get(path)
        assert "default-src 'self'" in response.headers["content-security-policy"] and response.headers["content-type"].startswith(
            "text/html"
        )
        for found in re.findall(r'(?:src|href)="(page/[^"]+)"', response.text):
            assert server.http.get("/" + found).text == (FOLDER.parent / found).read_text("utf-8")


def test_libraries_are_as_they_came():
    """With the licence of each; `scripts/vendor_page.py` writes the list."""
    vendor = FOLDER / "vendor"
    sources = json.loads((vendor / "sources.json").read_text("utf-8"))
    listed = {name: digest for source in sources for name, digest in source["sha256"].items()}
    there = {
        path.relative_to(vendor).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in vendor.rglob("*.*")
        if path.name != "sources.json"
    }
    assert there == listed and [source["licence"] for source in sources] == ["MIT", "Apache-2.0", "BSD-3-Clause"]
    languages = re.search(r"const LANGUAGES = new Set\(\[(.*?)\]", (FOLDER / "markdown.js").read_text("utf-8"), re.DOTALL)[1]
    assert {f"languages/{name}.js" for name in re.findall(r'"(\w+)"', languages)} == {
        name for name in there if name.startswith("languages/")
    }


server = serving("--slots", 4, "--draft-width", 8)


def idle(browser):
    return not browser.execute_script("return document.getElementById('go').disabled")


def ended(browser):
    wait_for(lambda: idle(browser) and re.match(r"\d+ tokens in \d+ steps, ", text(browser, "status")))


def generated(browser, tokens=120):
    browser.execute_script("document.getElementById('tokens').value = arguments[0]", str(tokens))
    browser.find_element("id", "go").click()
    ended(browser)


@browsers
def test_what_it_shows_is_what_the_server_counts(server, browser):
    browser.get(server.url + "/speculation")
    wait_for(lambda: "drafter.gguf" in text(browser, "model"))
    generated(browser)
    asked = {"prompt": "def quicksort(items):\n", "max_tokens": 120, "temperature": 0, "seed": 1}
    told = server.ok("/v1/completions", **asked)
    shown = browser.execute_script("return [...document.getElementById('answer').children].map(e => [e.className, e.textContent])")
    kept = "".join(piece for kind, piece in shown if kind != "rejected")
    assert kept == told["choices"][0]["text"] and {kind for kind, _ in shown} == {"accepted", "rejected", "own"}
    taken, made = map(int, re.match(r"(\d+) of (\d+)", text(browser, "f-accepted")).groups())
    cells = "return [...document.querySelectorAll('#positions tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    rows = browser.execute_script(cells)
    assert sum(int(row[1]) for row in rows) == taken and sum(int(row[2]) for row in rows) == made
    bars = [len(browser.find_elements("css selector", f"#bars .{kind}")) for kind in ("tokens", "width")]
    steps = int(text(browser, "f-steps"))
    assert bars == [steps, steps] and steps + taken + 1 == 120 == int(text(browser, "f-tokens"))
    for name, words in {"f-speed": "tokens per second", "f-plain": "tokens per second", "f-gain": "times", "f-reason": "steps"}.items():
        assert words in text(browser, name)
    picture(browser, "page-generate.png")


@browsers
def test_it_is_read_without_colour_and_used_by_keyboard(server, browser):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser.get(server.url + "/speculation")
    generated(browser, 60)
    looks = browser.execute_script(
        "return ['accepted', 'own', 'rejected'].map(k => getComputedStyle(document.querySelector('#answer .' + k)).textDecorationLine)"
    )
    assert len(set(looks)) == 3, looks
    assert browser.execute_script("return document.querySelector('#answer .rejected').tagName") == "DEL"
    browser.find_element("id", "show-rejected").click()
    assert not browser.find_element("css selector", "#answer .rejected").is_displayed()
    browser.execute_script("document.getElementById('status').textContent = ''")
    browser.find_element("id", "prompt").click()
    ActionChains(browser).send_keys("# more\n").key_down(Keys.CONTROL).send_keys(Keys.ENTER).key_up(Keys.CONTROL).perform()
    ended(browser)
    assert unnamed(browser) == [] and browser.execute_script("return document.documentElement.lang") == "en"
    browser.find_element("id", "tab-generate").send_keys(Keys.ARROW_RIGHT)
    assert browser.switch_to.active_element.get_attribute("id") == "tab-slots"


@browsers
def test_stop_ends_the_request(server, browser):
    browser.get(server.url + "/speculation")
    browser.execute_script("document.getElementById('tokens').value = 2000; document.getElementById('temperature').value = 1")
    browser.find_element("id", "go").click()
    wait_for(lambda: "steps" in text(browser, "status"))
    browser.find_element("id", "stop").click()
    wait_for(lambda: text(browser, "status") == "stopped")
    assert server.slots_are_free()


def busy(server):
    """Four sequences that decode for a while; the thread that waits for them."""
    asked = {"prompt": "class Queue:\n", "n_predict": 400, "ignore_eos": True, "temperature": 1, "n": 4}
    sender = threading.Thread(target=lambda: server.post("/completion", **asked))
    sender.start()
    return sender


@browsers
def test_the_slots_move(server, browser):
    browser.get(server.url + "/speculation")
    browser.find_element("id", "tab-slots").click()
    wait_for(lambda: len(browser.find_elements("css selector", "#slots tbody tr")) == 4)
    sender = busy(server)
    decoding = "return [...document.querySelectorAll('#slots tbody tr')].filter(r => r.cells[1].textContent === 'decode' && +r.cells[4].textContent > 20).length"
    wait_for(lambda: browser.execute_script(decoding) == 4 and float(text(browser, "s-speed").replace(",", "")) > 0)
    browser.set_window_size(1180, 500)
    picture(browser, "page-slots.png")
    sender.join()
    wait_for(lambda: browser.execute_script(decoding) == 0)


@browsers
def test_dark_and_light_have_contrast(server, browser):
    for name in ("light", "dark"):
        scheme(browser, name)
        browser.get(server.url + "/speculation")
        for pair, contrast in contrasts(browser, "ink panel, ink back, soft panel, good good-back, bad panel, back accent").items():
            assert contrast >= 4.5, (name, pair, contrast)
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.fixture
def plain():
    with Running("--spec-type", "none") as running:
        yield running


def count_requests(browser):
    browser.execute_script(
        "const real = fetch; window.asked = []; window.fetch = (url, ...more) => { asked.push(url); return real(url, ...more); }"
    )


def asked(browser):
    return browser.execute_script("return asked.filter(url => url.includes('completions')).length")


@browsers
def test_where_nothing_drafts_one_run_is_enough(plain, browser):
    """The same text was computed twice to compare plain decoding with itself."""
    browser.get(plain.url + "/speculation")
    wait_for(lambda: "nothing drafts: plain decoding" in text(browser, "model"))
    assert not browser.find_element("id", "compare").is_displayed() and not browser.find_element("id", "legend").is_displayed()
    count_requests(browser)
    generated(browser, 20)
    assert asked(browser) == 1 and "nothing was drafted" in text(browser, "f-plain") and text(browser, "f-gain") == "-"
    picture(browser, "page-plain.png")


@browsers
def test_a_run_without_drafts_is_not_compared_with_itself(server, browser):
    browser.get(server.url + "/speculation")
    wait_for(lambda: "drafter.gguf" in text(browser, "model"))
    count_requests(browser)
    browser.find_element("id", "speculative").click()
    generated(browser, 20)
    assert asked(browser) == 1
    browser.find_element("id", "speculative").click()
    generated(browser, 20)
    wait_for(lambda: "times" in text(browser, "f-gain"))
    assert asked(browser) == 3


@browsers
def test_the_header_names_n_gram_drafting(browser):
    """It said `no drafter: plain decoding`."""
    with Running("--spec-type", "suffix") as running:
        browser.get(running.url + "/speculation")
        wait_for(lambda: "n-gram drafting (suffix)" in text(browser, "model"))
        assert "plain decoding" not in text(browser, "model") and browser.find_element("id", "compare").is_displayed()


@browsers
def test_errors_look_like_errors(server, browser, sized):
    """They stood where figures stand, in the same letters."""
    browser.get(server.url + "/speculation")
    wait_for(lambda: "drafter.gguf" in text(browser, "model"))
    look = "const s = getComputedStyle(document.getElementById(arguments[0])); return [s.color, s.fontWeight]"
    calm = browser.execute_script(look, "status")
    browser.execute_script("document.getElementById('prompt').value = 'word '.repeat(3000); document.getElementById('tokens').value = 20")
    browser.find_element("id", "go").click()
    wait_for(lambda: "exceeds the available context" in text(browser, "status"))
    assert browser.execute_script(look, "status") != calm and browser.find_element("id", "status").get_attribute("class") == "error"
    for width, name in ((1180, "page-error.png"), (360, "page-error-360.png")):
        sized(width)
        assert overflow(browser) == []
        picture(browser, name)
    sized(1180, 1560)
    browser.execute_script("document.getElementById('prompt').value = 'a'")
    generated(browser, 5)
    assert browser.execute_script(look, "status") == calm
    browser.execute_script("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    browser.find_element("id", "go").click()
    wait_for(lambda: "the server cannot be reached" in text(browser, "status"))
    browser.find_element("id", "tab-slots").click()
    wait_for(lambda: "the server cannot be reached" in text(browser, "s-speed"))
    assert browser.find_element("id", "s-speed").get_attribute("class") == "error"


@browsers
def test_it_is_as_wide_as_a_telephone(server, browser, sized):
    """At 360 px nothing has to be scrolled sideways, before a text, behind it, and in the view of the slots."""
    sized(360)
    browser.get(server.url + "/speculation")
    wait_for(lambda: "drafter.gguf" in text(browser, "model"))
    assert browser.execute_script("return innerWidth") == 360 and overflow(browser) == []
    generated(browser, 60)
    wait_for(lambda: "times" in text(browser, "f-gain"))
    assert overflow(browser) == []
    wider = "return [...document.querySelectorAll('section, form, table')].filter(e => e.scrollWidth > e.clientWidth + 1 && e.offsetParent).map(e => e.id || e.tagName)"
    assert browser.execute_script(wider) == []
    picture(browser, "page-360.png")
    browser.find_element("id", "tab-slots").click()
    wait_for(lambda: len(browser.find_elements("css selector", "#slots tbody tr")) == 4)
    sender = busy(server)
    wait_for(lambda: "decode" in text(browser, "slots"))
    assert overflow(browser) == [] and browser.execute_script(wider) == []
    picture(browser, "page-slots-360.png")
    browser.get("about:blank")  # which ends the stream of the slots
    sender.join()
