// Colours, boxes, axes and text on a canvas: what all drawings share.

const HUES = 8;

const look = { colours: facts.colours.light, accent: "", warm: "" }; // asked for at every stroke: kept here

// Take the colours of a scheme.
function wear(theme) {
  if (theme === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.dataset.theme = theme;
  const dark = theme === "auto" ? matchMedia("(prefers-color-scheme: dark)").matches : theme === "dark";
  const style = getComputedStyle(document.documentElement);
  look.colours = facts.colours[dark ? "dark" : "light"];
  look.accent = style.getPropertyValue("--accent").trim();
  look.warm = style.getPropertyValue("--warm").trim();
}

function paper() {
  return look.colours;
}

// The fill, the text on it, and how it is hatched, if at all. A forward that runs again has the first one's fill.
function ink(phase, microbatch) {
  const colours = paper();
  if (!phase) return { fill: colours.quiet, text: colours.text, hatched: null };
  const hue = Number(microbatch.slice(microbatch.lastIndexOf(".") + 1)) % HUES;
  const { fills, text } = colours.phases[phase === "R" ? "F" : phase];
  return { fill: fills[hue], text, hatched: { BW: "up", R: "down" }[phase] ?? null };
}

// The lines of a hatching: their colour, how strong they are, and the angle at which CSS crosses them.
function lines(hatched) {
  if (hatched === "up") return { colour: paper().hatch, alpha: 0.45, across: "135deg" };
  return { colour: paper().phases.F.text, alpha: 0.33, across: "45deg" };
}

function accent() {
  return look.accent;
}

function warm() {
  return look.warm;
}

const FONT = 'system-ui, -apple-system, "Segoe UI", "Liberation Sans", "DejaVu Sans", sans-serif';

function setFont(context, size, weight = 400) {
  context.font = `${weight} ${size}px ${FONT}`;
}

// Text at a point, which is the end or the middle of its line.
function write(context, text, x, y, { size = 12, weight = 400, align = "center", baseline = "middle", colour = paper().text } = {}) {
  setFont(context, size, weight);
  context.textAlign = align;
  context.textBaseline = baseline;
  context.fillStyle = colour;
  context.fillText(text, x, y);
}

// A box with round corners, hatched where its colour alone would not tell what it stands for.
function box(context, x, y, width, height, colour) {
  context.fillStyle = colour.fill;
  context.beginPath();
  if (width > ROUND) context.roundRect(x, y, width, height, 3);
  else context.rect(x, y, width, height);
  context.fill();
  if (colour.hatched && width > 2) {
    context.fillStyle = hatching(context, colour.hatched);
    context.fill();
  }
}

const ROUND = 9; // pixels: narrower boxes have corners, which are quicker
const hatchings = new Map();

// Thin diagonal lines, rising or falling, as a pattern to fill with.
function hatching(context, hatched) {
  const { colour, alpha } = lines(hatched);
  const key = `${hatched} ${colour}`;
  if (!hatchings.has(key)) {
    const tile = document.createElement("canvas");
    const size = 12; // twice, for screens with fine pixels
    tile.width = tile.height = size;
    const pen = tile.getContext("2d");
    pen.strokeStyle = colour;
    pen.globalAlpha = alpha;
    pen.lineWidth = 2;
    pen.beginPath();
    const [from, to] = hatched === "up" ? [size + 2, -2] : [-2, size + 2];
    for (const shift of [-size, 0, size]) {
      pen.moveTo(shift - 2, from);
      pen.lineTo(shift + size + 2, to);
    }
    pen.stroke();
    const pattern = context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(0.5));
    hatchings.set(key, pattern);
  }
  return hatchings.get(key);
}

// The strip that the bars of a row lie on.
function strip(context, x, y, width, height, round = 3) {
  context.fillStyle = paper().idle;
  context.strokeStyle = paper().line;
  context.lineWidth = 1;
  context.beginPath();
  context.roundRect(x, y, width, height, round);
  context.fill();
  context.stroke();
}

// Straight lines from point to point.
function line(context, colour, width, ...points) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
  context.stroke();
}

function outline(context, x, y, width, height, colour, thick = 2) {
  context.strokeStyle = colour;
  context.lineWidth = thick;
  context.beginPath();
  context.roundRect(x, y, Math.max(width, 2), height, 4);
  context.stroke();
}

// Ticks of an axis, and lines through what stands above them.
function drawAxis(scene, bottom, show) {
  const { context, range } = scene;
  const step = niceStep(range.span, scene.right - scene.left, 80);
  const first = Math.ceil(range.low / step);
  for (let i = first; i * step <= range.high + step * 1e-6; i += 1) {
    const at = i * step; // not a running sum, which would drift
    const x = Math.round(scene.x(at)) + 0.5;
    context.globalAlpha = 0.6;
    line(context, paper().line, 1, [x, 0], [x, bottom + 4]);
    context.globalAlpha = 1;
    const text = show(at, step, range.high);
    setFont(context, 11);
    const half = context.measureText(text).width / 2;
    const middle = Math.max(scene.left + half, Math.min(x, scene.right - half));
    write(context, text, middle, bottom + 8, { size: 11, align: "center", baseline: "top", colour: paper().faint });
  }
}

// Values at the left of a chart, and a line through each.
function drawScale({ context, left, right }, values, y, show) {
  for (const value of values) {
    const at = Math.round(y(value)) + 0.5;
    context.globalAlpha = 0.6;
    line(context, paper().line, 1, [left, at], [right, at]);
    context.globalAlpha = 1;
    write(context, show(value), left - 10, at, { size: 11, align: "right", colour: paper().faint });
  }
}

function measureNames(names, size = 12) {
  const context = measureNames.context ?? (measureNames.context = document.createElement("canvas").getContext("2d"));
  setFont(context, size);
  return Math.ceil(Math.max(0, ...names.map((name) => context.measureText(name).width)));
}

// Text in the middle of a bar of several pieces: an outline in the colour of the bar keeps it readable over gaps.
function centred(context, text, x, y, colour, halo) {
  context.textAlign = "center";
  context.textBaseline = "middle";
  if (halo) {
    context.strokeStyle = colour.fill;
    context.lineWidth = 5;
    context.lineJoin = "round";
    context.strokeText(text, x, y);
  }
  context.fillStyle = colour.text;
  context.fillText(text, x, y);
}

// A text that fits into a width, shortened if it must be.
function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let length = text.length - 1;
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
  return `${text.slice(0, length)}…`;
}

// The first of items (sorted by start) that may reach past a value.
function firstAfter(starts, value) {
  let low = 0;
  let high = starts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (starts[middle] < value) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}
