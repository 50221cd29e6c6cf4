// The strategy: pointing at a directive lights up what it touched; clicking keeps it lit and shows its source.

function fillStrategy() {
  const host = byId("strategy");
  if (!facts.strategy.length) {
    byId("strategy-caption").textContent = "no directives: one device";
    return;
  }
  facts.strategy.forEach((said, number) => {
    const [verb, ...rest] = said.title.split(" ");
    const button = make(
      "button",
      { type: "button", "data-directive": number, "aria-pressed": "false", title: said.text },
      make("span", { class: "said" }, make("b", {}, verb), ` ${said.text.replace(/^at=/, "")}`),
      make("span", { class: "where" }, `${rest.join(" ")} · ${plural(said.nodes, "node")}`),
    );
    const light = () => change({ lit: number });
    const unlight = () => state.lit === number && change({ lit: null });
    button.addEventListener("pointerenter", light);
    button.addEventListener("pointerleave", unlight);
    button.addEventListener("focus", () => button.matches(":focus-visible") && light());
    button.addEventListener("blur", unlight);
    button.addEventListener("click", () => change({ pinned: state.pinned === number ? null : number }));
    host.append(make("li", {}, button));
  });
  listen((update) => {
    if (onlyHover(update)) return;
    for (const button of host.querySelectorAll("button")) {
      const number = Number(button.dataset.directive);
      button.classList.toggle("pinned", state.pinned === number);
      button.classList.toggle("lit", state.lit === number || (state.selected !== null && originsOf(state.selected).includes(number)));
      button.setAttribute("aria-pressed", String(state.pinned === number));
    }
  });
}

function fillSource() {
  if (!facts.source) return;
  byId("source-panel").hidden = false;
  const lines = facts.source.replace(/\n$/, "").split("\n");
  byId("source-caption").textContent = facts.sourceName;
  byId("source").append(...lines.map((line, i) => make("span", { "data-line": i + 1 }, line || " ")));
}

// Scroll a box, and only that box, until one of its children is in the middle.
function bringIntoView(host, child) {
  const low = child.offsetTop - host.offsetTop;
  if (low >= host.scrollTop && low + child.offsetHeight <= host.scrollTop + host.clientHeight) return;
  host.scrollTop = low - (host.clientHeight - child.offsetHeight) / 2;
}

// Mark the lines that wrote the directive that was clicked, else the directives that made the selection, and scroll
// to them. The panels have their heights by now.
function followSelection() {
  const { selected, pinned } = state;
  const strategy = byId("strategy");
  const said = strategy.querySelector(".pinned") ?? strategy.querySelector(".lit");
  if (said) bringIntoView(strategy, said);
  const made = selected === null ? [] : originsOf(selected);
  const lines = new Set();
  for (const number of pinned === null ? made : [pinned]) {
    const [name, line] = (facts.strategy[number]?.source ?? "").split(/:(?=\d+$)/);
    if (name === facts.sourceName) lines.add(Number(line));
  }
  const host = byId("source");
  for (const span of host.children) span.classList.toggle("lit", lines.has(Number(span.dataset.line)));
  const first = host.querySelector(".lit");
  if (first) bringIntoView(host, first);
}
