// The pipeline grid: a row per program, a cell per phase, stage and microbatch.

const GRID_ROW = 32;
const GRID_GAP = 7;

function pipelineView() {
  const grid = facts.pipeline;
  const range = new Range(grid.end, Math.min(grid.end, 6));
  let left = measureNames(grid.names) + 12;
  const rowHeight = () => (grid.names.length > 24 ? 18 : GRID_ROW);
  const top = (row) => 3 + row * (rowHeight() + GRID_GAP);
  const mates = grid.rows.map(pairSpans);

  function drawRow(scene, row) {
    const { context } = scene;
    const cells = grid.rows[row];
    const height = rowHeight();
    const y = top(row);
    scene.clipped(() => {
      context.fillStyle = paper().idle;
      context.strokeStyle = paper().line;
      context.lineWidth = 1;
      context.beginPath();
      context.roundRect(scene.x(0) + 0.5, y + 0.5, scene.x(grid.end) - scene.x(0) - 1, height - 1, 3);
      context.fill();
      context.stroke();
      const unit = (scene.right - scene.left) / range.span;
      const chosen = state.selected?.program === row ? cellOf(cells, state.selected.place) : -1;
      if (unit < ROUND / 2) return drawSmall(scene, row, y, height, unit);
      for (let i = firstAfter(cells.start, range.low - 2); i < cells.start.length && cells.start[i] < range.high; i += 1) {
        const x = scene.x(cells.start[i]);
        const width = cells.cost[i] * unit;
        const inset = unit > 8 ? 0.75 : unit > 4 ? 0.4 : 0.1;
        const colour = ink(cells.phase[i], cells.microbatch[i]);
        context.globalAlpha = cellDimmed(row, cells, i) ? 0.13 : 1;
        box(context, x + inset, y + inset, width - 2 * inset, height - 2 * inset, colour);
        label(context, cells, i, x + width / 2, y, width, height, colour);
        context.globalAlpha = 1;
        if (i === chosen) outline(context, x, y - 1, width, height + 2, accent(), 3);
      }
      drawPairs(scene, row, y, height, unit);
    });
    setFont(context, 12);
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillStyle = row === currentProgram() ? paper().text : paper().faint;
    context.fillText(grid.names[row], left - 8, y + height / 2);
  }

  // Many small cells: one path for each colour.
  function drawSmall(scene, row, y, height, unit) {
    const { context } = scene;
    const cells = grid.rows[row];
    const paths = new Map();
    for (let i = firstAfter(cells.start, range.low - 2); i < cells.start.length && cells.start[i] < range.high; i += 1) {
      const colour = ink(cells.phase[i], cells.microbatch[i]);
      const dim = cellDimmed(row, cells, i);
      const key = `${colour.fill}${colour.hatched}${dim}`;
      if (!paths.has(key)) paths.set(key, { colour, dim, path: new Path2D() });
      paths.get(key).path.rect(scene.x(cells.start[i]) + 0.15, y + 0.5, cells.cost[i] * unit - 0.3, height - 1);
    }
    for (const { colour, dim, path } of paths.values()) {
      context.globalAlpha = dim ? 0.13 : 1;
      context.fillStyle = colour.fill;
      context.fill(path);
      if (!colour.hatched) continue;
      context.fillStyle = hatching(context, colour.hatched);
      context.fill(path);
    }
    context.globalAlpha = 1;
    drawPairs(scene, row, y, height, unit);
    const chosen = state.selected?.program === row ? cellOf(cells, state.selected.place) : -1;
    if (chosen >= 0) outline(context, scene.x(cells.start[chosen]), y - 1, cells.cost[chosen] * unit, height + 2, accent(), 3);
  }

  function drawPairs(scene, row, y, height, unit) {
    const { context } = scene;
    if (unit < 2) return; // outlines would be all there is to see
    context.globalAlpha = (state.lit ?? state.pinned) === null ? 1 : 0.25;
    context.strokeStyle = paper().pair;
    context.lineWidth = unit > 8 ? 1.8 : 1;
    context.beginPath();
    for (const [low, high] of mates[row]) {
      if (high < range.low || low > range.high) continue;
      context.roundRect(scene.x(low) - 0.4, y - 0.5, (high - low) * unit + 0.8, height + 1, unit > 8 ? 4 : 1);
    }
    context.stroke();
    context.globalAlpha = 1;
  }

  function label(context, cells, i, x, y, width, height, colour) {
    const microbatch = cells.microbatch[i] || "•";
    const shown = grid.shared && cells.stage[i] !== null && height > 24;
    if (width < 7 + 6 * microbatch.length) return;
    context.fillStyle = colour.text;
    context.textAlign = "center";
    context.textBaseline = "middle";
    setFont(context, 13, 600);
    context.fillText(microbatch, x, y + height / 2 + (shown ? 6 : 0.5));
    if (!shown || width < 17) return;
    setFont(context, 9.5);
    context.fillText(`s${cells.stage[i]}`, x, y + 9.5);
  }

  const view = {
    name: "Pipeline grid",
    range,
    left: () => left,
    height: () => top(grid.names.length) + 22,
    draw(scene) {
      left = measureNames(grid.names) + 12;
      drawAxis(scene, top(grid.names.length) - GRID_GAP + 2, (at) => trim(at, 2));
      for (let row = 0; row < grid.names.length; row += 1) drawRow(scene, row);
    },
    hit(scene, x, y) {
      const row = Math.floor((y - 3) / (rowHeight() + GRID_GAP));
      if (row < 0 || row >= grid.names.length || x < scene.left || y > top(row) + rowHeight()) return null;
      const cells = grid.rows[row];
      const time = scene.value(x);
      for (let i = firstAfter(cells.start, time); i < cells.start.length && cells.start[i] <= time; i += 1) {
        if (time < cells.start[i] + cells.cost[i]) return { row, i };
      }
      return null;
    },
    tip({ row, i }) {
      const cells = grid.rows[row];
      const stage = cells.stage[i] === null ? [] : [`stage ${cells.stage[i]}`];
      const microbatch = cells.microbatch[i] === "" ? [] : [`microbatch ${cells.microbatch[i]}`];
      const paired = cells.pair[i] < 0 ? [] : ["overlapped with its pair"];
      return [facts.programs[row].nodeAt(cells.places[i][0]), [PHASES[cells.phase[i]], ...stage, ...microbatch].join(", "), grid.names[row], ...paired];
    },
    choose({ row, i }) {
      select(row, grid.rows[row].places[i][0], { reveal: true });
    },
    move(direction) {
      const chosen = state.selected ?? { program: currentProgram(), place: -1 };
      let row = chosen.program;
      let i = cellOf(grid.rows[row], chosen.place);
      if (state.selected === null || i < 0) i = direction === "last" ? grid.rows[row].places.length - 1 : 0;
      else if (direction === "left") i = Math.max(0, i - 1);
      else if (direction === "right") i = Math.min(grid.rows[row].places.length - 1, i + 1);
      else if (direction === "first") i = 0;
      else if (direction === "last") i = grid.rows[row].places.length - 1;
      else {
        const time = grid.rows[row].start[i];
        row = Math.max(0, Math.min(grid.names.length - 1, row + (direction === "up" ? -1 : 1)));
        i = Math.min(grid.rows[row].places.length - 1, firstAfter(grid.rows[row].start, time + 0.5));
      }
      const cells = grid.rows[row];
      if (!cells.places.length) return;
      select(row, cells.places[i][0], { reveal: true });
    },
  };
  revealers.push((program, place) => {
    const cells = grid.rows[program];
    const i = cellOf(cells, place);
    if (i >= 0) range.show(cells.start[i], cells.start[i] + cells.cost[i]);
  });
  return view;
}

