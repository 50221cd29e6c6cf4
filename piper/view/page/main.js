// Puts the page together.

const MOST_DEVICES = 128; // to choose from one by one

function fillHeader() {
  const devices = plural(facts.devices.length, "device");
  const programs = plural(facts.programs.length, "program");
  const instructions = plural(facts.programs.reduce((sum, program) => sum + program.count, 0), "instruction");
  const run = facts.about ? `; ${facts.about}` : "";
  byId("subtitle").textContent = `${devices}, ${programs}, ${instructions}; planned for ${facts.clock}${run}`;
  const sent = facts.comms.reduce((sum, comm) => sum + comm.nbytes, 0);
  const peak = Math.max(...facts.programs.map((program) => program.memory.peak));
  const rows = [["planned step", showTime(facts.step)]];
  if (hasMeasured) rows.push(["measured step", showTime(measuredEnd)]);
  rows.push(["idle, simulated", showShare(facts.bubble)], ["highest memory", showBytes(peak)], ["sent in a step", showBytes(sent)]);
  byId("figures").append(...rows.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function fillDevices() {
  const choice = byId("device");
  const one = (device) => make("option", { value: device }, `device ${device}${measuredOf(device) ? ", measured" : ""}`);
  const alike = (program) => make("option", { value: program.devices[0] }, `devices ${program.name}`);
  const few = facts.devices.length <= MOST_DEVICES; // of more, those that run one program are one choice
  choice.append(...(few ? facts.devices.map(one) : facts.programs.map(alike)));
  choice.addEventListener("change", () => change({ device: Number(choice.value), selected: null }));
  listen((update) => {
    if ("device" in update) choice.value = String(few ? state.device : facts.programs[currentProgram()].devices[0]);
  });
}

function fillSwitches() {
  const refit = () => {
    timeRange.end = timeEnd();
    timeRange.least = timeRange.end / 4000;
    timeRange.fit();
  };
  if (hasMeasured) {
    const ratio = measuredEnd / Math.max(1, facts.step);
    byId("stretch-choice").hidden = false;
    byId("differences").hidden = false;
    byId("stretch").checked = ratio > 1.3 || ratio < 1 / 1.3;
    state.stretch = byId("stretch").checked;
    refit();
  }
  byId("stretch").addEventListener("change", (event) => {
    change({ stretch: event.target.checked });
    refit();
  });
  byId("critical").addEventListener("change", (event) => {
    change({ critical: event.target.checked });
    timelineLegend();
  });
}

// The panels at the side end where the window does, also while the header is in view.
function followHeight() {
  const fit = () => document.documentElement.style.setProperty("--above", `${Math.max(12, document.querySelector(".columns").getBoundingClientRect().top)}px`);
  addEventListener("scroll", fit, { passive: true });
  addEventListener("resize", fit);
  fit();
}

function followTheme() {
  const themes = ["auto", "light", "dark"];
  const button = byId("theme");
  const apply = () => {
    wear(state.theme);
    button.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[state.theme];
    button.setAttribute("aria-label", `Colour scheme: ${state.theme}`);
    pipelineLegend();
    devicesLegend();
    timelineLegend();
  };
  button.addEventListener("click", () => {
    change({ theme: themes[(themes.indexOf(state.theme) + 1) % themes.length] });
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    change({});
    apply();
  });
  apply();
}

function memoryCaption() {
  const program = facts.programs[currentProgram()];
  const many = program.devices.length > 1 ? "each of devices" : "device";
  const usable = program.usable === null ? "" : `, ${showBytes(program.usable)} of it to use on ${facts.clock}`;
  byId("memory-caption").textContent = `of ${many} ${program.name}${usable}; ${showBytes(program.memory.resident)} held between steps`;
  byId("peak-summary").textContent = `Live at the peak of ${showBytes(program.memory.peak)}`;
}

fillHeader();
fillDevices();
fillSwitches();
fillClocks();
fillStrategy();
fillSource();
fillComms();
fillPath();
const views = { pipeline: pipelineView(), devices: devicesView(), timeline: timelineView(), memory: memoryView(), dag: dagView() };
if (facts.losses) views.loss = lossView();
for (const [name, view] of Object.entries(views)) new Scene(byId(name), view);
for (const name of ["pipeline", "devices", "timeline", "dag", "loss"]) if (views[name]) addTools(name, views[name]);
followTheme();
followHeight();
whenOpen(byId("pipeline-table"), pipelineTable, []);
whenOpen(byId("instructions-table"), instructionsTable, ["device"]);
whenOpen(byId("edges-table"), edgesTable, ["device"]);
whenOpen(byId("peak-table"), peakTable, ["device"]);
whenOpen(byId("differences-table"), differencesTable, ["device"]);
listen((update) => {
  if ("selected" in update || "device" in update) showDetails();
  if ("device" in update) memoryCaption();
  if ("selected" in update || "pinned" in update) followSelection();
});
showDetails();
memoryCaption();
memoryLegend();
printDrawings();
// Wherever the focus is: a click on a button takes it from the drawings.
addEventListener("keydown", (event) => {
  if (event.key === "Escape") change({ selected: null, pinned: null });
});
