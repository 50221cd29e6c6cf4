// The pipeline: a row per program, a cell per phase, stage and microbatch, in units or in simulated time.

const GRID_ROW = 32;
const GRID_GAP = 7;

// The pipeline in simulated time. A cell whose instructions are apart, because those of its pair or other work lie
// between them, is drawn in pieces.
function timedGrid() {
  const rows = facts.pipeline.rows.map((cells, number) => {
    const program = facts.programs[number];
    const pieces = cells.places.map((places) => spansOf(program, places, 1));
    const order = pieces.map((_, i) => i).sort((a, b) => pieces[a][0][0] - pieces[b][0][0]);
    const sorted = Object.fromEntries(["phase", "stage", "microbatch", "pair", "places"].map((name) => [name, order.map((i) => cells[name][i])]));
    const spans = order.map((i) => pieces[i]);
    const ends = spans.map((span) => span[span.length - 1][1]);
    return { ...sorted, pieces: spans, start: spans.map((span) => span[0][0]), cost: spans.map((span, i) => ends[i] - span[0][0]) };
  });
  return { ...facts.pipeline, rows, end: facts.step };
}

// A grid with what drawing needs: the pieces of each cell, the longest cell, the usual width, the outlines of pairs.
function prepared(grid) {
  const costs = grid.rows.flatMap((cells) => cells.cost).sort((a, b) => a - b);
  for (const cells of grid.rows) cells.pieces ??= cells.start.map((start, i) => [[start, start + cells.cost[i]]]);
  return {
    ...grid,
    longest: costs[costs.length - 1] ?? 0,
    usual: costs[costs.length >> 2] ?? 1,
    mates: grid.rows.map(pairSpans),
    range: new Range(grid.end, Math.min(grid.end, 6 * (costs[0] || grid.end / 100))),
  };
}