// The cell that stands for an instruction; -1 for what is not computing.
function cellOf(cells, place) {
  if (!cells.of) {
    cells.of = new Map();
    cells.places.forEach((places, i) => places.forEach((one) => cells.of.set(one, i)));
  }
  return cells.of.get(place) ?? -1;
}

// A cell is dimmed when all it stands for is.
function cellDimmed(row, cells, i) {
  return (state.lit ?? state.pinned) !== null && cells.places[i].every((place) => dimmed(row, place));
}

// From when to when each overlapped pair runs; members that are apart stand by themselves.
function pairSpans(cells) {
  const mates = new Map();
  cells.pair.forEach((pair, i) => {
    if (pair >= 0) mates.set(pair, [...(mates.get(pair) ?? []), [cells.start[i], cells.start[i] + cells.cost[i]]]);
  });
  const found = [];
  for (const spans of mates.values()) {
    const low = Math.min(...spans.map(([start]) => start));
    const high = Math.max(...spans.map(([, end]) => end));
    const busy = spans.reduce((sum, [start, end]) => sum + end - start, 0);
    if (Math.abs(high - low - busy) < 1e-9) found.push([low, high]);
    else found.push(...spans);
  }
  return found;
}

// A colour with its hatching, as CSS.
function background({ fill, hatched }) {
  if (!hatched) return fill;
  const { colour, across } = lines(hatched);
  return `repeating-linear-gradient(${across}, transparent 0 3px, ${colour}66 3px 4px), ${fill}`;
}

function pipelineLegend() {
  const host = byId("phases");
  const used = new Set(facts.pipeline.rows.flatMap((row) => row.phase));
  const items = Object.keys(PHASES).filter((phase) => used.has(phase)).map((phase) => {
    const colour = ink(phase, "0");
    return make("span", {}, make("i", { style: `background:${background(colour)}` }), PHASES[phase]);
  });
  if (facts.pipeline.rows.some((row) => row.pair.some((pair) => pair >= 0))) {
    items.push(make("span", {}, make("i", { class: "outline" }), "overlapped pair"));
  }
  items.push(make("span", {}, make("i", { class: "empty" }), "idle"), make("span", {}, "a colour per microbatch"));
  host.replaceChildren(...items);
}
