"""Runs the notebooks of this folder and writes what their cells show into them: `make notebooks`.

Cells run in order, in one namespace, as in Jupyter, which is not needed. A test runs them again and compares.
"""

import ast
import io
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent
Cell = dict[str, object]


def notebooks() -> list[Path]:
    """Return every notebook."""
    return sorted(FOLDER.glob("*.ipynb"))


def executed(text: str, name: str) -> str:
    """Run the cells of a notebook; return it with what they show."""
    notebook = json.loads(text)
    module = ModuleType(name)
    sys.modules[name] = module  # tracing looks up the module of the code that it traces
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            cell["execution_count"] = number
            cell["outputs"] = outputs_of(source_of(cell), module, f"{name}, cell {number}", number)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def source_of(cell: Mapping[str, object]) -> str:
    """Return the text of a cell."""
    source = cell["source"]
    assert isinstance(source, list)
    return "".join(source)


def outputs_of(source: str, module: ModuleType, place: str, number: int) -> list[Cell]:
    """Run one cell; return what it prints, and the value of its last expression."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    value: object = None
    with redirect_stdout(printed):
        exec(compile(ast.Module(body, []), place, "exec"), vars(module))
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), place, "eval"), vars(module))
    outputs: list[Cell] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())})
    if value is not None:
        shown = {"data": shown_as(value), "execution_count": number, "metadata": {}}
        outputs.append({**shown, "output_type": "execute_result"})
    return outputs


def shown_as(value: object) -> dict[str, Sequence[str]]:
    """Return a value as text, and as HTML where it has a form in HTML."""
    html = getattr(value, "_repr_html_", None)
    return {**({"text/html": lines(html())} if html else {}), "text/plain": lines(repr(value))}


def lines(text: str) -> list[str]:
    """Return text as notebooks store it: one string for each line."""
    return text.splitlines(keepends=True)


def markdown(text: str) -> str:
    """Return a notebook that has been run as a page."""
    pieces = []
    for cell in json.loads(text)["cells"]:
        source = source_of(cell)
        pieces.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text")})
            if "text/html" in data:
                html = "".join(data["text/html"])
                pieces.append(f'<div class="output">{html}</div>')
            else:
                pieces.append(f"```text\n{''.join(data['text/plain'])}\n```")
    return "\n\n".join(pieces) + "\n"


def main() -> None:
    """Run every notebook."""
    for path in notebooks():
        path.write_text(executed(path.read_text(encoding="utf-8"), path.stem), encoding="utf-8")


if __name__ == "__main__":
    main()
