// The dependencies of one device: a lane per stream, a column per step of the longest chain.

const NODE = 26;
const NODE_GAP = 34;
const NODE_WIDTH = 72; // at first
const FAR = 12; // columns: longer edges are faint

// Where each node stands: its column is the length of the longest chain to it.
const dagOf = once((number) => {
  const program = facts.programs[number];
  const column = new Array(program.count).fill(0);
  const edges = []; // from, to, kind, directive
  for (let i = 0; i < program.data.length; i += 2) edges.push([program.data[i], program.data[i + 1], 0, -1]);
  for (let i = 0; i < program.temporal.length; i += 3) edges.push([program.temporal[i], program.temporal[i + 1], 1, program.temporal[i + 2]]);
  const [into, out] = [1, 2].map(() => Array.from({ length: program.count }, () => []));
  for (const [from, to, kind, by] of edges.sort((a, b) => a[1] - b[1])) {
    into[to].push([from, kind, by]);
    out[from].push([to, kind, by]);
  }
  const last = new Map();
  for (let place = 0; place < program.count; place += 1) {
    let depth = 0;
    for (const [source] of into[place]) if (source < place) depth = Math.max(depth, column[source] + 1);
    const before = last.get(program.stream[place]);
    if (before !== undefined) depth = Math.max(depth, column[before] + 1);
    column[place] = depth;
    last.set(program.stream[place], place);
  }
  bringLate(program, column, out);
  const lanes = lanesOf(number);
  const lane = new Array(program.count);
  lanes.forEach((entry, row) => entry.places.forEach((place) => { lane[place] = row; }));
  edges.sort((a, b) => column[a[0]] - column[b[0]]);
  return { column, into, out, lane, lanes, edges, end: Math.max(0, ...column) + 1 };
});

// Move what needs nothing right before what needs it: its place says when it is used.
function bringLate(program, column, out) {
  const next = new Map();
  for (let place = program.count - 1; place >= 0; place -= 1) {
    if (facts.ops[program.opAt(place)].needsNothing) {
      const after = out[place].map(([user]) => column[user]);
      if (next.has(program.stream[place])) after.push(next.get(program.stream[place]));
      if (after.length) column[place] = Math.max(column[place], Math.min(...after) - 1);
    }
    next.set(program.stream[place], column[place]);
  }
}

function columnsAtFirst() {
  return Math.max(4, Math.round((byId("dag").clientWidth - 90) / NODE_WIDTH));
}

const dagRange = new Range(dagOf(currentProgram()).end, Math.min(6, dagOf(currentProgram()).end));
dagRange.set(0, columnsAtFirst());

