// The strategy: pointing at a directive lights up what it touched; clicking keeps it lit and shows its source.

function fillStrategy() {
  const host = byId("strategy");
  if (!facts.strategy.length) {
    byId("strategy-caption").textContent = "no directives: one device";
    return;
  }
  const counts = touchedCounts();
  facts.strategy.forEach((said, number) => {
    const [verb, ...rest] = said.title.split(" ");
    const button = make(
      "button",
      { type: "button", "data-directive": number, "aria-pressed": "false", title: said.text },
      make("span", { class: "said" }, make("b", {}, verb), ` ${said.text.replace(/^at=/, "")}`),
      make("span", { class: "where" }, `${rest.join(" ")} · ${plural(counts[number], "node")}`),
    );
    const light = () => change({ lit: number });
    const unlight = () => state.lit === number && change({ lit: null });
    button.addEventListener("pointerenter", light);
    button.addEventListener("pointerleave", unlight);
    button.addEventListener("focus", () => button.matches(":focus-visible") && light());
    button.addEventListener("blur", unlight);
    button.addEventListener("click", () => {
      change({ pinned: state.pinned === number ? null : number });
      showSource(said.source);
    });
    host.append(make("li", {}, button));
  });
  listen((update) => {
    if (onlyHover(update)) return;
    for (const button of host.querySelectorAll("button")) {
      const number = Number(button.dataset.directive);
      button.classList.toggle("pinned", state.pinned === number);
      button.classList.toggle("lit", state.lit === number || selectionCame(number));
      button.setAttribute("aria-pressed", String(state.pinned === number));
    }
  });
}

// How many nodes each directive touched.
function touchedCounts() {
  const counts = facts.strategy.map(() => 0);
  const seen = new Set();
  for (const program of facts.programs) {
    for (let place = 0; place < program.count; place += 1) {
      const name = `${program.node[place]} ${program.indices[program.index[place]]}`;
      if (seen.has(name)) continue;
      seen.add(name);
      for (const number of program.originAt(place)) counts[number] += 1;
    }
  }
  return counts;
}

// Whether a directive is among those that made the selected node.
function selectionCame(number) {
  const chosen = state.selected;
  return chosen !== null && facts.programs[chosen.program].originAt(chosen.place).includes(number);
}

function fillSource() {
  if (!facts.source) return;
  byId("source-panel").hidden = false;
  const lines = facts.source.replace(/\n$/, "").split("\n");
  byId("source").append(...lines.map((line, i) => make("span", { "data-line": i + 1 }, line || " ")));
}

// Mark the line that wrote a directive, if the recipe is at hand.
function showSource(where) {
  const line = Number(where.split(":").pop());
  const spans = [...byId("source").children];
  for (const span of spans) span.classList.remove("lit");
  const span = spans[line - 1];
  if (!span || !facts.sourceName || !where.startsWith(`${facts.sourceName}:`)) return;
  span.classList.add("lit");
  byId("source").scrollTop = span.offsetTop - byId("source").offsetTop - byId("source").clientHeight / 2;
}
