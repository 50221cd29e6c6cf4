// A canvas that can be zoomed and panned along one axis, with mouse, touch and keyboard.

const MOTION = 250; // ms: a wheel that was scrolling the page goes on scrolling it

let lastScroll = 0;
addEventListener("scroll", () => { lastScroll = performance.now(); }, { passive: true });

const scenes = [];

// view: {name, range, left, height(), draw(scene), hit(scene, x, y), tip(hit), choose(hit), move(direction)}
// and `ranges`, if it changes from one to another.
class Scene {
  constructor(host, view) {
    this.view = view;
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
    for (const range of view.ranges ?? [view.range]) range.listeners.push(() => this.redraw());
    new ResizeObserver(() => state.printing || this.resize()).observe(host);
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
    scenes.push(this);
  }

  get range() {
    return this.view.range;
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

  resize(ratio = devicePixelRatio || 1) {
    this.ratio = ratio;
    this.width = Math.max(200, Math.floor(this.canvas.parentElement.clientWidth));
    this.height = this.view.height();
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.height = `${this.height}px`;
    this.redraw();
  }

  redraw() {
    if (this.waiting || !this.seen || state.printing) return; // what is out of sight is drawn when it comes into sight
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      if (state.printing) return; // it began after this frame was asked for, and has drawn what paper shows
      if (this.height !== this.view.height()) return this.resize();
      this.paint();
    });
  }

  // Draw now, in sight or not.
  paint() {
    this.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.context.clearRect(0, 0, this.width, this.height);
    this.view.draw(this);
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
function addTools(name, view) {
  const host = document.querySelector(`[data-tools="${name}"]`);
  const button = (text, label, act) => make("button", { type: "button", class: "plain", "aria-label": `${label}: ${name}`, title: label, onclick: act }, text);
  host.append(
    button("−", "Zoom out", () => view.range.zoom(1 / 0.6)),
    button("+", "Zoom in", () => view.range.zoom(0.6)),
    button("Fit", "Show all", () => view.range.fit()),
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
