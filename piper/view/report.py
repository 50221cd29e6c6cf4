"""Builds the page: one file with the template, style and scripts of `page/` and the data."""

import json
import re
from html import escape
from importlib.resources import files

from piper.version import VERSION
from piper.view.facts import facts_of
from piper.view.provenance import Subject

MARK = " · Piper</title>"  # shows that Piper wrote a page, which may then be replaced
SCRIPTS = (  # in this order
    *("state.js", "format.js", "ink.js", "range.js", "scene.js", "related.js", "pipeline.js", "timeline.js"),
    *("devices.js", "memory.js", "loss.js", "dag.js", "strategy.js", "details.js", "tables.js", "print.js"),
    "main.js",
)


def page(subject: Subject) -> str:
    """Return the HTML text of the page. It opens from a file, without a network."""
    facts = json.dumps(facts_of(subject), separators=(",", ":"), ensure_ascii=False)
    scripts = "\n".join(read(name) for name in SCRIPTS)
    parts = {
        "version": VERSION,
        "title": escape(subject.title),
        "style": read("page.css"),
        "facts": facts.replace("<", "\\u003c"),  # so that no text in it can end the script element
        "script": f'"use strict";\n(() => {{\n{scripts}\n}})();',
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], read("page.html"))


def read(name: str) -> str:
    """Read a file of `page/`."""
    return (files("piper.view") / "page" / name).read_text(encoding="utf-8")
