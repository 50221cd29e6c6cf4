// What is selected: what it is, when it runs, what it needs, and the lines that made it.

const MOST_LINKS = 6;
const NEIGHBOURS = [["needs", "into", 0], ["for", "out", 0], ["after", "into", 1], ["before", "out", 1]]; // name, way, kind of edge

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
  add("on", program.title);
  add("planned", `from ${showTime(low)} to ${showTime(high)}`);
  add("runs", ...links(number, places.map((place) => [place, 0]), 0));
  for (const [name, way, kind] of NEIGHBOURS) add(name, ...outside(way, kind));
}

function describeOne(chosen, add) {
  const program = facts.programs[chosen.program];
  const { place } = chosen;
  const phase = program.phase[place] && program.opAt(place) === "compute" ? `, ${PHASES[program.phase[place]]}` : "";
  add("does", `${facts.ops[program.opAt(place)].label}${phase}`);
  add("on", `${program.title}, stream ${program.streamAt(place)}, instruction ${place} of ${program.count}`);
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
  for (const [name, way, kind] of NEIGHBOURS) add(name, ...links(chosen.program, graph[way][place], kind));
  const peers = peersOf(chosen.program, place).slice(0, MOST_LINKS); // the same communication on other devices
  add("meets", ...peers.map(([number, at]) => linkTo(`${facts.ops[facts.programs[number].opAt(at)].label} on ${facts.programs[number].title}`, () => select(number, at))));
}

// Neighbours by one kind of edge, each a way to go there.
function links(number, edges, kind) {
  const program = facts.programs[number];
  const found = edges.filter(([, of]) => of === kind);
  const shown = found.slice(0, MOST_LINKS).map(([place, , by]) => {
    const said = kind && by >= 0 && facts.strategy[by] ? ` (${facts.strategy[by].title})` : "";
    return make("span", {}, linkTo(program.nodeAt(place), () => select(number, place)), said);
  });
  if (found.length > MOST_LINKS) shown.push(`and ${found.length - MOST_LINKS} more`);
  return shown;
}

// A directive as a way to its place in the strategy and its line of source.
function directiveLink(number) {
  const said = facts.strategy[number];
  return said ? linkTo(said.title, () => change({ pinned: number })) : `directive #${number}`;
}