function pipelineView() {
  const grids = { units: prepared(facts.pipeline), time: prepared(timedGrid()) };
  const now = () => grids[state.clock];
  const { names, shared } = facts.pipeline;
  let left = measureNames(names) + 12;
  const rowHeight = () => (names.length > 24 ? 18 : GRID_ROW);
  const top = (row) => 3 + row * (rowHeight() + GRID_GAP);

  // The cells of a row that are in view.
  function* inView(cells) {
    const { range, longest } = now();
    for (let i = firstAfter(cells.start, range.low - longest); i < cells.start.length && cells.start[i] < range.high; i += 1) yield i;
  }

  function drawRow(scene, row) {
    const { context } = scene;
    const { range, end, rows, usual } = now();
    const cells = rows[row];
    const height = rowHeight();
    const y = top(row);
    scene.clipped(() => {
      strip(context, scene.x(0) + 0.5, y + 0.5, scene.x(end) - scene.x(0) - 1, height - 1);
      const scale = (scene.right - scene.left) / range.span;
      const unit = usual * scale; // pixels of a short cell
      const chosen = state.selected?.program === row ? cellOf(cells, state.selected.place) : -1;
      if (unit < ROUND / 2) drawSmall(scene, row, y, height, scale);
      else {
        const inset = unit > 8 ? 0.75 : 0.4;
        for (const i of inView(cells)) {
          const dim = cellDimmed(row, cells, i);
          context.globalAlpha = dim ? 0.13 : 1;
          drawCell(scene, cells, i, y, height, inset, scale, dim);
        }
        context.globalAlpha = 1;
      }
      drawPairs(scene, row, y, height, unit, scale);
      if (chosen >= 0) {
        const whole = [[cells.start[chosen], cells.start[chosen] + cells.cost[chosen]]];
        for (const [low, high] of cells.pair[chosen] < 0 ? whole : cells.pieces[chosen]) outline(context, scene.x(low), y - 1, (high - low) * scale, height + 2, accent(), 3);
      }
    });
    write(context, names[row], left - 8, y + height / 2, { align: "right", colour: row === currentProgram() ? paper().text : paper().faint });
  }

  function drawCell(scene, cells, i, y, height, inset, scale, dim) {
    const colour = ink(cells.phase[i], cells.microbatch[i]);
    let [low, high] = cells.pieces[i][0];
    for (const piece of cells.pieces[i]) {
      const x = scene.x(piece[0]);
      const width = (piece[1] - piece[0]) * scale;
      box(scene.context, x + inset, y + inset, Math.max(width - 2 * inset, 0.8), height - 2 * inset, colour);
      if (piece[1] - piece[0] > high - low) [low, high] = piece;
    }
    const apart = (high - low) * scale < 17 && cells.pair[i] < 0; // a pair's pieces lie between each other
    if (apart) [low, high] = [cells.start[i], cells.start[i] + cells.cost[i]];
    label(scene.context, cells, i, scene.x((low + high) / 2), y, (high - low) * scale, height, colour, apart && !dim);
  }

  // Many small cells: one path for each colour.
  function drawSmall(scene, row, y, height, scale) {
    const { context } = scene;
    const cells = now().rows[row];
    const paths = new Map();
    for (const i of inView(cells)) {
      const colour = ink(cells.phase[i], cells.microbatch[i]);
      const dim = cellDimmed(row, cells, i);
      const key = `${colour.fill}${colour.hatched}${dim}`;
      if (!paths.has(key)) paths.set(key, { colour, dim, path: new Path2D() });
      for (const [low, high] of cells.pieces[i]) {
        paths.get(key).path.rect(scene.x(low) + 0.15, y + 0.5, Math.max((high - low) * scale - 0.3, 0.2), height - 1);
      }
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
  }

  function drawPairs(scene, row, y, height, unit, scale) {
    const { context } = scene;
    const { range, mates } = now();
    if (unit < 2) return; // outlines would be all there is to see
    context.globalAlpha = dims() ? 0.25 : 1;
    context.strokeStyle = paper().pair;
    context.lineWidth = unit > 8 ? 1.8 : 1;
    context.beginPath();
    for (const [low, high] of mates[row]) {
      if (high < range.low || low > range.high) continue;
      context.roundRect(scene.x(low) - 0.4, y - 0.5, (high - low) * scale + 0.8, height + 1, unit > 8 ? 4 : 1);
    }
    context.stroke();
    context.globalAlpha = 1;
  }

  function label(context, cells, i, x, y, width, height, colour, halo) {
    const microbatch = cells.microbatch[i] || "•";
    const staged = shared && cells.stage[i] !== null && height > 24;
    if (width < 7 + 6 * microbatch.length) return;
    setFont(context, 13, 600);
    centred(context, microbatch, x, y + height / 2 + (staged ? 6 : 0.5), colour, halo);
    if (!staged || width < 17) return;
    setFont(context, 9.5);
    centred(context, `s${cells.stage[i]}`, x, y + 9.5, colour, halo);
  }

  const view = {
    name: "Pipeline",
    get range() {
      return now().range;
    },
    ranges: [grids.units.range, grids.time.range],
    left: () => left,
    height: () => top(names.length) + 22,
    draw(scene) {
      left = measureNames(names) + 12;
      drawAxis(scene, top(names.length) - GRID_GAP + 2, state.clock === "time" ? showTick : (at) => trim(at, 2));
      for (let row = 0; row < names.length; row += 1) drawRow(scene, row);
    },
    hit(scene, x, y) {
      const row = Math.floor((y - 3) / (rowHeight() + GRID_GAP));
      if (row < 0 || row >= names.length || x < scene.left || y > top(row) + rowHeight()) return null;
      const cells = now().rows[row];
      const time = scene.value(x);
      for (const i of inView(cells)) {
        if (cells.pieces[i].some(([low, high]) => low <= time && time < high)) return { row, i };
      }
      return null;
    },
    tip({ row, i }) {
      const cells = now().rows[row];
      const paired = cells.pair[i] < 0 ? [] : ["overlapped with its pair"];
      const times = state.clock === "units" ? [] : [`from ${showTime(cells.start[i])} to ${showTime(cells.start[i] + cells.cost[i])}`];
      const [first, ...others] = cells.places[i];
      const chunks = others.length ? [`${others.length + 1} instructions`] : [];
      return [others.length ? cellName(cells, i) : facts.programs[row].nodeAt(first), ...(others.length ? chunks : [cellName(cells, i)]), names[row], ...times, ...paired];
    },
    choose({ row, i }) {
      selectCell(row, now().rows[row].places[i]);
    },
    move(direction) {
      const { rows, usual } = now();
      const { program, place } = state.selected ?? { program: currentProgram(), place: -1 };
      const [row, i] = neighbour(rows.map((cells) => cells.start), program, cellOf(rows[program], place), direction, usual / 2);
      if (rows[row].places.length) selectCell(row, rows[row].places[i]);
    },
  };
  revealers.push((program, place) => {
    const { rows, range } = now();
    const i = cellOf(rows[program], place);
    if (i >= 0) range.show(rows[program].start[i], rows[program].start[i] + rows[program].cost[i]);
  });
  return view;
}

// Choose all that a cell stands for: a stage under TP, or with experts, is several instructions.
function selectCell(row, places) {
  select(row, places[0], { places });
}

// The cell that stands for an instruction; -1 for what is not computing.
function cellOf(cells, place) {
  if (!cells.of) {
    cells.of = new Map();
    cells.places.forEach((places, i) => places.forEach((one) => cells.of.set(one, i)));
  }
  return cells.of.get(place) ?? -1;
}

// What a cell stands for, in words: "forward, stage 0, microbatch 1".
function cellName(cells, i) {
  const stage = cells.stage[i] === null ? [] : [`stage ${cells.stage[i]}`];
  const microbatch = cells.microbatch[i] === "" ? [] : [`microbatch ${cells.microbatch[i]}`];
  return [PHASES[cells.phase[i]], ...stage, ...microbatch].join(", ");
}

// The cell of an instruction, in words.
function cellAt(number, place) {
  const cells = facts.pipeline.rows[number];
  return cellName(cells, cellOf(cells, place));
}

// A cell is dimmed when all its instructions are.
function cellDimmed(row, cells, i) {
  return dims() && cells.places[i].every((place) => dimmed(row, place));
}

// From when to when each overlapped pair runs; members that are apart have an outline each.
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
    if (high - low - busy < 1e-9) found.push([low, high]);
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
    items.push(legendEntry("outline", "overlapped pair"));
  }
  items.push(legendEntry("empty", "idle"), make("span", {}, "a colour per microbatch"));
  host.replaceChildren(...items);
}

// The switch between units and simulated time, and what each clock says of idle devices.
function fillClocks() {
  byId("idles").textContent = facts.idles;
  byId("idles").hidden = !facts.idles;
  const buttons = [...byId("clock").querySelectorAll("button")];
  const apply = () => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.value === state.clock));
    byId("pipeline-caption").textContent =
      state.clock === "units"
        ? `${trim(facts.pipeline.end, 2)} units, ${showShare(facts.pipeline.idle)} idle`
        : `${showTime(facts.step)} on ${facts.clock}, ${showShare(facts.bubble)} idle`;
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      change({ clock: button.value });
      apply();
    });
  }
  apply();
}
