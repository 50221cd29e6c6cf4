// The streams of one device: planned above, measured below, on one axis of time.

const BAR = 24;
const LANE_GAP = 9;
const LONGER = 1.5; // times as long as planned: marked
const SHORTER = 1 / LONGER;

// Instructions by stream, compute first, with the times of one clock.
const lanesOf = once((number) => {
  const program = facts.programs[number];
  const order = program.streams.map((name, i) => i).sort((a, b) => (program.streams[b] === "compute") - (program.streams[a] === "compute"));
  const lanes = order.map((stream) => ({ name: program.streams[stream], places: [], planned: [] }));
  for (let place = 0; place < program.count; place += 1) {
    const lane = lanes[order.indexOf(program.stream[place])];
    lane.places.push(place);
    lane.planned.push(program.start[place]);
  }
  return lanes;
});

const measuredOf = (device) => facts.measured[device] ?? null;
const measuredEnd = Math.max(0, ...Object.values(facts.measured).map((run) => run.end));
const hasMeasured = measuredEnd > 0;

// How much the planned clock is drawn out, so that both steps are equally long.
function stretchFactor() {
  return hasMeasured && state.stretch ? measuredEnd / Math.max(1, facts.step) : 1;
}

function timeEnd() {
  return Math.max(facts.step * stretchFactor(), measuredEnd, 1);
}

const timeRange = new Range(timeEnd(), timeEnd() / 4000);
const onPath = new Set(facts.path.map(([program, place]) => `${program}:${place}`));

function timelineView() {
  let left = 80;
  const perLane = () => (measuredOf(state.device) ? 2 * BAR + 2 : BAR);
  const top = (lane) => 4 + lane * (perLane() + LANE_GAP);
  const lanes = () => lanesOf(currentProgram());

  // Both clocks of an instruction, in the ticks that are drawn.
  function spanOf(place, measured) {
    const program = facts.programs[currentProgram()];
    if (measured) {
      const run = measuredOf(state.device);
      return [run.start[place], run.length[place]];
    }
    const factor = stretchFactor();
    return [program.start[place] * factor, program.length[place] * factor];
  }

  function drawBars(scene, lane, y, measured) {
    const { context } = scene;
    const number = currentProgram();
    const program = facts.programs[number];
    const scale = (scene.right - scene.left) / timeRange.span;
    let reached = -Infinity; // so many bars end before this pixel that drawing more would show nothing new
    for (const place of lane.places) {
      const [start, length] = spanOf(place, measured);
      if (start + length < timeRange.low) continue;
      if (start > timeRange.high) break;
      const x = scene.x(start);
      const width = Math.max(length * scale, 1);
      const waited = (measured ? measuredOf(state.device) : program).waited[place] * (measured ? 1 : stretchFactor()) * scale;
      if (waited > 2) drawWait(context, x, y, waited, dimmed(number, place));
      if (x + width < reached + 0.4 && !isSelected(number, place)) continue;
      reached = x + width;
      const inset = width > 4 ? 0.5 : 0;
      context.globalAlpha = dimmed(number, place) ? 0.13 : 1;
      const colour = ink(program.phase[place], program.microbatchAt(place));
      box(context, x + inset, y, width - 2 * inset, BAR, colour);
      if (width > 26) barText(scene, program, place, x, y, width, colour);
      if (measured) markDifference(context, place, x, y, width);
      else if (state.critical && onPath.has(`${number}:${place}`)) {
        context.fillStyle = paper().text;
        context.fillRect(x, y + BAR - 3, width, 3);
      }
      context.globalAlpha = 1;
      if (isSelected(number, place) && (width > 6 || state.selected.places.length === 1)) outline(context, x, y, width, BAR, accent(), 3);
    }
  }

  // A thin line before a communication: it was its turn, but its peers were not ready.
  function drawWait(context, x, y, width, dim) {
    context.globalAlpha = dim ? 0.13 : 0.6;
    context.fillStyle = paper().faint;
    context.fillRect(x - width, y + BAR / 2 - 1, width - 1, 2);
    context.fillRect(x - width, y + BAR / 2 - 4, 1.5, 8);
    context.globalAlpha = 1;
  }

  function barText(scene, program, place, x, y, width, colour) {
    const low = Math.max(x, scene.left);
    const high = Math.min(x + width, scene.right);
    const text = captionIn(scene.context, program, place, high - low - 8);
    if (text) write(scene.context, text, (low + high) / 2, y + BAR / 2 + 0.5, { size: 11, colour: colour.text });
  }

  function markDifference(context, place, x, y, width) {
    const ratio = differenceOf(state.device, place);
    if (ratio === null || (ratio < LONGER && ratio > SHORTER)) return;
    context.fillStyle = ratio >= LONGER ? warm() : accent();
    context.fillRect(x, y + BAR - 3, width, 3);
  }

  // Thin lines from where an instruction was planned to where it was measured.
  function drawShifts(scene, lane, y) {
    const { context } = scene;
    const scale = (scene.right - scene.left) / timeRange.span;
    for (const place of lane.places) {
      const [planned, length] = spanOf(place, false);
      const [start, took] = spanOf(place, true);
      if (Math.max(planned, start) < timeRange.low || Math.min(planned, start) > timeRange.high) continue;
      if (Math.min(length, took) * scale < 10) continue;
      context.globalAlpha = isSelected(currentProgram(), place) ? 1 : dimmed(currentProgram(), place) ? 0.08 : 0.35;
      line(context, paper().faint, 1, [scene.x(planned) + 1, y + BAR - 2], [scene.x(start) + 1, y + BAR + 4]);
    }
    context.globalAlpha = 1;
  }

  function drawLane(scene, lane, row) {
    const { context } = scene;
    const y = top(row);
    const measured = measuredOf(state.device) !== null;
    scene.clipped(() => {
      strip(context, scene.left + 0.5, y - 1.5, scene.right - scene.left - 1, perLane() + 3, 4);
      drawBars(scene, lane, y, false);
      if (measured) {
        drawBars(scene, lane, y + BAR + 2, true);
        drawShifts(scene, lane, y);
      }
    });
    write(context, lane.name, left - 10, y + (measured ? BAR / 2 : perLane() / 2), { align: "right" });
    if (measured) write(context, "measured", left - 10, y + BAR * 1.5 + 2, { size: 10.5, align: "right", colour: paper().faint });
  }

  const view = {
    ...ofInstructions(lanes),
    name: "Streams of a device",
    range: timeRange,
    left: () => left,
    height: () => top(lanes().length) + 20,
    draw(scene) {
      left = timeLeft();
      drawAxis(scene, top(lanes().length) - LANE_GAP + 2, showTick);
      lanes().forEach((lane, row) => drawLane(scene, lane, row));
    },
    hit(scene, x, y) {
      const row = Math.floor((y - 4) / (perLane() + LANE_GAP));
      const lane = lanes()[row];
      if (!lane || x < scene.left || y - top(row) > perLane()) return null;
      const measured = measuredOf(state.device) !== null && y - top(row) > BAR;
      const slack = (timeRange.span / (scene.right - scene.left)) * 1.5;
      const time = scene.value(x);
      let best = null;
      for (const place of lane.places) {
        const [start, length] = spanOf(place, measured);
        if (start - slack > time) break;
        if (time <= start + length + slack) best = place;
      }
      return best === null ? null : { place: best };
    },
  };
  revealers.push((program, place) => {
    const [start, length] = spanOf(place, false);
    timeRange.show(start, start + length);
  });
  return view;
}

