"""Writes drawings and pages; PNG through a browser, where there is one."""

import shutil
import zlib

from piper.errors import ConfigError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


PAGE, DRAWING, PICTURE, TRACE = (
    " · Piper</title>",
    'aria-labelledby="title about"',
    "Software\0Piper",
    '"Piper"',
)
# ^ text in each kind of file that shows that Piper wrote it, so that it may be replaced
HEADER = 33  # bytes of a PNG's signature and first chunk


def browser() -> str | None:
    """Return the path of the browser that draws PNG. None: none is installed."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def png(svg: str, *, scale: float = 2.0) -> bytes:
    """Draw an SVG as PNG on light paper, `scale` pixels to its unit."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise no_browser("playwright is not installed") from None
    chromium = browser()
    if chromium is None:
        raise no_browser(f"none of {', '.join(BROWSERS)} is installed")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            page = started.new_page(device_scale_factor=scale, color_scheme="light")
            page.set_content(f"<style>body{{margin:0}}svg{{display:block}}</style>{svg}")
            drawn: bytes = page.locator("svg").screenshot()
        finally:
            started.close()
    return signed(drawn)


def signed(png: bytes) -> bytes:
    """Return a PNG that says which program wrote it."""
    body = b"tEXt" + PICTURE.encode()
    chunk = (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    return png[:HEADER] + chunk + png[HEADER:]


def no_browser(why: str) -> ConfigError:
    """Return the error of a PNG for which there is no browser."""
    return ConfigError(
        "a PNG is drawn by a browser",
        by="--png",
        facts={"but": why},
        hint="pip install playwright and install Chromium (Debian: apt install chromium), or use --svg",
    )