function dagView() {
  let left = 80;
  const dag = () => dagOf(currentProgram());
  const top = (row) => 26 + row * (NODE + NODE_GAP);
  const focus = () => {
    const chosen = state.hovered ?? state.selected;
    return chosen && chosen.program === currentProgram() ? chosen.place : null;
  };

  function drawEdge(scene, graph, [from, to, kind], strong) {
    const { context } = scene;
    const x1 = scene.x(graph.column[from] + 0.92);
    const x2 = scene.x(graph.column[to] + 0.08);
    const [a, b] = [graph.lane[from], graph.lane[to]];
    context.setLineDash(kind ? [2, 3] : []);
    context.strokeStyle = strong ? (kind ? warm() : accent()) : paper().faint;
    context.lineWidth = strong ? 2 : 1;
    context.beginPath();
    if (a === b) {
      const near = graph.column[to] - graph.column[from] === 1;
      const y = top(a) + (near ? NODE / 2 : 0);
      const rise = near ? 0 : Math.min(18, 7 + (graph.column[to] - graph.column[from]) * 2) * (kind ? 1.25 : 1);
      context.moveTo(x1, y);
      if (near) context.lineTo(x2, y);
      else context.bezierCurveTo(x1 + 8, y - rise, x2 - 8, y - rise, x2, y);
    } else {
      const down = b > a;
      const y1 = top(a) + (down ? NODE : 0);
      const y2 = top(b) + (down ? 0 : NODE);
      const middle = (y1 + y2) / 2;
      context.moveTo(x1 - 6, y1);
      context.bezierCurveTo(x1 - 6, middle, x2 + 6, middle, x2 + 6, y2);
      context.moveTo(x2 + 3, y2 + (down ? -5 : 5));
      context.lineTo(x2 + 6, y2);
      context.lineTo(x2 + 9, y2 + (down ? -5 : 5));
    }
    context.stroke();
    context.setLineDash([]);
  }

  function drawEdges(scene, graph) {
    const { context } = scene;
    const place = focus();
    const inSight = place !== null && graph.column[place] + 1 > dagRange.low && graph.column[place] < dagRange.high;
    const chosen = inSight ? place : null;
    const wide = (scene.right - scene.left) / dagRange.span;
    const strong = [];
    for (const edge of graph.edges) {
      const [from, to] = edge;
      if (graph.column[to] < dagRange.low - 1 || graph.column[from] > dagRange.high) continue;
      if (from === chosen || to === chosen) strong.push(edge);
      else if (wide > 9) {
        const far = graph.column[to] - graph.column[from] > FAR;
        const dim = dimmed(currentProgram(), from) || dimmed(currentProgram(), to);
        context.globalAlpha = dim ? 0.06 : far ? 0.12 : chosen === null ? 0.6 : 0.25;
        drawEdge(scene, graph, edge, false);
      }
    }
    context.globalAlpha = 1;
    strong.forEach((edge) => drawEdge(scene, graph, edge, true));
  }

  function drawNodes(scene, graph) {
    const { context } = scene;
    const number = currentProgram();
    const program = facts.programs[number];
    const wide = ((scene.right - scene.left) / dagRange.span) * 0.84;
    for (let place = 0; place < program.count; place += 1) {
      const column = graph.column[place];
      if (column + 1 < dagRange.low || column > dagRange.high) continue;
      const x = scene.x(column + 0.08);
      const y = top(graph.lane[place]);
      const colour = ink(program.phase[place], program.microbatchAt(place));
      context.globalAlpha = dimmed(number, place) ? 0.13 : 1;
      box(context, x, y, Math.max(wide, 1), NODE, colour);
      if (wide > 30) nodeText(context, program, place, x, y, wide, colour);
      context.globalAlpha = 1;
      if (isSelected(number, place)) outline(context, x - 1, y - 1, wide + 2, NODE + 2, accent(), 3);
    }
  }

  function nodeText(context, program, place, x, y, wide, colour) {
    const text = captionIn(context, program, place, wide - 6) ?? shortened(context, caption(program, place).split(" ")[0], wide - 4);
    write(context, text, x + wide / 2, y + NODE / 2 + 0.5, { size: 11, colour: colour.text });
  }

  const view = {
    ...ofInstructions(() => dag().lanes),
    name: "Dependencies of a device",
    hovers: true,
    range: dagRange,
    left: () => left,
    height: () => top(dag().lanes.length) - NODE_GAP + 18,
    draw(scene) {
      const graph = dag();
      left = timeLeft();
      graph.lanes.forEach((lane, row) => {
        const { context } = scene;
        const y = top(row) + NODE / 2;
        line(context, paper().line, 1, [left, y + 0.5], [scene.right, y + 0.5]);
        write(context, lane.name, left - 10, y, { align: "right" });
      });
      scene.clipped(() => {
        drawEdges(scene, graph);
        drawNodes(scene, graph);
      });
    },
    hit(scene, x, y) {
      const graph = dag();
      const row = Math.floor((y - 26) / (NODE + NODE_GAP));
      if (!graph.lanes[row] || x < scene.left || y - top(row) > NODE || y < top(row)) return null;
      const column = scene.value(x);
      const place = graph.lanes[row].places.find((p) => graph.column[p] <= column && column < graph.column[p] + 1);
      return place === undefined ? null : { place };
    },
  };
  listen((update) => {
    if (!("device" in update)) return;
    const { end } = dag();
    dagRange.end = end;
    dagRange.least = Math.min(6, end);
    dagRange.set(0, columnsAtFirst());
  });
  revealers.push((program, place) => {
    const graph = dagOf(program);
    dagRange.show(graph.column[place] - 1, graph.column[place] + 2);
  });
  return view;
}
