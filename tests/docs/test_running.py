"""A page that does not do what it says is caught: each way in which a block can be wrong."""

from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of, looks_like
from tests.docs.running import BrokenPageError, Reader


def read(page: str) -> None:
    """Follow a page; ~~~ stands for the fence."""
    reader = Reader("page.md")
    for block in blocks_of(page.replace("~~~", "```"), "page.md"):
        reader.follow(block)
    reader.finish()


BROKEN = {
    "python that fails": ("~~~python\n1 / 0\n~~~\n", "page.md:2: ZeroDivisionError: division by zero"),
    "python that prints something else": (
        "~~~python\nprint(2)\n~~~\n\nIt prints\n\n~~~text\n3\n~~~\n",
        "page.md:8: it printed\n2\nand the page shows\n3\n",
    ),
    "an error of ours that no text shows": (
        "~~~python\nimport piper\npiper.at(PASS='Z')\n~~~\n",
        "page.md:2: it raises, and no text shows what\n",
    ),
    "an error of ours before more code": (
        "~~~python\nimport piper\npiper.at(PASS='Z')\n~~~\n~~~python\n~~~\n",
        "page.md:2: it raises, and no text shows what\n",
    ),
    "a text that nothing prints": ("~~~text\nhello\n~~~\n", "page.md:2: nothing has printed this"),
    "a command that prints something else": (
        "~~~console\n$ echo one\ntwo\n~~~\n",
        "page.md:2: echo one printed\none\nand the page shows\ntwo\n",
    ),
    "the second command of a block": (
        "~~~console\n$ echo one\none\n$ echo two\nthree\n~~~\n",
        "page.md:2: echo two printed\ntwo\nand the page shows\nthree\n",
    ),
    "a command that fails": ("~~~bash\ntrue\nfalse\n~~~\n", "page.md:2: false ended with 1"),
    "a command of ours that fails": (
        "~~~bash\npiper schedule nonsense --ranks 2 --microbatches 2\n~~~\n",
        "page.md:2: piper schedule nonsense --ranks 2 --microbatches 2 ended with 2\nerror: ",
    ),
    "a failure that is shown as if it were none": (
        "~~~console\n$ exit 3\n...\n~~~\n",
        "page.md:2: exit 3 ended with 3",
    ),
    "an option that does not exist": (
        "<!-- not run: needs a cluster -->\n~~~bash\npiper train x.py:y --nodes 2\n~~~\n",
        "page.md:3: piper train x.py:y --nodes 2: No such option: --nodes",
    ),
    "a verb that does not exist": (
        "<!-- not run: needs a cluster -->\n~~~bash\nRAY_ADDRESS=1 piper fly x.py:y\n~~~\n",
        "page.md:3: piper fly x.py:y: there is no such verb",
    ),
    "a target that does not exist": (
        "<!-- not run: takes minutes -->\n~~~bash\nmake coffee\n~~~\n",
        "page.md:3: make coffee: there is no such target",
    ),
    "commands that do not parse": (
        "<!-- not run: needs a cluster -->\n~~~bash\nif true\n~~~\n",
        "page.md:3: bash: ",
    ),
    "code that is left out": (
        "<!-- not run: slow -->\n~~~python\n1 / 0\n~~~\n",
        "page.md:3: only commands can be left out, and only with a reason",
    ),
    "no reason": (
        "<!-- not run: -->\n~~~bash\ntrue\n~~~\n",
        "page.md:3: only commands can be left out, and only with a reason",
    ),
    "a language that nobody runs": ("~~~ruby\nputs 1\n~~~\n", "page.md:2: nobody knows how to run ruby"),
    "no language": ("~~~\nx\n~~~\n", "page.md:2: nobody knows how to run a block of no language"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_page_is_caught(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page, message = BROKEN[what]
    with pytest.raises(BrokenPageError) as error:
        read(page)
    assert str(error.value).startswith(message)


def test_a_page_that_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    read(
        "~~~python\nx = 2\n~~~\n~~~python\nprint(x, 'apples')\n~~~\n~~~text\n2 …\n~~~\n"
        "~~~python one.py\nx = 1\n~~~\n~~~python one.py\nprint(x + 1)\n~~~\n"
        "~~~console\n$ python one.py\n2\n$ echo one; echo two\n...\ntwo\n~~~\n"
        "~~~python\nimport piper\npiper.at(PASS='Z')\n~~~\n~~~text\nScheduleError: at: there is no pass 'Z'\n...\n~~~\n"
        "<!-- figure -->\n~~~text\na -> b\n~~~\n"
        "<!-- not run: needs a cluster -->\n~~~bash\nray start --head  # here\nA=1 piper plan x.py:y --why\n~~~\n"
    )


def test_what_is_left_out() -> None:
    assert looks_like("a\n...\nd\n", "a\nb\nc\nd\n")
    assert looks_like("a\n...\nd\n", "a\nd\n")
    assert looks_like("...\n", "anything\n")
    assert looks_like("step 1   … ms\n", "step 1   12.5 ms\n")
    assert not looks_like("step 1   … ms\n", "step 1   12.5 s\n")
    assert not looks_like("a\n...\nd\n", "a\nb\nc\n")
    assert not looks_like("a.c\n", "abc\n"), "nothing else is a pattern"
    assert not looks_like("a\n", "a\nb\n")
