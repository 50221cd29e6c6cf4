"""A page with the time-memory front of a search: one picture, one table, no network."""

from html import escape

from piper.ir.format import percent, seconds, size
from piper.tuning.evaluate import Evaluation
from piper.tuning.result import Tuned

MARK = "<!-- piper tune -->"
WIDTH, HEIGHT, LEFT, BELOW = 760, 380, 90, 40
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em }
body { color: #222; background: #fff }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 3px 10px; text-align: left }
tr:nth-child(even) { background: #f4f4f6 } svg text { font: 12px system-ui, sans-serif; fill: #444 }
td:nth-child(-n+4), th:nth-child(-n+4) { text-align: right; white-space: nowrap }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #16181d } svg text { fill: #bbb }
tr:nth-child(even) { background: #22252c } }
"""


def tuning_page(tuned: Tuned, title: str) -> str:
    """Return the page of a search."""
    best = tuned.best
    rows = "\n".join(table_row(tuned, one) for one in tuned.ranked)
    return f"""<!doctype html>
{MARK}
<html lang="en"><meta charset="utf-8"><title>piper tune {escape(title)}</title><style>{STYLE}</style>
<h1>{escape(title)} on {tuned.devices} devices of {escape(tuned.machine)}</h1>
<p><b>{escape(best.choice.label)}</b>: {tuned.step_text} a step, at most {size(best.peak)} of
{size(tuned.limit)} on each device. {len(tuned.evaluated)} candidates were compiled, proven and simulated.</p>
{picture(tuned)}
<p>Each point is a candidate. The line joins those that no other beats in both time and memory; the dashed
line is the limit.</p>
<table><tr><th>step</th><th>bound</th><th>bubble</th><th>peak</th><th>strategy</th><th>reason</th></tr>
{rows}
</table>
</html>
"""


def table_row(tuned: Tuned, one: Evaluation) -> str:
    """Return one candidate as a row of the table."""
    cells = (
        seconds(one.step),
        seconds(one.bound),
        percent(one.bubble, 1),
        size(one.peak),
        one.choice.label,
        tuned.reason(one),
    )
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def picture(tuned: Tuned) -> str:
    """Return the candidates as points over time and memory, with the front as a line."""
    steps = [one.step for one in tuned.evaluated]
    longest, shortest = max(steps), min(steps)
    most = max(max(one.peak for one in tuned.evaluated), tuned.limit if tuned.limit < 1e18 else 0)
    spread = (longest - shortest) or shortest or 1.0

    def x(one: Evaluation) -> float:
        return LEFT + 20 + (WIDTH - LEFT - 60) * (one.step - shortest) / spread

    def y(nbytes: float) -> float:
        return 20 + (HEIGHT - BELOW - 20) * (1 - nbytes / most)

    points = "\n".join(
        f'<circle cx="{x(one):.1f}" cy="{y(one.peak):.1f}" r="{6 if one is tuned.best else 4}" '
        f'fill="{"#c2410c" if one is tuned.best else "#3b6fb6"}" '
        f'fill-opacity="{1 if one.peak <= tuned.limit else 0.35}">'
        f"<title>{escape(one.choice.label)}: {seconds(one.step)}, {size(one.peak)}</title></circle>"
        for one in tuned.evaluated
    )
    line = " ".join(f"{x(one):.1f},{y(one.peak):.1f}" for one in tuned.front)
    limit = y(tuned.limit)
    return f"""<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img"
 aria-label="peak memory over step time">
<line x1="{LEFT}" y1="{HEIGHT - BELOW}" x2="{WIDTH}" y2="{HEIGHT - BELOW}" stroke="#888"/>
<line x1="{LEFT}" y1="10" x2="{LEFT}" y2="{HEIGHT - BELOW}" stroke="#888"/>
<line x1="{LEFT}" y1="{limit:.1f}" x2="{WIDTH}" y2="{limit:.1f}" stroke="#c2410c" stroke-dasharray="6 4"/>
<text x="{LEFT + 6}" y="{limit - 5:.1f}">limit {size(tuned.limit)}</text>
<text x="{LEFT - 8}" y="{y(0):.1f}" text-anchor="end">0</text>
<text x="{LEFT - 8}" y="{y(most) + 4:.1f}" text-anchor="end">{size(most)}</text>
<text x="{LEFT + 20}" y="{HEIGHT - 15}">{seconds(shortest)}</text>
<text x="{WIDTH - 40}" y="{HEIGHT - 15}" text-anchor="end">{seconds(longest)} a step</text>
<polyline points="{line}" fill="none" stroke="#c2410c" stroke-width="1.5"/>
{points}
</svg>"""
