// What the page knows and what is chosen. Everything that draws listens here.

const facts = JSON.parse(document.getElementById("facts").textContent);
const byId = (id) => document.getElementById(id);

// Each program's instructions point at shared tables; these read them by place.
for (const program of facts.programs) {
  program.count = program.op.length;
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
  selected: null, // {program, place}
  hovered: null,
  lit: null, // the directive that is pointed at
  pinned: null, // the directive that was clicked
  stretch: false,
  critical: false,
  theme: "auto",
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
  for (const listener of listeners) listener(update);
}

function currentProgram() {
  return programOf.get(state.device);
}

// Choose an instruction, and the device that runs it.
function select(program, place, options = {}) {
  const update = { selected: { program, place } };
  if (programOf.get(state.device) !== program) update.device = facts.programs[program].devices[0];
  change(update);
  byId("live").textContent = told(program, place);
  if (options.reveal) {
    for (const reveal of revealers) reveal(program, place);
  }
}

// Point at an instruction, or at none.
function hover(program, place) {
  const before = state.hovered === null ? null : state.hovered.place;
  if (before !== place) change({ hovered: place === null ? null : { program, place } });
}

const revealers = []; // scroll a drawing to an instruction

// Whether a directive that is pointed at, or clicked, left an instruction alone.
function dimmed(program, place) {
  const directive = state.lit ?? state.pinned;
  if (directive === null) return false;
  return !facts.programs[program].originAt(place).includes(directive);
}

function isSelected(program, place) {
  return state.selected !== null && state.selected.program === program && state.selected.place === place;
}
