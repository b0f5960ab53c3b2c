// Two runs against each other: final figures, fields that differ, the same tasks side by side, and curves over each other.

const FIGURE_HEADS = { evaluation: "Last evaluation", step: "Training, mean of the last steps", end: "Whole run" };
const MAX_TASK_ROWS = 300;

const runsView = {
  open(container) {
    this.container = container;
    [this.found, this.grid, this.isAsking, this.isStale] = [null, null, false, false];
    this.facts = el("div", { class: "stack" }, el("p", { class: "note" }, "Reading the runs…"));
    this.curves = el("div", {});
    fill(container, this.facts, el("section", { class: "over" }, el("h2", {}, "Curves over each other"), this.curves));
    this.update(new Set(["metrics"]));
  },

  /** Take in what is new in either run. */
  update(changed) {
    if (!["run", "metrics", "episodes"].some((name) => changed.has(name))) return;
    // The curves bear the names of the runs, and those may arrive last.
    if (this.grid && (changed.has("metrics") || changed.has("run"))) this.grid.refresh();
    else if (!this.grid && metricNames(stores).length) this.grid = new CurveGrid(this.curves, stores);
    this.load();
  },

  /** Ask for the comparison; where one is on its way already, ask once more behind it. */
  async load() {
    this.isStale = true;
    if (this.isAsking) return;
    this.isAsking = true;
    const { facts } = this;
    while (this.isStale && this.facts === facts) {
      this.isStale = false;
      try {
        this.found = await fetchJson("data/comparison");
        if (this.facts === facts) this.show();
      } catch (error) {
        if (this.facts === facts) fill(facts, emptyState("These runs cannot be compared", error.message));
      }
    }
    this.isAsking = false;
  },

  resize() {
    if (this.grid) this.grid.draw();
  },

  close() {
    [this.facts, this.grid] = [null, null];
    hideTip();
  },

  show() {
    const names = el("p", { class: "runs-legend" }, stores.map((one, number) => el("span", { class: "item" }, swatch(seriesColor(number)), el("b", {}, one.name), el("span", { class: "note" }, ` ${formatNumber(one.events("step").length)} steps`))));
    const isMoreOpen = this.facts.querySelector("details.more")?.open ?? false;
    const right = el("div", { class: "stack" }, fieldsNode(this.found.fields), tasksNode(this.found.tasks));
    fill(this.facts, names, el("div", { class: "sides" }, figuresNode(this.found.figures, isMoreOpen), right));
  },

  keys: CURVE_KEYS,
};

function runHeads() {
  return stores.map((one, number) => el("th", { class: "number", scope: "col" }, swatch(seriesColor(number)), one.name));
}

/** Return the figures: evaluations and what the named curves show, and the rest below a fold. */
function figuresNode(figures, isOpen) {
  const keys = figures.map((one) => one.key);
  const named = new Set(SECTIONS.flatMap((section) => section.cards.map((card) => cardKeys(card, keys)[0])));
  const isShown = (one) => one.event === "evaluation" || (one.event === "step" ? named.has(one.key) : !one.key.match(/difference|staleness|unchecked|interrupted|groups/));
  const table = (wanted) => Object.entries(FIGURE_HEADS).map(([event, head]) => {
    const rows = wanted.filter((one) => one.event === event);
    return rows.length ? figureTable(head, rows) : null;
  });
  const rest = figures.filter((one) => !isShown(one));
  const more = el("details", { class: "fold more", open: isOpen }, el("summary", {}, `${rest.length} more figures`), table(rest));
  return el("section", { class: "card figures" }, el("h2", {}, "Final figures"), table(figures.filter(isShown)), rest.length ? more : null);
}

function figureTable(head, rows) {
  const cells = (one) => [formatNumber(one.left), formatNumber(one.right), changeText(one.right - one.left)];
  const body = rows.map((one) => el("tr", {}, el("th", { scope: "row", title: `${one.key}: ${one.meaning}` }, one.name, one.unit && !one.name.includes(one.unit) ? el("span", { class: "note" }, ` ${one.unit}`) : null), cells(one).map((text) => el("td", { class: "number" }, text))));
  return el("table", { class: "plain" }, el("tr", {}, el("th", { scope: "col" }, head), runHeads(), el("th", { class: "number", scope: "col" }, "change")), body);
}

function changeText(change) {
  const isLong = Math.abs(change) < 1000 && Math.abs(change) >= 1e-3;
  return `${change > 0 ? "+" : ""}${isLong ? trim(change, 3) : formatNumber(change)}`;
}

function fieldsNode(fields) {
  const rows = fields.map((one) => el("tr", {}, el("th", { scope: "row" }, one.path), [one.left, one.right].map((text) => el("td", { class: "number" }, text ?? "–"))));
  const table = el("table", { class: "plain" }, el("tr", {}, el("th", { scope: "col" }, "field"), runHeads()), rows);
  return el("section", { class: "card fields" }, el("h2", {}, "Fields that differ"), fields.length ? table : el("p", { class: "note" }, "The run files have the same fields."));
}

/** Return the tasks that both runs played, those whose success changed most first. */
function tasksNode(tasks) {
  const changed = tasks.filter((task) => task.change);
  const shown = tasks.slice(0, MAX_TASK_ROWS);
  const better = changed.filter((task) => task.change > 0).length;
  const words = tasks.length
    ? `Both runs played ${formatNumber(tasks.length)} tasks. In ${stores[1].name}, ${formatNumber(better)} succeed more often and ${formatNumber(changed.length - better)} less often. Each run counts the episodes that played the task last.`
    : "No task was played in both runs.";
  const rest = shown.length < tasks.length ? ` The table shows the first ${MAX_TASK_ROWS}.` : "";
  const table = el("table", { class: "plain tasks" }, taskHead(), shown.map(taskRow));
  const box = el("div", { class: "task-box", tabindex: "0", role: "region", "aria-label": "Tasks of both runs" }, table);
  return el("section", { class: "card" }, el("h2", {}, "The same tasks side by side"), el("p", { class: "note" }, words + rest), tasks.length ? box : null);
}

function taskHead() {
  return el("tr", {}, ["task", "purpose"].map((name) => el("th", { scope: "col", class: name === "purpose" ? "wide" : "" }, name)), runHeads(), el("th", { class: "number", scope: "col" }, "change"), el("th", {}, ""));
}

function taskRow(task) {
  const sides = [task.left, task.right];
  const ids = sides.map((side) => side.episode_ids[0]);
  const link = el("a", { class: "action", href: routeTo("compare", ids, { run: "", runs: "0,1" }), "aria-label": `episodes of ${task.task_id} side by side` }, "⇄");
  return el(
    "tr",
    { "data-task": task.task_id },
    el("th", { scope: "row", title: task.task_id }, task.prompt ? [shortened(task.prompt, 110), el("span", { class: "note id" }, ` ${task.task_id}`)] : task.task_id),
    el("td", { class: "wide" }, task.purpose),
    sides.map(sideCell),
    el("td", { class: `number ${task.change > 0 ? "outcome-success" : task.change < 0 ? "outcome-failed" : ""}` }, task.change ? `${task.change > 0 ? "+" : ""}${formatShare(task.change)}` : "0"),
    el("td", {}, link),
  );
}

function sideCell(side) {
  return el("td", { class: "number" }, `${side.succeeded} of ${side.finished}`, el("div", { class: "note" }, `return ${formatNumber(side.return_mean)}`));
}
