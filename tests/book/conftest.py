"""The built book, once a session, and a headless Chromium to look at it with."""

import os
import shutil
from pathlib import Path

import pytest

from lib import book

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Folder of the book, built from the committed tables."""
    os.environ.pop("LEAKBOOK_OUTPUTS", None)
    os.environ.pop(book.REPOSITORY, None)
    if os.environ.get("LEAKBOOK_BOOK"):  # one that was built just before
        return Path(os.environ["LEAKBOOK_BOOK"]).resolve()
    return book.build(tmp_path_factory.mktemp("book") / "html").parent


@pytest.fixture(scope="session")
def browser():
    """Chromium of the system, or the one that playwright installed; skipped, with the reason, where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    with playwright.sync_playwright() as driver:
        try:
            chromium = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error as error:
            reason = str(error).strip().splitlines()[0]
            pytest.skip(f"no Chromium: none of {', '.join(CHROMIUM)}, and playwright's own does not start ({reason})")
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser):
    """A fresh page of the size of a laptop."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()
