// All devices on one axis of time: computing above, communication below it, planned and measured.

// The rows: the planned step of each program, then the measured step of each of its devices.
const deviceRows = facts.programs.flatMap((program, number) => [
  { number, device: null, name: program.title, kind: hasMeasured ? "planned" : "" },
  ...program.devices.filter((device) => measuredOf(device)).map((device) => ({ number, device, name: `device ${device}`, kind: "measured" })),
]);

// When instructions run by a clock, in order of time; those that are no farther apart than some ticks are one.
function spansOf(clock, places, apart) {
  const found = [];
  for (const place of [...places].sort((a, b) => clock.start[a] - clock.start[b])) {
    const [low, high] = [clock.start[place], clock.start[place] + clock.length[place]];
    const last = found[found.length - 1];
    if (last && low <= last[1] + apart) last[1] = Math.max(last[1], high);
    else found.push([low, high]);
  }
  return found;
}

// What of intervals lies outside others; neither overlap, and all are in order.
function outside(intervals, busy) {
  const found = [];
  let next = 0;
  for (const [low, high] of intervals) {
    while (busy[next]?.[1] <= low) next += 1;
    let from = low;
    for (let i = next; i < busy.length && busy[i][0] < high; i += 1) {
      if (busy[i][0] > from) found.push([from, busy[i][0]]);
      from = Math.max(from, busy[i][1]);
    }
    if (from < high) found.push([from, high]);
  }
  return found;
}

// The work of a row: its clock, what computes, what communicates, and the communication that no computing hides.
function workOf(row) {
  if (row.work) return row.work;
  const program = facts.programs[row.number];
  const clock = row.device === null ? program : measuredOf(row.device);
  const computing = [];
  const moving = [];
  for (let place = 0; place < program.count; place += 1) {
    if (!clock.length[place]) continue;
    if (facts.ops[program.opAt(place)].computes) computing.push(place);
    else if (program.comm[place] >= 0) moving.push(place);
  }
  const byStart = (a, b) => clock.start[a] - clock.start[b];
  computing.sort(byStart);
  const busy = spansOf(clock, computing, 0);
  const talk = spansOf(clock, moving, 0);
  const whole = row.device === null ? facts.step : measuredEnd;
  const idle = 1 - busy.reduce((sum, [low, high]) => sum + high - low, 0) / Math.max(1, whole);
  row.work = { clock, computing, moving: moving.sort(byStart), talk, exposed: outside(talk, busy), idle, runs: runsOf(program, clock, computing) };
  return row.work;
}

// Neighbouring bars of one phase and microbatch: one label for all of them.
function runsOf(program, clock, computing) {
  const runs = [];
  for (const place of computing) {
    const [low, high] = [clock.start[place], clock.start[place] + clock.length[place]];
    const text = program.phase[place] && `${program.phase[place]}${program.microbatchAt(place)}`;
    const last = runs[runs.length - 1];
    if (last && last.text === text) Object.assign(last, { high, busy: last.busy + high - low, places: [...last.places, place] });
    else runs.push({ text, low, high, busy: high - low, places: [place] });
  }
  return runs.filter((run) => run.text && run.busy > 0.6 * (run.high - run.low));
}

