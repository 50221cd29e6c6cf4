// Numbers and names for people.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function showBytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return unit === 0 || count >= 100 ? `${Math.round(count)} ${UNITS[unit]}` : `${count.toFixed(1)} ${UNITS[unit]}`;
}

// The unit that suits a time, and its length in ticks.
function unitFor(ticks) {
  const seconds = Math.abs(ticks) / facts.ticks;
  const [unit, name] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return [unit * facts.ticks, name];
}

function showTime(ticks) {
  const [unit, name] = unitFor(ticks);
  const value = ticks / unit;
  return `${value.toFixed(Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2)} ${name}`;
}

// A tick of an axis: one unit for all of them, and as many digits as keep neighbours apart.
function showTick(ticks, step, highest) {
  const [unit, name] = unitFor(highest);
  const digits = Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9));
  return `${trim(ticks / unit, digits)} ${name}`;
}

function trim(value, digits) {
  return String(Number(value.toFixed(Math.min(digits, 6))));
}

function showShare(share) {
  return `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
}

function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

const PHASES = { F: "forward", R: "forward again", B: "backward", BI: "input gradients", BW: "weight gradients" };
// An instruction in a word or two, to stand in its bar.
function caption(program, place) {
  const op = program.opAt(place);
  return op === "compute" ? program.args[program.arg[place]] : facts.ops[op].short;
}

// The longest text about an instruction that fits into its bar; null: none does.
function captionIn(context, program, place, room) {
  const microbatch = program.microbatchAt(place);
  const word = caption(program, place);
  const [first] = word.split(" ");
  const choices = microbatch ? [`${word} · ${microbatch}`, word, `${first} · ${microbatch}`, first] : [word, first];
  setFont(context, 11);
  return choices.find((choice) => context.measureText(choice).width <= room) ?? null;
}

// An instruction in a sentence, for screen readers.
function described(number, place) {
  const program = facts.programs[number];
  return (
    `${program.nodeAt(place)}, ${facts.ops[program.opAt(place)].label} on stream ${program.streamAt(place)}, ` +
    `from ${showTime(program.start[place])}, for ${showTime(program.length[place])}`
  );
}

// A cell of the pipeline in a sentence.
function describedCell(number, place) {
  const [low, high] = spanOf(state.selected);
  return `${cellAt(number, place)}, ${plural(state.selected.places.length, "instruction")}, from ${showTime(low)} to ${showTime(high)}`;
}

// Round steps for an axis: 1, 2 or 5 times a power of ten.
function niceStep(span, room, distance) {
  const least = (span * distance) / Math.max(room, 1);
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}

// Make an element: make("td", {class: "right"}, "text", child, ...).
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// A button that looks like a link.
function linkTo(text, onclick) {
  return make("button", { type: "button", class: "link", onclick }, text);
}

function legendEntry(kind, text) {
  return make("span", {}, make("i", { class: kind }), text);
}
