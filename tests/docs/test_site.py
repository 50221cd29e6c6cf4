"""Every link leads somewhere, on GitHub and on the site, and the site needs no other host."""

import json
import re
from pathlib import Path

import pytest

from piper.recipe import import_file
from tests.docs.blocks import pages

ROOT = Path(__file__).parents[2]
PAGES = [str(path.relative_to(ROOT)) for path in pages(ROOT)]
SITE = import_file(ROOT / "docs" / "site" / "build.py")
LOADED = re.compile(r"<(?:script|img|iframe)[^>]*\bsrc=\"?(https?:|//)|<link[^>]*\bhref=\"?(https?:|//)")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_at_most_300_lines(page: str) -> None:
    """Only the reference, which is written from docstrings, has more."""
    lines = len((ROOT / page).read_text(encoding="utf-8").splitlines())
    assert lines <= 300 or page == "docs/api.md"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    for target, file, anchor in SITE.links(ROOT / page):
        assert file.exists(), f"{page} links to {target}"
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{page} links to {target}"


def anchors(text: str) -> set[str]:
    """Return the anchors that a page's headings have, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_menu_has_a_section_for_each_heading_and_an_entry_for_each_link() -> None:
    index = "# All\n\n## One\n\n| page | answers |\n| --- | --- |\n| [A](a.md), [B](d/b.md) | [x](x.md)? |\n\n## Two\n\n| [C](c.md) | - |\n"
    assert SITE.menu(index)[2:-1] == [
        {"One": [{"A": "docs/a.md"}, {"B": "docs/d/b.md"}]},
        {"Two": [{"C": "docs/c.md"}]},
    ]


@pytest.mark.timeout(240)  # it compiles the recipes of the live pages
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    site = tmp_path / "site"
    SITE.build(site, tmp_path / "pages")
    for page in PAGES:
        name = "index.html" if Path(page).name == "README.md" else f"{Path(page).stem}.html"
        text = (site / Path(page).parent / name).read_text(encoding="utf-8")
        assert LOADED.search(text) is None, f"{page} loads from another host"
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert any("DualPipe" in entry["text"] for entry in index["docs"])
    live = sorted((site / "docs" / "live").glob("*.html"))
    assert len(live) == len(SITE.LIVE)


def test_a_link_that_leads_nowhere_ends_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, text in {
        "README.md": "# Home\n\n[a](docs/a.md#there)\n",
        "docs/README.md": "# All\n\n## One\n\n| [A](a.md) | - |\n",
        "docs/a.md": "# A\n\n## Here\n",
        "CHANGELOG.md": "# Changes\n",
        "CONTRIBUTING.md": "# How\n",
    }.items():
        SITE.write(tmp_path / name, text)
    monkeypatch.setattr(SITE, "ROOT", tmp_path)
    monkeypatch.setattr(SITE, "SETTINGS", ROOT / "docs" / "site")
    with pytest.raises(SystemExit):
        SITE.build(tmp_path / "built", tmp_path / "pages", live=False)
    assert "does not contain an anchor '#there'" in caplog.text
