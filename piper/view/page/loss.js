// The loss of a run, by step.

const LOSS_CHART = 170;

function lossView() {
  const { step, loss } = facts.losses;
  const range = new Range(step[step.length - 1], Math.min(step[step.length - 1], 4));
  const [low, high] = [Math.min(...loss), Math.max(...loss)];
  const margin = 0.06 * (high - low || Math.abs(high) || 1);
  const y = (value) => 8 + (LOSS_CHART - 8) * ((high + margin - value) / (high - low + 2 * margin));
  const show = (value) => String(Number(value.toPrecision(4)));
  const apart = niceStep(high - low + 2 * margin, LOSS_CHART, 40);
  const lines = [];
  for (let i = Math.ceil((low - margin) / apart); i * apart <= high + margin; i += 1) lines.push(i * apart);
  const left = () => Math.max(measureNames(lines.map(show)), 40) + 18;
  byId("loss-section").hidden = false;
  byId("loss-caption").textContent = `${show(loss[0])} in step ${step[0]}, ${show(loss[loss.length - 1])} in step ${step[step.length - 1]}`;

  function drawCurve(scene) {
    const { context } = scene;
    const first = firstAfter(step, range.low);
    let last = first;
    while (last < step.length - 1 && step[last] < range.high) last += 1;
    const points = step.slice(first, last + 1).map((at, i) => [scene.x(at), y(loss[first + i])]);
    context.lineJoin = "round";
    line(context, accent(), 1.75, ...points);
    if (points.length > 61) return; // dots would be all there is to see
    context.fillStyle = accent();
    for (const [px, py] of points) {
      context.beginPath();
      context.arc(px, py, 2.5, 0, 7);
      context.fill();
    }
  }

  return {
    name: "Loss",
    range,
    left,
    height: () => LOSS_CHART + 24,
    draw(scene) {
      drawScale(scene, lines, y, show);
      drawAxis(scene, LOSS_CHART, (at) => trim(at, 2));
      scene.clipped(() => drawCurve(scene));
    },
    hit(scene, x, py) {
      if (x < scene.left || x > scene.right || py >= LOSS_CHART) return null;
      const before = firstAfter(step, scene.value(x));
      const after = Math.min(before + 1, step.length - 1);
      return { i: Math.abs(scene.x(step[after]) - x) < Math.abs(scene.x(step[before]) - x) ? after : before };
    },
    tip: ({ i }) => [`loss ${Number(loss[i].toPrecision(6))}`, `step ${step[i]}`],
    choose() {}, // a step of training is no part of the plan
    move: (direction) => range.go(direction),
  };
}
