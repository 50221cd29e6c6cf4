// The same facts as tables, for reading, copying and screen readers. Long ones are filled when opened.

function table(headings, rows) {
  const head = make("tr", {}, ...headings.map(([text, kind]) => make("th", { scope: "col", class: kind === "right" || kind === "bar" ? kind : null }, text)));
  const body = rows.map(({ cells, go }) => {
    const row = make("tr", go ? { class: "go" } : {});
    cells.forEach((cell, i) => {
      const kind = headings[i][1];
      const content = go && i === 0 ? linkTo(cell, go) : cell;
      row.append(make("td", { class: kind ?? null }, content));
    });
    return row;
  });
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
}

// A row about an instruction, which leads to it.
function entry(number, place, ...cells) {
  return { cells, go: () => select(number, place) };
}

function bar(share) {
  return make("span", { style: `width:${Math.max(1, 100 * share).toFixed(1)}%` });
}

// Fill a table when its <details> opens, and again when what it shows changes.
function whenOpen(host, fill, keys) {
  const details = host.closest("details");
  const refill = () => details.open && host.replaceChildren(fill());
  details.addEventListener("toggle", refill);
  listen((update) => keys.some((key) => key in update) && refill());
  refill();
}

function fillComms() {
  const host = byId("comms");
  if (!facts.comms.length) {
    host.append(make("p", { class: "faint" }, "Nothing travels: one device."));
    return;
  }
  const most = Math.max(...facts.comms.map((comm) => comm.nbytes), 1);
  const rows = facts.comms.slice(0, 40).map((comm) => ({
    cells: [make("span", { title: `groups ${comm.groups.join("; ")}` }, comm.name), facts.ops[comm.op].label, String(comm.times), showBytes(comm.nbytes), bar(comm.nbytes / most)],
  }));
  host.append(table([["communicator", "code"], ["does", "short"], ["times", "right"], ["bytes", "right"], ["", "bar"]], rows));
  if (facts.comms.length > 40) host.append(make("p", { class: "faint" }, `and ${facts.comms.length - 40} smaller ones`));
}

const REASONS = { first: "began the step", stream: "its stream was busy", event: "needed a value", peer: "a peer was ready last" };

function fillPath() {
  const total = new Map();
  facts.path.forEach(([number, place]) => {
    const program = facts.programs[number];
    const op = program.opAt(place);
    const kind = op === "compute" ? `compute, ${PHASES[program.phase[place]]}` : facts.ops[op].label;
    const sum = total.get(kind) ?? { time: 0, count: 0, first: [number, place] };
    total.set(kind, { time: sum.time + program.length[place], count: sum.count + 1, first: sum.first });
  });
  const rows = [...total.entries()].sort((a, b) => b[1].time - a[1].time);
  const most = Math.max(1, ...rows.map(([, sum]) => sum.time));
  byId("path-caption").textContent = `the critical path: ${plural(facts.path.length, "instruction")}`;
  byId("path").append(
    table(
      [["spent in"], ["instructions", "right"], ["time", "right"], ["", "bar"]],
      rows.map(([kind, sum]) => entry(...sum.first, kind, String(sum.count), showTime(sum.time), bar(sum.time / most))),
    ),
    pathSteps(),
  );
}

// Every instruction of the path, with why it did not start earlier.
function pathSteps() {
  const host = make("div");
  const details = make("details", { class: "alternative" }, make("summary", {}, "Step by step"), host);
  whenOpen(host, () => table(
    [["node", "code"], ["devices", "right"], ["at", "right"], ["for", "right"], ["not earlier because"]],
    facts.path.map(([number, place, reason]) => {
      const program = facts.programs[number];
      return entry(number, place, program.nodeAt(place), program.name, showTime(program.start[place]), showTime(program.length[place]), REASONS[reason]);
    }),
  ), []);
  return details;
}

function peakTable() {
  const { memory } = facts.programs[currentProgram()];
  const most = Math.max(1, ...memory.atPeak.map(([, bytes]) => bytes));
  const rows = memory.atPeak.map(([name, bytes]) => ({ cells: [name, showBytes(bytes), bar(bytes / most)] }));
  const found = table([["what", "code"], ["bytes", "right"], ["", "bar"]], rows);
  return memory.more ? make("div", {}, found, make("p", { class: "faint" }, `and ${plural(memory.more, "smaller one")}`)) : found;
}

function pipelineTable() {
  const grid = facts.pipeline;
  const letter = { F: "F", R: "R", B: "B", BI: "I", BW: "W" };
  const rows = grid.names.map((name, row) => {
    const cells = grid.rows[row];
    const words = cells.start.map((start, i) => `${cells.stage[i] ?? ""}${letter[cells.phase[i]]}${cells.microbatch[i]}`);
    return { cells: [name, words.join(" ")] };
  });
  return table([["devices"], ["in order: stage, pass, microbatch", "code"]], rows);
}

function instructionsTable() {
  const number = currentProgram();
  const program = facts.programs[number];
  const rows = program.op.map((_, place) =>
    entry(number, place, program.nodeAt(place), String(place), program.streamAt(place), facts.ops[program.opAt(place)].label, showTime(program.start[place]), showTime(program.length[place])));
  return table([["node", "code"], ["place", "right"], ["stream"], ["does"], ["at", "right"], ["for", "right"]], rows);
}

function edgesTable() {
  const number = currentProgram();
  const program = facts.programs[number];
  const rows = dagOf(number).edges.slice(0, 3000).map(([from, to, kind]) => entry(number, from, program.nodeAt(from), program.nodeAt(to), kind ? "order" : "data"));
  return table([["from", "code"], ["to", "code"], ["because of"]], rows);
}

// The instructions that took longest beyond their share of the planned step.
function differencesTable() {
  const run = measuredOf(state.device);
  if (!run) return make("p", { class: "faint" }, "This device was not measured.");
  const number = currentProgram();
  const program = facts.programs[number];
  const factor = measuredEnd / Math.max(1, facts.step);
  const found = run.length
    .map((took, place) => ({ place, took, planned: program.length[place] * factor }))
    .sort((a, b) => Math.abs(b.took - b.planned) - Math.abs(a.took - a.planned))
    .slice(0, 8);
  return table(
    [["node", "code"], ["planned share", "right"], ["measured", "right"], ["difference", "right"]],
    found.map(({ place, took, planned }) =>
      entry(number, place, program.nodeAt(place), showTime(planned), showTime(took), `${took > planned ? "+" : "−"}${showTime(Math.abs(took - planned))}`)),
  );
}
