// What is selected: what it is, when it runs, what it needs, and the lines that made it.

const MOST_LINKS = 6;

function showDetails() {
  const host = byId("details");
  const chosen = state.selected;
  if (chosen === null) {
    host.replaceChildren(make("p", { class: "faint" }, "Click a cell, a bar or a node, or reach a drawing with Tab and use the arrow keys. Wheel, + and − zoom; dragging pans; 0 shows all."));
    return;
  }
  const { place } = chosen;
  const rows = make("dl");
  const add = (name, ...values) => values.length && rows.append(make("dt", {}, name), ...values.map((value) => make("dd", {}, value)));
  const several = chosen.places.length > 1;
  if (several) describeCell(chosen, add);
  else describeOne(chosen, add);
  add("made by", ...originsOf(chosen).map(directiveLink));
  const title = several ? cellAt(chosen.program, place) : facts.programs[chosen.program].nodeAt(place);
  host.replaceChildren(make("p", { class: "what" }, title), rows);
}

// All that a cell of the pipeline stands for, and what it needs from elsewhere.
function describeCell({ program: number, places }, add) {
  const program = facts.programs[number];
  const [low, high] = spanOf(state.selected);
  const own = new Set(places);
  const graph = dagOf(number);
  const outside = (way, kind) => {
    const edges = new Map(places.flatMap((place) => graph[way][place]).filter(([at, of]) => of === kind && !own.has(at)).map((edge) => [edge[0], edge]));
    return links(number, [...edges.values()], kind);
  };
  add("on", `${program.devices.length > 1 ? "devices" : "device"} ${program.name}`);
  add("planned", `from ${showTime(low)} to ${showTime(high)}`);
  add("runs", ...links(number, places.map((place) => [place, 0]), 0));
  add("needs", ...outside("into", 0));
  add("for", ...outside("out", 0));
  add("after", ...outside("into", 1));
  add("before", ...outside("out", 1));
}

function describeOne(chosen, add) {
  const program = facts.programs[chosen.program];
  const { place } = chosen;
  const phase = program.phase[place] && program.opAt(place) === "compute" ? `, ${PHASES[program.phase[place]]}` : "";
  add("does", `${facts.ops[program.opAt(place)].label}${phase}`);
  add("on", `${program.devices.length > 1 ? "devices" : "device"} ${program.name}, stream ${program.streamAt(place)}, instruction ${place} of ${program.count}`);
  add("planned", `at ${showTime(program.start[place])}, for ${showTime(program.length[place])}`);
  const run = measuredOf(state.device);
  if (run && chosen.program === currentProgram()) {
    const ratio = differenceOf(state.device, place);
    const share = ratio === null ? "" : `; ${ratio.toFixed(2)} times its planned share of the step`;
    add("measured", `at ${showTime(run.start[place])}, for ${showTime(run.length[place])}${share}`);
  }
  if (program.microbatchAt(place)) add("microbatch", program.microbatchAt(place));
  if (program.comm[place] >= 0) add("moves", `${showBytes(program.nbytes[place])} over ${program.commNames[program.comm[place]]}`);
  const graph = dagOf(chosen.program);
  add("needs", ...links(chosen.program, graph.into[place], 0));
  add("for", ...links(chosen.program, graph.out[place], 0));
  add("after", ...links(chosen.program, graph.into[place], 1));
  add("before", ...links(chosen.program, graph.out[place], 1));
  add("meets", ...peersOf(chosen.program, place).slice(0, MOST_LINKS).map(([other, at]) => peerLink(other, at)));
}

// Neighbours by one kind of edge, each a way to go there.
function links(number, edges, kind) {
  const program = facts.programs[number];
  const found = edges.filter(([, of]) => of === kind);
  const shown = found.slice(0, MOST_LINKS).map(([place, , by]) => {
    const go = make("button", { type: "button", class: "link", onclick: () => select(number, place, { reveal: true }) }, program.nodeAt(place));
    const said = kind && by >= 0 && facts.strategy[by] ? ` (${facts.strategy[by].title})` : "";
    return make("span", {}, go, said);
  });
  if (found.length > MOST_LINKS) shown.push(`and ${found.length - MOST_LINKS} more`);
  return shown;
}

// The same communication on other devices.
function peerLink(number, place) {
  const program = facts.programs[number];
  const words = `${facts.ops[program.opAt(place)].label} on ${program.devices.length > 1 ? "devices" : "device"} ${program.name}`;
  return make("button", { type: "button", class: "link", onclick: () => select(number, place, { reveal: true }) }, words);
}

// A directive as a way to its place in the strategy and its line of source.
function directiveLink(number) {
  const said = facts.strategy[number];
  if (!said) return `directive #${number}`;
  return make(
    "button",
    {
      type: "button",
      class: "link",
      onclick: () => change({ pinned: number }),
    },
    said.title,
  );
}
