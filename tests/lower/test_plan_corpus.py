"""Plans stay what they are: a digest of each entry of the corpus, changed only on purpose.

--update-golden writes the digests anew. `tests/lower/corpus.py` says how to see what has changed.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lower.corpus import digest, quick, slow

DIGESTS = Path(__file__).parents[1] / "golden" / "plan_corpus.txt"
HINT = "python -m tests.lower.corpus FOLDER on both commits shows how; --update-golden accepts it"


def check(entries: Iterator[tuple[str, str]], least: int, update: bool) -> None:
    found = {name: digest(text) for name, text in entries}
    assert len(found) >= least
    lines = DIGESTS.read_text(encoding="utf-8").splitlines() if DIGESTS.exists() else []
    known = {line[17:]: line[:16] for line in lines}
    if update:
        merged = {**known, **found}
        DIGESTS.parent.mkdir(exist_ok=True)
        DIGESTS.write_text("".join(f"{merged[name]} {name}\n" for name in sorted(merged)), encoding="utf-8")
        return
    unknown = [name for name in found if name not in known]
    assert not unknown, (
        f"{len(unknown)} plans have no digest, such as {unknown[:5]}: --update-golden adds them"
    )
    changed = [name for name, value in found.items() if known[name] != value]
    assert not changed, f"{len(changed)} plans differ, such as {changed[:5]}: {HINT}"


def test_plans_are_what_they_were(pytestconfig: pytest.Config) -> None:
    check(quick(), 150, bool(pytestconfig.getoption("--update-golden")))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_plans_are_what_they_were(pytestconfig: pytest.Config) -> None:
    check(slow(), 40, bool(pytestconfig.getoption("--update-golden")))
