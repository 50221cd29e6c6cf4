"""What every test may use: golden texts, and the rule that GPU tests need a GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"
Golden = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/ instead of comparing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return  # without asking torch: tests that do not need it should not pay for it
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare a text with `tests/golden/<name>.txt`: `golden("name", text)`. --update-golden writes it."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(
                f"there is no {path.name} yet; look at this, then run with --update-golden:\n{text}", False
            )
        wanted = path.read_text(encoding="utf-8")
        if text != wanted:
            pytest.fail(
                f"{path.name} differs; if the new text is right, run with --update-golden\n"
                f"wanted:\n{wanted}\ngot:\n{text}",
                pytrace=False,
            )

    return compare
