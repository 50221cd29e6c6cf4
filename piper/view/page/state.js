// What the page knows and what is chosen. Everything that draws listens here.

const facts = JSON.parse(document.getElementById("facts").textContent);
const byId = (id) => document.getElementById(id);

// Each program's instructions point at shared tables; these read them by place.
for (const program of facts.programs) {
  program.count = program.op.length;
  program.title = `${program.devices.length > 1 ? "devices" : "device"} ${program.name}`;
  program.opAt = (place) => program.ops[program.op[place]];
  program.nodeAt = (place) => {
    const parts = program.indices[program.index[place]].split(",");
    let next = 0;
    return facts.nodes[program.node[place]].replace(/@(?!\d)/g, () => parts[next++]); // @0,1 are devices
  };
  program.streamAt = (place) => program.streams[program.stream[place]];
  program.microbatchAt = (place) => program.microbatches[program.microbatch[place]];
  program.originAt = (place) => facts.origins[program.origin[place]];
  program.end = program.start.reduce((end, start, place) => Math.max(end, start + program.length[place]), 0);
}

const programOf = new Map();
facts.programs.forEach((program, number) => program.devices.forEach((device) => programOf.set(device, number)));

const state = {
  device: facts.devices[0],
  selected: null, // {program, place, places}: an instruction, or all of a cell of the pipeline
  hovered: null,
  lit: null, // the directive that is pointed at
  pinned: null, // the directive that was clicked
  related: null, // by program: the places that stay lit while an instruction is selected
  hops: [], // how its values travel between programs: [program, place, program, place]
  clock: "units", // of the pipeline: units or time
  stretch: false,
  critical: false,
  theme: "auto",
  printing: false, // drawings stay as paper needs them
};

const listeners = [];

function listen(listener) {
  listeners.push(listener);
}

// What is pointed at matters only to drawings that ask for it.
function onlyHover(update) {
  return "hovered" in update && Object.keys(update).length === 1;
}

function change(update) {
  Object.assign(state, update);
  if ("selected" in update) Object.assign(state, relatedTo(state.selected));
  for (const listener of listeners) listener(update);
}

function currentProgram() {
  return programOf.get(state.device);
}

// Choose an instruction, or several of a cell, and the device that runs them.
function select(program, place, { places = [place], device: of = null } = {}) {
  const update = { selected: { program, place, places }, pinned: null };
  const device = of ?? (programOf.get(state.device) === program ? state.device : facts.programs[program].devices[0]);
  if (device !== state.device) update.device = device;
  change(update);
  byId("live").textContent = places.length > 1 ? describedCell(program, place) : described(program, place);
  for (const reveal of revealers) reveal(program, place);
}

// The directives that made the selection.
function originsOf(chosen) {
  return [...new Set(chosen.places.flatMap((place) => facts.programs[chosen.program].originAt(place)))];
}

// From when to when the selection is planned to run.
function spanOf({ program, places }) {
  const { start, length } = facts.programs[program];
  return [Math.min(...places.map((place) => start[place])), Math.max(...places.map((place) => start[place] + length[place]))];
}

// Point at an instruction, or at none.
function hover(program, place) {
  const before = state.hovered === null ? null : state.hovered.place;
  if (before !== place) change({ hovered: place === null ? null : { program, place } });
}

const revealers = []; // scroll a drawing to an instruction

// Whether something is dimmed: by a directive that is pointed at or clicked, else by the selection.
function dims() {
  return (state.lit ?? state.pinned) !== null || state.related !== null;
}

// Whether an instruction has nothing to do with that directive, or with the selection.
function dimmed(program, place) {
  const directive = state.lit ?? state.pinned;
  if (directive !== null) return !facts.programs[program].originAt(place).includes(directive);
  return state.related !== null && !state.related[program].has(place);
}

function isSelected(program, place) {
  return state.selected !== null && state.selected.program === program && state.selected.places.includes(place);
}

// A function that computes its result for each argument once.
function once(compute) {
  const known = new Map();
  return (key) => {
    if (!known.has(key)) known.set(key, compute(key));
    return known.get(key);
  };
}

function clamp(value, most) {
  return Math.max(0, Math.min(most, value));
}

// Where a key leads from the i-th entry of a row: along the row, or to what runs at the same time in the next one.
// rows: when their entries start, in order. -1: from none.
function neighbour(rows, row, i, direction, slack) {
  if (i < 0) return [row, direction === "last" ? rows[row].length - 1 : 0];
  if (direction === "up" || direction === "down") {
    const next = clamp(row + (direction === "up" ? -1 : 1), rows.length - 1);
    return [next, clamp(firstAfter(rows[next], rows[row][i] + slack), rows[next].length - 1)];
  }
  return [row, clamp({ left: i - 1, right: i + 1, first: 0, last: Infinity }[direction], rows[row].length - 1)];
}
