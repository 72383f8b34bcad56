"""The pages in a real browser, over the rows of a real run: console, accessibility, keyboard, and pictures to look at.

Pictures are written to the folder that POLAR_TEST_SCREENSHOTS names, else to pytest's own. Accessibility is judged by
axe-core, which npm brings.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from polar.cli.dashboard import login_link
from polar.embedded import free_port
from tests.e2e.up import Up, example, shell, start

pytestmark = pytest.mark.e2e
selenium = pytest.importorskip("selenium", reason="selenium is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")
SERIOUS = ("serious", "critical")
AXE = "axe-core@4.14.1"


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed, and axe-core comes from there")
    folder = tmp_path_factory.mktemp("axe")
    done = subprocess.run([npm, "install", "--silent", "--prefix", str(folder), AXE], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"npm could not fetch {AXE}: {done.stderr[-200:]}")
    return (folder / "node_modules/axe-core/axe.min.js").read_text()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """All of Polar, with a real run of three tasks: one on the tiny model, one that fails, and one cancelled."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("Chromium and its driver are not installed: apt-get install chromium chromium-driver")
    running = start(tmp_path_factory.mktemp("pages") / "home", free_port(), free_port())
    running.run(example("tool_lookup", task_id="lookup", num_samples=4, metadata={"group_id": "step-1"}))
    running.run(shell("echo no call is made; exit 3", task_id="broken", lanes=["gpu0"]))
    running.submit(shell("sleep 900", task_id="waiting", num_samples=6, timeout_seconds=900))
    yield running
    running.http.delete("/rollout/task/waiting")
    running.process.send_signal(2)
    running.process.wait(40)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A fresh profile, headless."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("Chromium and its driver are not installed: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    with tempfile.TemporaryDirectory() as profile:
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
        for flag in (*flags, "--hide-scrollbars", "--disable-dev-shm-usage", f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        yield driver
        driver.quit()


@pytest.fixture(scope="module")
def pages(up: Up, chromium: Any) -> dict[str, str]:
    """Every page by name, with the browser logged in by the link that `polar dashboard` prints."""
    url = f"http://127.0.0.1:{up.port}"
    chromium.get(login_link(url, up.http.headers["X-API-Key"]))
    assert chromium.current_url == f"{url}/admin/"
    sessions = [each["session_id"] for each in up.http.get("/tasks/lookup/sessions").json()["sessions"]]
    broken = up.http.get("/tasks/broken/sessions").json()["sessions"][0]["session_id"]
    waiting = up.http.get("/tasks/waiting/sessions").json()["sessions"][0]["session_id"]
    calls = up.http.get(f"/rollout/session/{sessions[0]}/completions").json()["completions"]
    paths = {
        "overview": "/admin/",
        "tasks": "/admin/tasks",
        "task": "/admin/tasks/lookup",
        "task-open": "/admin/tasks/waiting",
        "spec": "/admin/tasks/lookup/spec",
        "sessions": "/admin/sessions",
        "session": f"/admin/sessions/{sessions[0]}",
        "session-failed": f"/admin/sessions/{broken}",
        "session-open": f"/admin/sessions/{waiting}",
        "tokens": f"/admin/sessions/{sessions[0]}/traces/0",
        "tokens-logprob": f"/admin/sessions/{sessions[0]}/traces/0?colour=logprob",
        "tokens-version": f"/admin/sessions/{sessions[0]}/traces/0?colour=version",
        "tokens-table": f"/admin/sessions/{sessions[0]}/traces/0?view=table&size=250",
        "completion": f"/admin/completions/{calls[1]['completion_id']}",
        "completion-sent": f"/admin/completions/{calls[1]['completion_id']}?view=sent",
        "compare": f"/admin/compare?a={sessions[0]}&b={sessions[1]}",
        "nodes": "/admin/nodes",
        "policy": "/admin/policy",
        "keys": "/admin/keys",
        "help": "/admin/help",
        "flower": "/admin/flower/",
        "docs": "/docs",
        "drain": "/admin/nodes/local/drain",
    }
    return {name: url + path for name, path in paths.items()}


def look(driver: Any, url: str, width: int, scheme: str) -> None:
    """Open a page at this width, in these colours."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(url)


def complaints(driver: Any) -> list[str]:
    """What the browser wrote to its console since it was asked last."""
    return [
        f"{line['level']}: {line['message']}" for line in driver.get_log("browser") if "favicon" not in line["message"]
    ]


def test_every_page_in_a_browser(chromium: Any, pages: dict[str, str], axe: str, tmp_path: Path) -> None:
    """Nothing in the console, nothing serious to axe-core, nothing wider than the window; light, dark, both widths."""
    folder = Path(os.environ.get("POLAR_TEST_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    complaints(chromium)
    wrong = []
    for name, url in pages.items():
        for width in WIDTHS:
            for scheme in SCHEMES:
                look(chromium, url, width, scheme)
                place = f"{name} {width} {scheme}"
                wrong += [f"{place}: {line}" for line in complaints(chromium)]
                wide = chromium.execute_script("return document.documentElement.scrollWidth")
                if wide > width:
                    wrong.append(f"{place}: {wide} wide")
                chromium.execute_script(axe)
                found = chromium.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
                for each in found["violations"]:
                    if each["impact"] in SERIOUS:
                        where = [node["html"][:160] for node in each["nodes"][:2]]
                        wrong.append(f"{place}: {each['id']}: {where}")
                complaints(chromium)  # what axe itself says is nobody's affair
                chromium.save_screenshot(str(folder / f"{name}-{width}-{scheme}.png"))
    assert wrong == [], "\n".join(wrong)


def test_the_keyboard(chromium: Any, pages: dict[str, str]) -> None:
    """The skip link comes first, every stop is seen, and the keys of the help do what it says."""
    from selenium.webdriver.common.keys import Keys

    def press(keys: str) -> Any:
        chromium.switch_to.active_element.send_keys(keys)
        return chromium.switch_to.active_element

    look(chromium, pages["task"], 1280, "light")
    assert press(Keys.TAB).text == "Skip to the content"
    stops = set()
    for _ in range(25):
        stop = press(Keys.TAB)
        outline = chromium.execute_script("return getComputedStyle(arguments[0]).outlineStyle", stop)
        assert outline != "none", stop.get_attribute("outerHTML")
        stops.add(stop.id)
    assert len(stops) >= 20
    chromium.find_element("tag name", "body").send_keys("?")
    _until(lambda: "Keys and words" in chromium.find_element("id", "dialog").text)
    press(Keys.ESCAPE)
    assert chromium.find_element("id", "dialog").get_attribute("open") is None
    chromium.find_element("tag name", "body").send_keys("j")
    press(Keys.ENTER)
    _until(lambda: "/admin/sessions/ses-" in chromium.current_url)
    chromium.find_element("tag name", "body").send_keys("gn")
    _until(lambda: chromium.current_url == pages["nodes"])
    chromium.find_element("tag name", "body").send_keys("/")
    assert chromium.switch_to.active_element.get_attribute("id") == "find"


def test_tokens_by_arrow(chromium: Any, pages: dict[str, str]) -> None:
    """The stream takes the focus, arrows move through it, and the chosen token is told in words."""
    from selenium.webdriver.common.keys import Keys

    look(chromium, pages["tokens"], 1280, "light")
    stream = chromium.find_element("id", "stream")
    stream.send_keys(Keys.END)
    told = chromium.find_element("id", "token").text
    last = chromium.execute_script("return document.querySelectorAll('#stream .t').length") - 1
    assert f"#{last} " in told and "log-probability" in told
    stream.send_keys(Keys.ARROW_LEFT)
    assert f"#{last - 1} " in chromium.find_element("id", "token").text


def test_an_open_session_moves_by_itself(up: Up, chromium: Any, pages: dict[str, str]) -> None:
    """The question before cancelling comes in a dialog; the page shows the end without being loaded again."""
    look(chromium, pages["session-open"], 1280, "light")
    chromium.execute_script("window.stayed = true")
    chromium.find_element("css selector", "a[data-ask]").click()
    _until(lambda: "Cancel this session?" in chromium.find_element("id", "dialog").text)
    chromium.find_element("css selector", "#dialog a[data-close]").click()
    httpx.delete(
        pages["session-open"].replace("/admin/sessions/", "/rollout/session/"), headers=dict(up.http.headers)
    ).raise_for_status()
    _until(lambda: "cancelled" in chromium.find_element("css selector", "#session h1").text)
    assert chromium.execute_script("return window.stayed") is True


def _until(condition: Any, seconds: float = 20.0) -> None:
    """Wait until it holds; while a page is being swapped it does not."""
    from selenium.common.exceptions import WebDriverException

    end = time.monotonic() + seconds
    holds = False
    while not holds:
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.1)
        try:
            holds = bool(condition())
        except WebDriverException:
            holds = False
