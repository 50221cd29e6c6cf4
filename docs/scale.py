"""Makes docs/scale.md and its picture of benchmarks/results/scale_131072.md: `python docs/scale.py`.

Every number of the page is one of the results. A test makes the page again and compares it byte for byte.
"""

from pathlib import Path

from paper import Row, Tables, table, tables_of, write
from pictures.bars import Bar, Group, bars

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results" / "scale_131072.md"
TEMPLATE = DOCS / "scale.template"


def values(found: Tables) -> dict[str, str]:
    """Return what the template asks for, by name."""
    cost = {row["what"]: row["value"] for row in found["cost"]}
    best = min(found["strategies"], key=lambda row: float(row["step s"]))
    kept, saved, kept_slow, saved_slow = found["failures"]
    fewer, same, more = found["devices"]
    faster = float(same["step s"]) / float(more["step s"])
    return {
        "together": cost["together"].partition(" (")[0],
        "memory": cost["memory"].partition(" (")[0],
        "instructions": f"{int(cost['instructions']):,}",
        "programs": cost["programs"],
        "state": cost["state"],
        "host": cost["host memory of a machine"],
        "best": best["strategy"],
        "best_step": best["step s"],
        "best_peak": best["of peak %"],
        "best_idle": best["idle %"],
        "best_exposed": best["exposed %"],
        "composed_idle": found["strategies"][0]["idle %"],
        "minutes": kept["failures every"].removesuffix(" min"),
        "longer": kept["copies make a step longer by"],
        "every": saved["every steps"],
        "kept": kept["goodput %"],
        "saved": saved["goodput %"],
        "kept_slow": kept_slow["goodput %"],
        "saved_slow": saved_slow["goodput %"],
        "batch": "134 million",
        "faster": f"{faster:.2f}",
        "fewer_peak": fewer["of peak %"],
        "more_peak": more["of peak %"],
        "device_years": f"{54 / 419 * 16_384 / 365:.1f}",
        **{name: table(found[name]) for name in ("proof", "cost", "strategies", "devices", "failures")},
    }


def picture(rows: list[Row]) -> str:
    """Draw where the time of a step goes, by strategy."""

    def parts(row: Row) -> list[Bar]:
        step = float(row["step s"])
        idle, exposed = (step * float(row[name]) / 100 for name in ("idle %", "exposed %"))
        shown = {"computing": step - idle - exposed, "communication that shows": exposed, "idle": idle}
        return [Bar(series=name, value=value, text=f"{value:.2f} s") for name, value in shown.items()]

    groups = [Group(name=row["strategy"], bars=parts(row)) for row in rows]
    about = "seconds of a step on 131,072 H100, simulated; the mean over devices"
    return bars(groups, title="Where the time of a step goes", about=about)


def files() -> dict[str, str]:
    """Return the page and its picture, by path below `docs/`."""
    found = tables_of(RESULTS.read_text(encoding="utf-8"))
    page = TEMPLATE.read_text(encoding="utf-8").format_map(values(found))
    return {"scale.md": page, "pictures/scale-strategies.svg": picture(found["strategies"])}


if __name__ == "__main__":
    write(files())
