"""Makes docs/paper.md and its pictures of benchmarks/results/paper.md: `python docs/paper.py`.

Every number of the page is one of the results. A test makes the page again and compares it byte for byte.
"""

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from pictures.bars import Bar, Group, bars

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results" / "paper.md"
OVERLAP = DOCS.parent / "benchmarks" / "results" / "gpu_overlap.txt"
FITS = DOCS.parent / "benchmarks" / "results" / "gpu_fits.txt"
TEMPLATE = DOCS / "paper.template"
NAMES = {"1f1b": "1F1B", "interleaved-1f1b": "interleaved 1F1B", "dualpipe-v": "DualPipe-V"}
WHOLE = "whole"  # how a row computes the head, if not in pieces
Row = dict[str, str]
Tables = dict[str, list[Row]]


def tables_of(text: str) -> Tables:
    """Read the tables of the results, by their headings."""
    found: Tables = {}
    heading, names = "", list[str]()
    for line in text.splitlines():
        if line.startswith("## "):
            heading, names = line[3:], []
        elif line.startswith("| "):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not names:
                names = cells
            elif set(cells) != {"---"}:
                found.setdefault(heading, []).append(dict(zip(names, cells, strict=True)))
    return found


def table(rows: list[Row]) -> str:
    """Write rows as a table, numbers to the right."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    return "\n".join([*lines, *("| " + " | ".join(row[name] for name in names) + " |" for row in rows)])


def command_of(part: str) -> str:
    """Return the block of a part of the results that says how it was made."""
    text = RESULTS.read_text(encoding="utf-8").partition(f"## {part}\n")[2]
    lines = text.partition("```text\n")[2].partition("```")[0].splitlines()
    return next(line.partition(": ")[2] for line in lines if line.startswith("command"))


def grouped(rows: Iterable[Row], name: Callable[[Row], str], bar: Callable[[Row], Bar]) -> list[Group]:
    """Put the bars of rows of one name together."""
    found: dict[str, list[Bar]] = {}
    for row in rows:
        found.setdefault(name(row), []).append(bar(row))
    return [Group(name=each, bars=made) for each, made in found.items()]


def number(text: str) -> float:
    """Return a value of the results without its unit."""
    return float(text.rstrip("x%").split()[0])


def pictures(found: Tables) -> dict[str, str]:
    """Draw each figure."""
    return {
        "paper-schedules.svg": bars(
            grouped(
                found["schedules"],
                lambda row: (
                    f"{row['model']}, {row['microbatches'].split()[0]} microbatches, {row['cluster']}"
                    + (", measured" if row["computing"] == "measured" else "")
                ),
                lambda row: Bar(
                    series=NAMES[row["schedule"]],
                    value=number(row["over 1F1B"]),
                    text=f"{row['over 1F1B']}, {row['step ms']} ms",
                ),
            ),
            title="Throughput of schedules, relative to 1F1B",
            about="whole jobs, simulated; longer is faster",
        ),
        "paper-streams.svg": bars(
            grouped(
                sorted(found["streams"], key=lambda row: row["zero"]),
                lambda row: f"ZeRO-{row['zero']}, {row['tokens']} tokens",
                lambda row: Bar(
                    series={"1": "one stream", "2": "two", "3": "three"}[row["streams"]],
                    value=number(row["step ms"]),
                    text=f"{row['step ms']} ms, {row['over one stream']}",
                ),
            ),
            title="All-reduces and all-to-alls on one stream, and on streams of their own",
            about="a step of the 9B model on 16 A100, simulated; shorter is faster",
        ),
        "paper-batch.svg": bars(
            [
                Group(
                    name=f"ZeRO-{row['zero']}, head {in_parts(row)}; {row['saved']}",
                    bars=[
                        Bar(series=side, value=number(row[side]), text=row[side] + extra)
                        for side, extra in (("PipelineStage + FSDP2", ""), ("Piper", f", {row['ratio']}"))
                    ],
                )
                for row in found["batch"]
                if row["zero"] != "1" and row["memory GiB"] == "80"
                if row["head"] != WHOLE or row["saved"] == "layer inputs"  # the others differ little
            ],
            title="The largest microbatch of the job that fits in 80 GiB, in samples of 1,024 tokens",
            about="8B decoder, PP8 x DP4, both sides recompute from the same values; counted without a GPU",
        ),
        "paper-scale.svg": bars(
            grouped(
                found["scale"],
                lambda row: f"{row['devices']} devices",
                lambda row: Bar(
                    series=row["cluster"],
                    value=number(row["of 2 devices %"]),
                    text=f"{row['of 2 devices %']} %",
                ),
            ),
            title="Throughput of a device, in percent of a job of two devices",
            about="1.1B decoder, PP2 x DP1 to DP512, simulated",
        ),
        "paper-buckets.svg": bars(
            grouped(
                found["buckets"],
                lambda row: (
                    f"ZeRO-{row['zero']}, {row['bucket MB']}"
                    + ("" if row["bucket MB"] == "a layer" else " MB")
                ),
                lambda row: Bar(
                    series="step",
                    value=number(row["step ms"]),
                    text=f"{row['step ms']} ms, {row['collectives']} collectives",
                ),
            ),
            title="A step by the size of buckets",
            about="1.1B decoder, PP2 x DP16, eight microbatches, simulated on H200; shorter is faster",
        ),
    }


def in_parts(row: Row) -> str:
    """Return how a row computes the head."""
    return row["head"] if row["head"] == WHOLE else f"in {row['head']}"


def chosen(rows: list[Row], **wanted: str) -> Row:
    """Return the one row with these values."""
    (found,) = (row for row in rows if all(row[name] == value for name, value in wanted.items()))
    return found


def shown(found: Tables, part: str) -> str:
    """Return the command of a part of the results, and its table."""
    return f"`{command_of(part)}` takes minutes:\n\n{table(found[part])}"


def values(found: Tables) -> dict[str, str]:
    """Return what the template asks for, by name."""
    made = {f"dualpipe_{name}": dualpipe(found, "1B", name) for name in ("h200", "a100")}
    made |= {
        f"published_{name.lower()}": dualpipe(found, f"{name} published", "a100") for name in ("1B", "9B")
    }
    plain = [row for row in found["streams"] if row["zero"] == "0" and row["streams"] == "2"]
    by_gain = sorted(plain, key=lambda row: number(row["over one stream"]))
    for name, row in (("least", by_gain[0]), ("best", by_gain[-1])):
        made |= {f"streams_{name}": row["over one stream"], f"streams_{name}_tokens": row["tokens"]}
    made |= batches(found)
    (peer,) = found["peer"]
    made |= {"peer_counted": peer["counted GiB"], "peer_measured": peer["measured on an H200 GiB"]}
    made["peer_samples"] = peer["samples"]
    for name in ("h200", "a100"):
        made[f"scale_{name}"] = chosen(found["scale"], devices="1024", cluster=name)["of 2 devices %"]
    pairs = [row for row in found["measured"] if row["schedule"] == "dualpipe-v"]
    for count in ("8", "16"):
        row = next(row for row in pairs if row["microbatches"].split()[0] == count)
        made[f"measured_{count}"] = row["over 1F1B"]
    wanted = {"model": "1B", "cluster": "h200", "schedule": "dualpipe-v"}
    simulated = next(row for row in found["schedules"] if wanted.items() <= row.items())
    made["slower"] = f"{number(pairs[0]['step ms']) / number(simulated['step ms']):.1f}"
    made |= overlap() | fits()
    parts = ("schedules", "measured", "streams", "batch", "scale", "buckets")
    return made | {part: shown(found, part) for part in parts}


def batches(found: Tables) -> dict[str, str]:
    """Return the figures of the largest microbatches in 80 GiB, by the level of ZeRO."""
    made: dict[str, str] = {}
    for zero in "23":
        rows = [row for row in found["batch"] if (row["zero"], row["memory GiB"]) == (zero, "80")]
        whole, pieced = ([row for row in rows if (row["head"] == WHOLE) == one] for one in (True, False))
        made[f"whole_{zero}"] = best(whole)["to layer inputs"]
        row = best(pieced)
        made |= {
            f"pieced_{zero}": row["to layer inputs"],
            f"pieced_same_{zero}": row["ratio"],
            f"pieced_samples_{zero}": row["Piper"],
            f"pieced_saved_{zero}": row["saved"],
        }
        for row in pieced:
            name = row["saved"].replace(" inputs", "").replace(", on the host", "_host")
            made |= {
                f"{name}_to_{zero}": row["to layer inputs"],
                f"{name}_ms_{zero}": row["ms a sample"],
                f"{name}_at_host_{zero}": row["host GiB"],
            }
    return made


def best(rows: list[Row]) -> Row:
    """Return the row with our largest microbatch, which must also be the peer's largest."""
    found = max(rows, key=lambda row: number(row["Piper"]))
    peer = "PipelineStage + FSDP2"
    assert number(found[peer]) == max(number(row[peer]) for row in rows), "the page compares the two best"
    return found


