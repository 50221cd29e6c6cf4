"""Writes docs/architectures.md: python -m tests.architectures.page."""

from pathlib import Path

from tests.architectures.table import ARCHITECTURES

# What does not pass, as `test_architectures.py` finds it
FOUND: dict[str, str] = {}
TOP = """# Architectures

Stock Hugging Face models, small, unedited but for `piper.annotate_layers(model)`, under
`piper.strategies.pipeline(pp=2, dp=2, zero=3, schedule="1f1b")` with `piper.losses.huggingface`. Each is compared with
plain PyTorch on one device in fp64: losses, gradients and parameters within 1e-9 over two steps, dropout included.

<!-- not run: it takes twenty minutes -->
```bash
.venv/bin/python -m pytest -m slow tests/architectures
```

| architecture | kind | class | at PP2 x DP2, zero=3 |
| --- | --- | --- | --- |
"""
BOTTOM = """
Set LayerDrop's probability to 0 (`layerdrop=0.0`, `encoder_layerdrop=0.0`): a plan runs the same layers in every step.

`make transformers CHECKOUT=DIR` does the same for every class of models that the tests of `transformers` build, in a clone of it: DP2, ZeRO-3 and
two microbatches where `piper.losses.huggingface` has its loss, one device elsewhere.

A model is captured as `torch.compile` sees it. UMT5 and Doge of `transformers` 5.17 are other models there: without a mask UMT5's decoder
attends to later positions in plain PyTorch, and to none under `torch.compile`; so does Doge. `piper check` reports other numbers, and says that the model itself has two losses.
"""


def page() -> str:
    """Return the page."""
    rows = [
        f"| {name} | {made.kind} | `{made.model}` | {FOUND.get(name, 'the numbers of one device')} |"
        for name, made in ARCHITECTURES.items()
    ]
    return TOP + "\n".join(rows) + "\n" + BOTTOM


if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs" / "architectures.md").write_text(page(), encoding="utf-8")
