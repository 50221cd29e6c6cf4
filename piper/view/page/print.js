// Paper: everything is drawn in light colours, nothing is dimmed, and the dependencies in as many lines as they need.

const MOST_LINES = 12; // of dependencies

function printDrawings() {
  const host = byId("dag-print");
  addEventListener("beforeprint", () => {
    const scene = scenes.find((one) => one.view.range === dagRange);
    const { low, high, end } = dagRange;
    const { selected, related, hops, lit, pinned } = state;
    Object.assign(state, { printing: true, selected: null, related: null, hops: [], lit: null, pinned: null });
    wear("light");
    for (const one of scenes) {
      one.resize(Math.max(2, devicePixelRatio)); // paper is finer than a screen
      one.paint();
    }
    const columns = columnsAtFirst();
    const lines = Math.ceil(end / columns);
    host.replaceChildren();
    for (let line = 0; line < Math.min(lines, MOST_LINES); line += 1) {
      [dagRange.low, dagRange.high] = [line * columns, (line + 1) * columns];
      scene.paint();
      const copy = make("canvas", { width: scene.canvas.width, height: scene.canvas.height });
      copy.getContext("2d").drawImage(scene.canvas, 0, 0);
      host.append(copy);
    }
    if (lines > MOST_LINES) host.append(make("p", { class: "faint" }, `${plural(lines - MOST_LINES, "more line")} of dependencies: see the page`));
    [dagRange.low, dagRange.high] = [low, high];
    Object.assign(state, { selected, related, hops, lit, pinned });
  });
  addEventListener("afterprint", () => {
    host.replaceChildren();
    state.printing = false;
    wear(state.theme);
    for (const one of scenes) one.resize();
  });
}
