"""Makes docs/published.md and its pictures of recipes/gallery/: `python docs/published.py [recipe ...]`.

It draws the pictures of the recipes that are named, or of all; each is compiled. `--page`: the page alone.
"""

import json
import sys
from pathlib import Path

DOCS = Path(__file__).parent
GALLERY = DOCS.parent / "recipes" / "gallery"
TEMPLATE = DOCS / "published.template"
EXPERTS = DOCS.parent / "benchmarks" / "results" / "published_experts.json"
HELPER = "text"  # a module that recipes share


def recipes() -> list[Path]:
    """Return the recipes of the gallery."""
    return sorted(path for path in GALLERY.glob("*.py") if path.stem != HELPER)


def page() -> str:
    """Return the page: its template, with the number of lines of each recipe and the simulated figures."""
    lines = {path.stem: len(path.read_text(encoding="utf-8").splitlines()) for path in recipes()}
    return TEMPLATE.read_text(encoding="utf-8").format_map({**lines, "experts": experts()})


def experts() -> str:
    """Return a row for each mixture of experts that was simulated at its published size."""
    rows = json.loads(EXPERTS.read_text(encoding="utf-8")).values()
    cells = "| {run} | {published:,} | {predicted:,} | {ratio} | {peak_gib} GiB | {source} |"
    return "\n".join(cells.format_map(row) for row in rows)


def picture(recipe: Path) -> str:
    """Compile a recipe's small job and draw its pipeline, with transfers free."""
    from piper.compiler import compile as compile_job  # torch is paid for only where it is used
    from piper.recipe import load_recipe
    from piper.view.cells import of_plans, stage_tags
    from piper.view.svg import grid

    program = compile_job(load_recipe(f"{recipe}:small"), device="cpu")
    return grid(
        of_plans(
            program.plans,
            stage_tags(program.outline, program.graph.orderings),
            recipe.name,
            program.graph.orderings,
        )
    )


def main() -> None:
    asked = sys.argv[1:]
    for recipe in recipes():
        if not asked or recipe.stem in asked:
            drawn = DOCS / "pictures" / f"published-{recipe.stem}.svg"
            drawn.write_text(picture(recipe), encoding="utf-8")
            sys.stdout.write(f"docs/pictures/{drawn.name}\n")
    (DOCS / "published.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
