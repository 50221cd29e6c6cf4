// What the selection needs and what needs it, on all devices: over communication, up to the next pass.

const meetings = new Map(); // by node: where a communication runs

function nodeKey(program, place) {
  return `${program.node[place]} ${program.indices[program.index[place]]}`;
}

facts.programs.forEach((program, number) => {
  for (let place = 0; place < program.count; place += 1) {
    if (program.comm[place] < 0) continue;
    const key = nodeKey(program, place);
    if (!meetings.has(key)) meetings.set(key, []);
    meetings.get(key).push([number, place]);
  }
});

// Where else a communication runs: a send's receive, a receive's send, all other members of a collective.
function peersOf(number, place) {
  const program = facts.programs[number];
  if (program.comm[place] < 0) return [];
  return meetings.get(nodeKey(program, place)).filter(([other, at]) => other !== number || at !== place);
}

// One step of a value, forwards ("out") or backwards ("into").
function stepsOf(number, place, way) {
  const within = dagOf(number)[way][place].filter(([, kind]) => kind === 0).map(([at]) => [number, at]);
  const ends = { send: "out", recv: "into" }[facts.programs[number].opAt(place)] ?? way;
  return ends === way ? [...within, ...peersOf(number, place)] : within;
}

// The places that stay lit, and the hops between programs on the way.
function relatedTo(chosen) {
  if (chosen === null) return { related: null, hops: [] };
  const related = facts.programs.map(() => new Set());
  const hops = [];
  for (const way of ["into", "out"]) {
    const seen = facts.programs.map(() => new Set());
    for (const place of chosen.places) seen[chosen.program].add(place);
    const rest = chosen.places.map((place) => [chosen.program, place]);
    while (rest.length) {
      const [number, place] = rest.pop();
      related[number].add(place);
      for (const [next, at] of stepsOf(number, place, way)) {
        if (next !== number) hops.push(way === "out" ? [number, place, next, at] : [next, at, number, place]);
        if (seen[next].has(at)) continue;
        seen[next].add(at);
        if (facts.ops[facts.programs[next].opAt(at)].carries) rest.push([next, at]);
        else related[next].add(at);
      }
    }
  }
  return { related, hops };
}
