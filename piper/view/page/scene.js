// A canvas that can be zoomed and panned along one axis, with mouse, touch and keyboard.

const HUES = 8;
const MOTION = 250; // ms: a wheel that was scrolling the page goes on scrolling it

function isDark() {
  if (state.theme !== "auto") return state.theme === "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

function paper() {
  return facts.colours[isDark() ? "dark" : "light"];
}

// The fill, the text on it, and whether it is hatched.
function ink(phase, part) {
  const colours = paper();
  if (!phase) return { fill: colours.quiet, text: colours.text, hatched: false };
  const numbers = part.split(".");
  const hue = (Number(numbers[numbers.length - 1]) || 0) % HUES;
  return { fill: colours.phases[phase].fills[hue], text: colours.phases[phase].text, hatched: phase === "BW" };
}

// The part of an axis that is seen. Several scenes may share one.
class Range {
  constructor(end, least) {
    this.end = Math.max(end, 1e-9);
    this.least = Math.min(least, this.end);
    this.low = 0;
    this.high = this.end;
    this.listeners = [];
  }

  get span() {
    return this.high - this.low;
  }

  get whole() {
    return this.span >= this.end * 0.9999;
  }

  set(low, high) {
    const span = Math.min(this.end, Math.max(this.least, high - low));
    const middle = (low + high) / 2;
    this.low = Math.max(0, Math.min(this.end - span, middle - span / 2));
    this.high = this.low + span;
    for (const listener of this.listeners) listener();
  }

  zoom(factor, at = (this.low + this.high) / 2) {
    const span = Math.min(this.end, Math.max(this.least, this.span * factor));
    const share = (at - this.low) / this.span;
    const low = Math.max(0, Math.min(this.end - span, at - share * span));
    this.set(low, low + span);
  }

  pan(distance) {
    this.set(this.low + distance, this.high + distance);
  }

  fit() {
    this.set(0, this.end);
  }

  // Bring a stretch into view, with room around it.
  show(start, end) {
    if (start >= this.low && end <= this.high) return;
    const span = Math.max(this.span, (end - start) * 1.5);
    const middle = (start + end) / 2;
    this.set(middle - span / 2, middle + span / 2);
  }
}

let lastScroll = 0;
addEventListener("scroll", () => { lastScroll = performance.now(); }, { passive: true });

// view: {name, range, left, height(), draw(scene), hit(scene, x, y), tip(hit), choose(hit), move(direction)}
class Scene {
  constructor(host, view) {
    this.view = view;
    this.range = view.range;
    this.canvas = make("canvas", {
      tabindex: "0",
      role: "application",
      "aria-roledescription": "zoomable drawing",
      "aria-label": view.name,
      "aria-describedby": "keys",
    });
    host.append(this.canvas);
    this.context = this.canvas.getContext("2d");
    this.width = 0;
    this.height = 0;
    this.waiting = false;
    this.pointers = new Map();
    this.range.listeners.push(() => this.redraw());
    new ResizeObserver(() => this.resize()).observe(host);
    this.listenToPointers();
    this.listenToKeys();
    listen((update) => {
      if (!onlyHover(update) || view.hovers) this.redraw();
    });
    this.seen = false;
    new IntersectionObserver((entries) => {
      this.seen = entries[entries.length - 1].isIntersecting;
      if (this.seen) this.redraw();
    }, { rootMargin: "100px" }).observe(this.canvas);
    this.resize();
  }

  get left() {
    return this.view.left();
  }

  get right() {
    return this.width - 8;
  }

  x(value) {
    return this.left + ((value - this.range.low) / this.range.span) * (this.right - this.left);
  }

  value(x) {
    return this.range.low + ((x - this.left) / (this.right - this.left)) * this.range.span;
  }

  resize() {
    const ratio = devicePixelRatio || 1;
    this.width = Math.max(200, Math.floor(this.canvas.parentElement.clientWidth));
    this.height = this.view.height();
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.height = `${this.height}px`;
    this.redraw();
  }

  redraw() {
    if (this.waiting || !this.seen) return; // what is out of sight is drawn when it comes into sight
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      if (this.height !== this.view.height()) return this.resize();
      const ratio = devicePixelRatio || 1;
      this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
      this.context.clearRect(0, 0, this.width, this.height);
      this.view.draw(this);
    });
  }

  // Draw only where the axis is.
  clipped(draw) {
    this.context.save();
    this.context.beginPath();
    this.context.rect(this.left - 1, 0, this.right - this.left + 2, this.height);
    this.context.clip();
    draw(this.context);
    this.context.restore();
  }

  listenToPointers() {
    const { canvas } = this;
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("wheel", (event) => this.wheel(event, at(event)), { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      this.pointers.set(event.pointerId, at(event));
      this.moved = false;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (this.pointers.has(event.pointerId)) this.drag(event.pointerId, at(event));
      else this.hover(event, at(event));
    });
    const lift = (event) => {
      const held = this.pointers.delete(event.pointerId);
      canvas.classList.remove("dragging");
      if (held && !this.moved && event.type === "pointerup") this.click(at(event));
    };
    canvas.addEventListener("pointerup", lift);
    canvas.addEventListener("pointercancel", lift);
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("dblclick", () => this.range.fit());
  }

  wheel(event, [x]) {
    const scrolling = performance.now() - lastScroll < MOTION;
    if (scrolling && !event.ctrlKey) return;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      if (this.range.whole) return;
      event.preventDefault();
      const distance = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
      this.range.pan((distance / (this.right - this.left)) * this.range.span);
      return;
    }
    if (event.deltaY > 0 && this.range.whole && !event.ctrlKey) return; // nothing to zoom out of: scroll the page
    event.preventDefault();
    this.range.zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY)) * 0.004), this.value(x));
  }

  drag(id, [x, y]) {
    const [fromX, fromY] = this.pointers.get(id);
    if (this.pointers.size === 2) {
      const [other] = [...this.pointers.entries()].filter(([key]) => key !== id).map(([, place]) => place);
      const before = Math.max(20, Math.abs(fromX - other[0]));
      const after = Math.max(20, Math.abs(x - other[0]));
      this.range.zoom(before / after, this.value((x + other[0]) / 2));
      this.moved = true;
    } else if (this.moved || Math.hypot(x - fromX, y - fromY) > 3) {
      this.moved = true;
      this.canvas.classList.add("dragging");
      this.range.pan(((fromX - x) / (this.right - this.left)) * this.range.span);
    } else {
      return;
    }
    this.pointers.set(id, [x, y]);
    hideTip();
  }

  hover(event, [x, y]) {
    const hit = this.view.hit(this, x, y);
    this.canvas.classList.toggle("over", hit !== null);
    this.hit = hit;
    if (hit) showTip(this.view.tip(hit), event.clientX, event.clientY);
    else hideTip();
    if (this.view.point) this.view.point(hit);
  }

  leave() {
    hideTip();
    if (this.view.point) this.view.point(null);
  }

  click([x, y]) {
    const hit = this.view.hit(this, x, y);
    if (hit) this.view.choose(hit);
    else change({ selected: null });
  }

  listenToKeys() {
    const quarter = () => this.range.span / 4;
    const keys = {
      "+": () => this.range.zoom(0.6),
      "=": () => this.range.zoom(0.6),
      "-": () => this.range.zoom(1 / 0.6),
      _: () => this.range.zoom(1 / 0.6),
      0: () => this.range.fit(),
      ArrowLeft: (event) => (event.shiftKey ? this.range.pan(-quarter()) : this.view.move("left")),
      ArrowRight: (event) => (event.shiftKey ? this.range.pan(quarter()) : this.view.move("right")),
      ArrowUp: () => this.view.move("up"),
      ArrowDown: () => this.view.move("down"),
      Home: () => this.view.move("first"),
      End: () => this.view.move("last"),
      Enter: () => state.selected && byId("details-title").focus(),
      Escape: () => change({ selected: null, pinned: null }),
    };
    this.canvas.addEventListener("keydown", (event) => {
      const act = keys[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act(event);
    });
  }
}

