"""A headless Chromium of the system, driven by Selenium.

Nothing is downloaded: Debian's packages ``chromium`` and ``chromium-driver`` fit each other.
Another pair is used when CHROMIUM and CHROMEDRIVER name it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from tests.services.binaries import find_chromedriver, find_chromium, needed

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",  # it must not look for anybody's servers
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


@contextmanager
def running(
    *, width: int = 1280, height: int = 900, scheme: str = "light", javascript: bool = True
) -> Iterator[Chrome]:
    """Start a browser with a profile of its own and end it.

    :param scheme: ``light`` or ``dark``, as the operator's system would say.
    :param javascript: whether pages may run any.
    """
    options = ChromeOptions()
    options.binary_location = str(needed("Chromium", find_chromium()))
    for flag in (*FLAGS, f"--window-size={width},{height}"):
        options.add_argument(flag)
    if not javascript:
        blocked = {"profile.managed_default_content_settings.javascript": 2}
        options.add_experimental_option("prefs", blocked)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = str(needed("ChromeDriver", find_chromedriver()))
    browser = Chrome(options=options, service=Service(executable_path=driver))
    try:
        look(browser, width=width, height=height, scheme=scheme)
        yield browser
    finally:
        browser.quit()


def look(browser: Chrome, *, width: int, height: int, scheme: str) -> None:
    """Give the page another size, and the system another scheme of colours."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def complaints(browser: Chrome) -> list[str]:
    """Return what the console has told since the last look, but for the icon no page asks for."""
    return [
        entry["message"]
        for entry in browser.get_log("browser")
        if "favicon.ico" not in entry["message"]
    ]
