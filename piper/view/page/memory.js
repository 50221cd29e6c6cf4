// Memory over time: the device in view filled, the other programs as lines, on the axis of the streams.

const CHART = 190;

function memoryLegend() {
  const items = [legendEntry("level", "this device, planned")];
  if (hasMeasured) items.push(legendEntry("dashes", "by the measured clock"));
  if (facts.programs.length > 1) items.push(legendEntry("hair", "other devices, planned"));
  byId("memory-legend").replaceChildren(...items);
}

function memoryView() {
  const peak = () => Math.max(...facts.programs.map((program) => program.memory.peak), 1);
  // What a device has is on the axis where the drawing stays readable with it; the caption always says it.
  const inScale = (usable) => usable !== null && usable < 4 * peak();
  const highest = () => Math.max(peak(), ...facts.programs.map((program) => (inScale(program.usable) ? program.usable : 0)));
  let left = 80;

  const y = (bytes) => 12 + (CHART - 12) * (1 - bytes / (highest() * 1.08));

  // The corners of a step line within what is seen.
  function trace(scene, memory, factor, end) {
    const { context } = scene;
    const first = firstAfter(memory.times, timeRange.low / factor);
    let level = y(memory.live[first] ?? memory.resident);
    context.moveTo(Math.max(scene.x(memory.times[first] * factor), scene.left), level);
    let reached = -Infinity;
    for (let i = first + 1; i < memory.times.length; i += 1) {
      const x = scene.x(memory.times[i] * factor);
      const next = y(memory.live[i]);
      if (x - reached > 0.3 || Math.abs(next - level) > 0.5) {
        context.lineTo(x, level);
        context.lineTo(x, next);
        reached = x;
        level = next;
      }
      if (memory.times[i] * factor > timeRange.high) break;
    }
    context.lineTo(Math.min(scene.x(end), scene.right), level);
  }

  function drawOthers(scene) {
    const { context } = scene;
    context.lineWidth = 1;
    context.strokeStyle = paper().faint;
    context.globalAlpha = 0.45;
    facts.programs.slice(0, 64).forEach((program, number) => {
      if (number === currentProgram()) return;
      context.beginPath();
      trace(scene, program.memory, stretchFactor(), facts.step * stretchFactor());
      context.stroke();
    });
    context.globalAlpha = 1;
  }

  // When the selection runs.
  function drawChosen(scene) {
    if (state.selected?.program !== currentProgram()) return;
    const [low, high] = spanOf(state.selected).map((at) => scene.x(at * stretchFactor()));
    scene.context.globalAlpha = 0.25;
    scene.context.fillStyle = accent();
    scene.context.fillRect(low, 0, Math.max(2, high - low), CHART);
    scene.context.globalAlpha = 1;
  }

  function drawOwn(scene) {
    const { context } = scene;
    const { memory } = facts.programs[currentProgram()];
    const factor = stretchFactor();
    const colour = accent();
    const end = facts.step * factor;
    context.beginPath();
    trace(scene, memory, factor, end);
    context.lineTo(Math.min(scene.x(end), scene.right), y(0));
    context.lineTo(scene.left, y(0));
    context.closePath();
    context.globalAlpha = 0.16;
    context.fillStyle = colour;
    context.fill();
    context.fillRect(scene.left, y(memory.resident), Math.min(scene.x(end), scene.right) - scene.left, y(0) - y(memory.resident));
    context.globalAlpha = 1;
    context.lineWidth = 1.75;
    context.strokeStyle = colour;
    context.beginPath();
    trace(scene, memory, factor, end);
    context.stroke();
    const run = measuredOf(state.device);
    if (run) {
      context.setLineDash([5, 4]);
      context.strokeStyle = warm();
      context.beginPath();
      trace(scene, run.memory, 1, run.end);
      context.stroke();
      context.setLineDash([]);
    }
    drawPeak(scene, memory, factor);
  }

  function drawPeak(scene, memory, factor) {
    const { context } = scene;
    const at = memory.times[memory.live.indexOf(memory.peak)];
    if (at === undefined) return;
    const x = scene.x(at * factor);
    if (x < scene.left || x > scene.right) return;
    context.fillStyle = accent();
    context.beginPath();
    context.arc(x, y(memory.peak), 4, 0, 7);
    context.fill();
    setFont(context, 12, 600);
    const text = `peak ${showBytes(memory.peak)}`;
    const before = x + 12 + context.measureText(text).width > scene.right;
    write(context, text, before ? x - 8 : x + 8, y(memory.peak) - 2, { weight: 600, align: before ? "right" : "left", baseline: "bottom" });
  }

  function drawCapacity(scene) {
    const { usable } = facts.programs[currentProgram()];
    if (!inScale(usable)) return;
    const { context } = scene;
    context.setLineDash([2, 3]);
    line(context, warm(), 1.5, [scene.left, y(usable)], [scene.right, y(usable)]);
    context.setLineDash([]);
    write(context, `to use: ${showBytes(usable)}`, scene.right - 6, y(usable) + 3, { size: 11, align: "right", baseline: "top", colour: warm() });
  }

  // Round numbers of bytes up to the highest level.
  function levels() {
    const unit = 2 ** Math.floor(Math.log2(highest() / 3));
    return Array.from({ length: Math.floor((highest() * 1.06) / unit) + 1 }, (_, i) => i * unit);
  }

  // The level of memory at a time.
  const levelAt = (memory, time) => memory.live[firstAfter(memory.times, time + 0.5)] ?? memory.resident;

  return {
    name: "Memory over time",
    range: timeRange,
    left: () => left,
    height: () => CHART + 24,
    draw(scene) {
      left = timeLeft();
      drawScale(scene, levels(), y, (bytes) => (bytes ? showBytes(bytes) : "0"));
      drawAxis(scene, CHART, showTick);
      scene.clipped(() => {
        drawChosen(scene);
        drawOthers(scene);
        drawOwn(scene);
        drawCapacity(scene);
      });
    },
    hit(scene, x, y) {
      return x >= scene.left && x <= scene.right && y < CHART ? { time: scene.value(x) } : null;
    },
    tip({ time }) {
      const program = facts.programs[currentProgram()];
      const planned = levelAt(program.memory, time / stretchFactor());
      const run = measuredOf(state.device);
      const lines = [showBytes(planned), `at ${showTime(time)}, devices ${program.name}`, `${showBytes(program.memory.resident)} of it held between steps`];
      if (run) lines.push(`by the measured clock ${showBytes(levelAt(run.memory, time))}`);
      return lines;
    },
    choose() {
      const program = facts.programs[currentProgram()];
      select(currentProgram(), program.memory.peakAt);
    },
    move: (direction) => timeRange.go(direction),
  };
}