function devicesView() {
  const count = deviceRows.length;
  const [tall, thin, gap] = count > 48 ? [7, 3, 3] : count > 16 ? [13, 5, 5] : [22, 7, 9];
  const each = tall + thin + 1 + gap;
  const top = (row) => 4 + row * each;
  const factor = (row) => (row.device === null ? stretchFactor() : 1);
  let left = 80;

  function drawRow(scene, row, index) {
    const { context } = scene;
    const { talk, exposed, idle } = workOf(row);
    const y = top(index);
    const scale = ((scene.right - scene.left) / timeRange.span) * factor(row);
    scene.clipped(() => {
      strip(context, scene.x(0) + 0.5, y - 0.5, Math.max(1, (row.device === null ? facts.step : measuredEnd) * scale - 1), tall + thin + 2);
      drawComputing(scene, row, y, scale);
      context.globalAlpha = dims() ? 0.3 : 1;
      drawTalk(scene, row, talk, y + tall + 1, scale, paper().faint);
      drawTalk(scene, row, exposed, y + tall + 1, scale, warm());
      context.globalAlpha = 1;
      drawChosen(scene, row, y, scale);
    });
    if (count > 48 && index % 4) return;
    const two = tall > 20;
    const size = two ? 12 : 10.5;
    setFont(context, size);
    const colour = row.number === currentProgram() ? paper().text : paper().faint;
    write(context, shortened(context, row.name, left - 14), left - 10, y + (two ? 9 : (tall + thin) / 2), { size, align: "right", colour });
    if (!two) return;
    write(context, [row.kind, `${showShare(idle)} idle`].filter(Boolean).join(", "), left - 10, y + 23, { size: 10.5, align: "right", colour: paper().faint });
  }

  function drawComputing(scene, row, y, scale) {
    const { context } = scene;
    const { clock, computing } = workOf(row);
    const program = facts.programs[row.number];
    let reached = -Infinity; // bars that end before this pixel would show nothing new
    for (const place of computing) {
      const x = scene.x(clock.start[place] * factor(row));
      const width = Math.max(clock.length[place] * scale, 1);
      if (x + width < scene.left) continue;
      if (x > scene.right) break;
      if (x + width < reached + 0.4) continue;
      reached = x + width;
      const colour = ink(program.phase[place], program.microbatchAt(place));
      const inset = width > 5 ? 0.5 : 0;
      context.globalAlpha = dimmed(row.number, place) ? 0.13 : 1;
      box(context, x + inset, y, width - 2 * inset, tall, colour);
    }
    context.globalAlpha = 1;
    if (tall > 12) drawLabels(scene, row, y, scale);
  }

  function drawLabels(scene, row, y, scale) {
    const { context } = scene;
    const program = facts.programs[row.number];
    setFont(context, tall > 20 ? 11.5 : 9.5, 600);
    for (const { text, low, high, places } of workOf(row).runs) {
      const from = Math.max(scene.x(low * factor(row)), scene.left);
      const to = Math.min(scene.x(low * factor(row)) + (high - low) * scale, scene.right);
      if (context.measureText(text).width + 6 > to - from) continue;
      if (places.every((place) => dimmed(row.number, place))) continue;
      centred(context, text, (from + to) / 2, y + tall / 2 + 0.5, ink(program.phase[places[0]], program.microbatchAt(places[0])), places.length > 1);
    }
  }

  function drawTalk(scene, row, intervals, y, scale, colour) {
    const { context } = scene;
    context.fillStyle = colour;
    context.beginPath();
    let reached = -Infinity;
    for (const [low, high] of intervals) {
      const x = scene.x(low * factor(row));
      const width = Math.max((high - low) * scale, 1.2);
      if (x + width < scene.left || x + width < reached + 0.4) continue;
      if (x > scene.right) break;
      reached = x + width;
      context.rect(x, y, width, thin);
    }
    context.fill();
  }

  // The selection, and the communication that belongs to it.
  function drawChosen(scene, row, y, scale) {
    if (state.related === null) return;
    const { context } = scene;
    const program = facts.programs[row.number];
    const { clock, moving } = workOf(row);
    const spot = (place) => [scene.x(clock.start[place] * factor(row)), Math.max(clock.length[place] * scale, 2)];
    context.fillStyle = accent();
    for (const place of moving) {
      if (dimmed(row.number, place)) continue;
      const [x, width] = spot(place);
      context.fillRect(x, y + tall + 1, width, thin);
    }
    if (state.selected.program !== row.number) return;
    const { place, places } = state.selected;
    const spots = places.map(spot);
    const x = Math.min(...spots.map(([low]) => low));
    const width = Math.max(...spots.map(([low, wide]) => low + wide)) - x;
    if (program.comm[place] >= 0) outline(context, x - 1, y + tall - 1, width + 2, thin + 4, accent(), 2);
    else outline(context, x, y - 1, width, tall + 2, accent(), 2.5);
  }

  // How values travel between devices to and from the selection.
  function drawHops(scene) {
    const { context } = scene;
    const at = new Map(deviceRows.map((row, index) => [row.device === null ? row.number : -1, index]));
    context.strokeStyle = accent();
    context.fillStyle = accent();
    context.lineWidth = 1.5;
    for (const [from, sent, to, received] of state.hops) {
      const [a, b] = [facts.programs[from], facts.programs[to]];
      const x1 = scene.x(a.start[sent] * stretchFactor());
      const x2 = scene.x((b.start[received] + b.length[received]) * stretchFactor());
      const down = at.get(to) > at.get(from);
      const y1 = top(at.get(from)) + tall + 1 + (down ? thin : 0);
      const y2 = top(at.get(to)) + tall + 1 + (down ? 0 : thin);
      context.beginPath();
      context.moveTo(x1, y1);
      context.bezierCurveTo(x1, (y1 + y2) / 2, x2, (y1 + y2) / 2, x2, y2);
      context.stroke();
      context.beginPath();
      context.moveTo(x2, y2);
      context.lineTo(x2 - 4, y2 + (down ? -7 : 7));
      context.lineTo(x2 + 4, y2 + (down ? -7 : 7));
      context.fill();
    }
  }

  const view = {
    name: "All devices over time",
    range: timeRange,
    left: () => left,
    height: () => top(count) - gap + 26,
    draw(scene) {
      left = timeLeft();
      drawAxis(scene, top(count) - gap + 4, showTick);
      deviceRows.forEach((row, index) => drawRow(scene, row, index));
      if (state.hops.length) scene.clipped(() => drawHops(scene));
    },
    hit(scene, x, y) {
      const index = Math.floor((y - 4) / each);
      const row = deviceRows[index];
      if (!row || x < scene.left || y - top(index) > tall + thin + 1) return null;
      const { clock, computing, moving } = workOf(row);
      const time = scene.value(x) / factor(row);
      const slack = (timeRange.span / (scene.right - scene.left) / factor(row)) * 1.5;
      let best = null;
      for (const place of y - top(index) > tall ? moving : computing) {
        if (clock.start[place] - slack > time) break;
        if (time <= clock.start[place] + clock.length[place] + slack) best = place;
      }
      return best === null ? null : { row, place: best };
    },
    tip({ row, place }) {
      return [...tipOf(row.number, place, row.device), row.name];
    },
    choose({ row, place }) {
      select(row.number, place, { device: row.device });
    },
    move(direction) {
      const number = currentProgram();
      const lane = lanesOf(number).slice(0, 1);
      if (direction !== "up" && direction !== "down") return moveAlong(lane, direction);
      const next = clamp(number + (direction === "up" ? -1 : 1), facts.programs.length - 1);
      const place = state.selected?.program === number ? state.selected.place : lane[0].places[0];
      const [other] = lanesOf(next);
      const at = Math.min(other.places.length - 1, firstAfter(other.planned, facts.programs[number].start[place] + 1));
      return select(next, other.places[at]);
    },
  };
  return view;
}

function devicesLegend() {
  const entries = [legendEntry("talk", "communication, hidden behind computing"), legendEntry("exposed", "communication that no computing hides"), legendEntry("level", "communication of the selection")];
  byId("devices-legend").replaceChildren(...(facts.comms.length ? entries : []));
  byId("compared").textContent = facts.compared;
  byId("compared").hidden = !facts.compared;
}