// What drawings do whose hits are instructions of the device in view.
function ofInstructions(lanes) {
  return {
    tip: ({ place }) => tipOf(currentProgram(), place),
    point: (hit) => hover(currentProgram(), hit ? hit.place : null),
    choose: ({ place }) => select(currentProgram(), place),
    move: (direction) => moveAlong(lanes(), direction),
  };
}

// The names of devices, streams and memory take the same room, so that their axes agree.
function timeLeft() {
  const names = [...facts.programs[currentProgram()].streams, "1023 MiB", ...deviceRows.slice(0, 64).map((row) => row.name)];
  return Math.min(measureNames([...names, hasMeasured ? "measured, 100 %" : "100 % idle"]), 130) + 18;
}

// Move the selection within a stream, or to what runs at the same time in the next.
function moveAlong(lanes, direction) {
  const number = currentProgram();
  const program = facts.programs[number];
  const place = state.selected && state.selected.program === number ? state.selected.place : null;
  const own = place === null ? 0 : lanes.findIndex((lane) => lane.places.includes(place));
  if (own < 0) return select(number, lanes[0].places[firstAfter(lanes[0].planned, program.start[place] + 1)]);
  const [row, at] = neighbour(lanes.map((lane) => lane.planned), own, lanes[own].places.indexOf(place), direction, 1);
  return select(number, lanes[row].places[at]);
}

// How many times longer an instruction took than planned, on clocks made equally long.
function differenceOf(device, place) {
  const run = measuredOf(device);
  const program = facts.programs[programOf.get(device)];
  if (!run || !program.length[place]) return null;
  return run.length[place] / (program.length[place] * (measuredEnd / Math.max(1, facts.step)));
}

function tipOf(number, place, device = state.device) {
  const program = facts.programs[number];
  const op = program.opAt(place);
  const lines = [program.nodeAt(place), `${op === "compute" ? PHASES[program.phase[place]] : facts.ops[op].label}, on stream ${program.streamAt(place)}`];
  lines.push(`planned at ${showTime(program.start[place])} for ${showTime(program.length[place])}`);
  const run = programOf.get(device) === number ? measuredOf(device) : null;
  if (run) {
    lines.push(`measured at ${showTime(run.start[place])} for ${showTime(run.length[place])}`);
  }
  const waited = (run ?? program).waited[place];
  if (waited > 0) lines.push(`after waiting ${showTime(waited)} for its peers`);
  if (program.comm[place] >= 0) lines.push(`${showBytes(program.nbytes[place])} over ${program.commNames[program.comm[place]]}`);
  return lines;
}

function timelineLegend() {
  const items = [
    make("span", {}, make("i", { style: `background:${paper().quiet}` }), "for the whole step"),
    legendEntry("wait", "waits for its peers"),
  ];
  if (hasMeasured) {
    items.push(legendEntry("late", `took over ${LONGER} times its planned share of the step`), legendEntry("early", `under ${SHORTER.toFixed(2)} times`));
  }
  if (state.critical) items.push(legendEntry("onpath", "on the critical path"));
  byId("timeline-legend").replaceChildren(...items);
}