// Buttons for those who have neither wheel nor keyboard.
function addTools(name, range) {
  const host = document.querySelector(`[data-tools="${name}"]`);
  const button = (text, label, act) => make("button", { type: "button", class: "plain", "aria-label": `${label}: ${name}`, title: label, onclick: act }, text);
  host.append(
    button("−", "Zoom out", () => range.zoom(1 / 0.6)),
    button("+", "Zoom in", () => range.zoom(0.6)),
    button("Fit", "Show all", () => range.fit()),
  );
}

function showTip(lines, x, y) {
  const tip = byId("tip");
  const [first, ...others] = lines;
  tip.replaceChildren(make("b", {}, first), ...others.map((line) => make("div", {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - box.width - 6))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}

const FONT = 'system-ui, -apple-system, "Segoe UI", "Liberation Sans", "DejaVu Sans", sans-serif';

function setFont(context, size, weight = 400) {
  context.font = `${weight} ${size}px ${FONT}`;
}

// A box with round corners, hatched where it stands for weight gradients.
function box(context, x, y, width, height, colour) {
  context.fillStyle = colour.fill;
  context.beginPath();
  if (width > ROUND) context.roundRect(x, y, width, height, 3);
  else context.rect(x, y, width, height);
  context.fill();
  if (colour.hatched && width > 2) {
    context.fillStyle = hatching(context);
    context.fill();
  }
}

const ROUND = 9; // pixels: narrower boxes have corners, which are quicker
const hatchings = new Map();

// Thin diagonal lines, as a pattern to fill with.
function hatching(context) {
  const colour = paper().hatch;
  if (!hatchings.has(colour)) {
    const tile = document.createElement("canvas");
    const size = 12; // twice, for screens with fine pixels
    tile.width = tile.height = size;
    const pen = tile.getContext("2d");
    pen.strokeStyle = colour;
    pen.globalAlpha = 0.45;
    pen.lineWidth = 2;
    pen.beginPath();
    for (const shift of [-size, 0, size]) {
      pen.moveTo(shift - 2, size + 2);
      pen.lineTo(shift + size + 2, -2);
    }
    pen.stroke();
    const pattern = context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(0.5));
    hatchings.set(colour, pattern);
  }
  return hatchings.get(colour);
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
  setFont(context, 11);
  context.textAlign = "center";
  context.textBaseline = "top";
  const first = Math.ceil(range.low / step);
  for (let i = first; i * step <= range.high + step * 1e-6; i += 1) {
    const at = i * step; // not a running sum, which would drift
    const x = Math.round(scene.x(at)) + 0.5;
    context.strokeStyle = paper().line;
    context.globalAlpha = 0.6;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x, 0);
    context.lineTo(x, bottom + 4);
    context.stroke();
    context.globalAlpha = 1;
    context.fillStyle = paper().faint;
    const text = show(at, step, range.high);
    const half = context.measureText(text).width / 2;
    context.fillText(text, Math.max(scene.left + half, Math.min(x, scene.right - half)), bottom + 8);
  }
}

function measureNames(names, size = 12) {
  const context = measureNames.context ?? (measureNames.context = document.createElement("canvas").getContext("2d"));
  setFont(context, size);
  return Math.ceil(Math.max(0, ...names.map((name) => context.measureText(name).width)));
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