def overlap() -> dict[str, str]:
    """Return the figures of the overlap that was measured."""
    text = OVERLAP.read_text(encoding="utf-8")
    patterns = {
        "overlap_step": r"^step .* (\S+x)$",
        "overlap_main": r"^main phase .* (\S+x)$",
        "overlap_exposed": r"in the main phase: (\S+) %",
        "overlap_stretch": r"computes takes (\S+x) of",
    }
    return {name: re.findall(pattern, text, re.MULTILINE)[0] for name, pattern in patterns.items()}


def fits() -> dict[str, str]:
    """Return how many times as many samples an H200 held, by the GiB that both sides had."""
    text = FITS.read_text(encoding="utf-8")
    return {f"fits_{limit}": ratio for limit, ratio in re.findall(r"in (\d+) GiB .*: (\S+x)", text)}


def dualpipe(found: Tables, model: str, cluster: str) -> str:
    """Return how fast DualPipe-V is relative to 1F1B, in the first case of a model."""
    wanted = {"model": model, "cluster": cluster, "schedule": "dualpipe-v"}
    return next(row["over 1F1B"] for row in found["schedules"] if wanted.items() <= row.items())


def page(found: Tables) -> str:
    """Return the page."""
    return TEMPLATE.read_text(encoding="utf-8").format_map(values(found))


def files() -> dict[str, str]:
    """Return the page and its pictures, by path below `docs/`."""
    found = tables_of(RESULTS.read_text(encoding="utf-8"))
    return {"paper.md": page(found), **{f"pictures/{name}": svg for name, svg in pictures(found).items()}}


def write(made: dict[str, str]) -> None:
    """Write the files of a page, and say which."""
    for name, text in made.items():
        (DOCS / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"docs/{name}\n")


if __name__ == "__main__":
    write(files())
