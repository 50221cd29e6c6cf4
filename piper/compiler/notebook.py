"""Shows a program at the Python prompt and in notebooks: one line, a table with its pipeline, its page."""

from dataclasses import dataclass
from html import escape
from pathlib import Path

from piper.ir.devices import show
from piper.ir.format import count, size
from piper.job import strategy_of
from piper.lower.state import LoweringState
from piper.plan.memory_timeline import timeline
from piper.plan.ops import OPS
from piper.process.files import write_output
from piper.runtime.setup import ProgramLike
from piper.simulate.measured import prices_of
from piper.view.cells import of_plans, stage_tags
from piper.view.provenance import Provenance, StrategyLine, subject_from
from piper.view.report import MARK, page
from piper.view.svg import grid

HEIGHT = 900  # pixels of a page in a notebook
COLUMNS = ("devices", "instructions", "sent", "peak")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A program's page. A notebook shows it; `save` writes it to a file."""

    html: str

    def save(self, path: Path | str) -> Path:
        """Write the page. A file that is not a page of Piper is never replaced."""
        write_output(Path(path), self.html, MARK)
        return Path(path)

    def __repr__(self) -> str:
        return f"Page({size(len(self.html))}; save(path) writes it, and a notebook shows it)"

    def _repr_html_(self) -> str:
        text = escape(self.html, quote=True)
        return f'<iframe srcdoc="{text}" style="width:100%;height:{HEIGHT}px;border:0"></iframe>'


def line_of(program: ProgramLike) -> str:
    """Return a program in one line."""
    plans = program.plans
    peak = max(timeline(plan).peak for plan in plans)
    instructions = sum(len(plan.instrs) for plan in plans)
    devices = count(len(plans.devices), f"{program.device} device")
    return (
        f"Program({devices}, {count(len(plans), 'program')}, "
        f"{instructions} instructions, peak {size(peak)} a device)"
    )


def table_of(program: ProgramLike, work: LoweringState) -> str:
    """Return a program as HTML: what each device runs, sends and holds, and the pipeline."""
    rows = []
    for plan in program.plans:
        sent = sum(ins.nbytes for ins in plan.instrs if ins.comm is not None and OPS[ins.op].sends)
        cells = (show(plan.devices), str(len(plan.instrs)), size(sent), size(timeline(plan).peak))
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    orderings = work.graph.orderings
    drawn = grid(of_plans(program.plans, stage_tags(program.outline, orderings), "Pipeline", orderings))
    title = escape(line_of(program))
    return f"<div><p>{title}</p><table><tr>{head}</tr>{''.join(rows)}</table>{drawn}</div>"


def page_of(program: ProgramLike, work: LoweringState, cluster: str | Path | None = None) -> Page:
    """Return the page of a program: its pipeline, streams, memory, dependencies and strategy."""
    provenance = provenance_of(program, work, "program")
    return Page(html=page(subject_from(provenance, program.plans, prices_of(cluster, None))))


def provenance_of(program: ProgramLike, work: LoweringState, title: str) -> Provenance:
    """Return the model, directives and costs of a program."""
    return Provenance(
        title=title,
        outline=program.outline,
        orderings=work.graph.orderings,
        strategy=tuple(
            StrategyLine(title=directive.title(number), text=repr(directive), source=directive.source)
            for number, directive in enumerate(strategy_of(program.job))
        ),
        origins={node.name: node.origin for node in work.sequence},
        temporal=work.temporal,
        device=program.device,
    )
