"""Builds the site, every page as static HTML with search, in build/site: `make site`.

The pages keep their places of the repository, so that a link leads to the same file here and on GitHub. Files
that a page links to are copied. The menu is docs/README.md: a section for each heading, an entry for each
link of its tables. MkDocs with its Material theme, because it reads these Markdown pages as they are, and has
search, two colour schemes and a check of links and anchors without a line of ours.
"""

import logging
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path += [
    str(Path(__file__).parents[2]),
    str(Path(__file__).parents[1]),
]  # where `tests` and `notebooks` are
from tests.docs.blocks import FENCE, pages

ROOT = Path(__file__).parents[2]
SETTINGS = Path(__file__).parent
SOURCES = ROOT / "build" / "site-pages"
SITE = ROOT / "build" / "site"
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE_BLOCK = re.compile(r"^```(\w+) (\S+)$", re.MULTILINE)  # ```python net.py
LIVE = {  # recipes with a page of `piper view` in the gallery
    "recipes/moe_dualpipe.py:demo": "a mixture of experts under DualPipe-V, expert parallelism and ZeRO-3",
    "recipes/dualpipe.py:both_ways": "DualPipe, in which microbatches enter from both ends",
}


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield the links of a page that lead into the repository: as written, the file and the anchor."""
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if not target.startswith(("http://", "https://")):
            file, _, anchor = target.partition("#")
            yield target, (page.parent / file).resolve() if file else page, anchor


def menu(index: str) -> list[dict[str, object]]:
    """Return the menu that the index of the documentation gives."""
    sections: list[dict[str, object]] = [{"Home": "README.md"}, {"All pages": "docs/README.md"}]
    for heading, text in re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", index, re.MULTILINE):
        cells = re.findall(r"^\| (\[.*?) \| ", text, re.MULTILINE)
        entries = re.findall(r"\[([^]]+)\]\(([^)]+)\)", "\n".join(cells))
        sections.append(
            {heading: [{title: f"docs/{path.replace('.ipynb', '.md')}"} for title, path in entries]}
        )
    sections.append({"Project": [{"Changes": "CHANGELOG.md"}, {"How to change it": "CONTRIBUTING.md"}]})
    return sections


def stage(folder: Path) -> None:
    """Copy the pages and the files that they link to, as the site needs them."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("site.css", "iframe-worker.js"):
        write(folder / "site" / name, (SETTINGS / name).read_text(encoding="utf-8"))
    sources = pages(ROOT)
    for page in sources:
        write(folder / page.relative_to(ROOT), as_page(page.read_text(encoding="utf-8")))
        for _, file, _ in links(page):
            target = folder / file.relative_to(ROOT)
            if file.is_file() and file not in sources and file.suffix != ".ipynb":
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)


def as_page(text: str) -> str:
    """Return the text of a page as the site needs it: files have a title, and notebooks are pages."""
    return FILE_BLOCK.sub(r'```\1 title="\2"', text).replace(".ipynb)", ".md)")


def add_notebooks(folder: Path) -> None:
    """Write the notebooks as pages, with what their cells showed when they were run."""
    from notebooks.run import markdown, notebooks

    for path in notebooks():
        page = folder / "docs" / "notebooks" / f"{path.stem}.md"
        write(page, as_page(markdown(path.read_text(encoding="utf-8"))))


def add_live_pages(folder: Path) -> None:
    """Write the pages of `piper view` of some recipes, and name them in the gallery."""
    from piper.cli.view import subject_of
    from piper.view.report import page

    lines = ["", "## Live pages", "", "Pages of `piper view`, to point at and click:", ""]
    for recipe, what in LIVE.items():
        name = re.sub(r"\W+", "-", recipe.removeprefix("recipes/").replace(".py", ""))
        subject = subject_of(str(ROOT / recipe), cluster=None, costs=None)
        write(folder / "docs" / "live" / f"{name}.html", page(subject))
        lines.append(f"- [`{recipe}`](live/{name}.html): {what}")
    gallery = folder / "docs" / "gallery.md"
    write(gallery, gallery.read_text(encoding="utf-8") + "\n".join(lines) + "\n")


def write(path: Path, text: str) -> None:
    """Write a file, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def build(site: Path = SITE, sources: Path = SOURCES, *, live: bool = True) -> None:
    """Build the site. A page outside the menu, and a link or an anchor that leads nowhere, are errors."""
    from mkdocs.commands.build import build as build_pages
    from mkdocs.config import load_config

    logging.basicConfig(format="%(message)s")  # what is wrong, before the build ends
    stage(sources)
    add_notebooks(sources)
    if live:
        add_live_pages(sources)
    config = load_config(
        str(SETTINGS / "mkdocs.yml"),
        docs_dir=str(sources),
        site_dir=str(site),
        nav=menu((ROOT / "docs" / "README.md").read_text(encoding="utf-8")),
        strict=True,
    )
    build_pages(config)


if __name__ == "__main__":
    build()
    sys.stdout.write(f"{SITE.relative_to(ROOT)}/index.html: open it in a browser\n")
