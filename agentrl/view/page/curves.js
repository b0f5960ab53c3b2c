// The curves: one card for each idea, a common hover line, and a card for each further metric that the reader picks.

const CARD_HEIGHT = 150;
const CARDS = [
  { title: "Success", keys: ["success_rate"], evaluation: ["success_rate"], floor: 0 },
  { title: "Return", keys: ["return_mean"], evaluation: ["return_mean"] },
  { title: "Loss", keys: ["trainer.loss"] },
  { title: "KL, nats", match: /^trainer\..*kl/ },
  { title: "Gradient norm", keys: ["trainer.grad_norm"], floor: 0 },
  { title: "Staleness, versions", keys: ["staleness_mean", "staleness_p99", "staleness_max"], floor: 0 },
  { title: "Tokens per second", keys: ["tokens_per_s"], floor: 0 },
  {
    title: "Log-probs: server against trainer, nats",
    keys: ["trainer.max_logprob_difference", "trainer.mean_logprob_difference", "probe_difference"],
    floor: 0,
  },
  { title: "Waits, seconds", keys: ["trainer_wait_s", "rollout_wait_s", "loop_blocked_s"], floor: 0 },
  { title: "Work, seconds", keys: ["train_s", "publish_s", "update_s", "pause_s"], floor: 0 },
  { title: "Turns of an episode", keys: ["turns_mean"], evaluation: ["turns_mean"], floor: 0 },
  { title: "Output tokens of an episode", keys: ["output_tokens_mean"], evaluation: ["output_tokens_mean"], floor: 0 },
  { title: "Groups with a signal", keys: ["signal_share"], floor: 0 },
];
const NO_CURVE = new Set(["step", "policy_version", "wall_s"]);

const curvesView = {
  cards: [],
  hoverX: null,

  open(container) {
    this.container = container;
    this.grid = null;
    this.build();
  },

  update(changed) {
    if (!changed.has("metrics")) return;
    if (this.grid) this.fillCards();
    else this.build();
  },

  resize() {
    this.draw();
  },

  close() {
    this.cards = [];
    this.hoverX = null;
    hideTip();
  },

  build() {
    if (!store.metrics.some((event) => event.event === "step" || event.event === "evaluation")) {
      fill(this.container, emptyState("No step has ended yet", "The curves appear with the first training step."));
      return;
    }
    const query = readRoute().query;
    this.axis = query.get("x") === "time" ? "time" : "step";
    this.smoothing = Number(query.get("smooth") || 1);
    this.chosen = (query.get("m") || "").split(",").filter(Boolean);
    this.grid = el("div", { class: "cards" });
    fill(this.container, this.controls(metricNames(stepEvents()), this.chosen), this.grid);
    this.fillCards();
  },

  fillCards() {
    const steps = stepEvents();
    const evaluations = store.metrics.filter((event) => event.event === "evaluation");
    const names = metricNames(steps);
    this.cards = [...CARDS, ...this.chosen.map((key) => ({ title: key, keys: [key], isChosen: true }))]
      .map((card) => this.makeCard(card, names, steps, evaluations))
      .filter((card) => card.chart.series.length);
    fill(this.grid, this.cards.map((card) => card.node));
    this.draw();
  },

  controls(names, chosen) {
    const change = (changes) => {
      setQuery(changes);
      this.build();
    };
    const shown = new Set([...CARDS.flatMap((card) => cardKeys(card, names)), ...chosen]);
    const rest = names.filter((name) => !shown.has(name));
    const pick = selectBox("add", [["", `add one of ${rest.length}…`], ...rest.map((name) => [name, name])], "", (name) =>
      change({ m: [...chosen, name].join(",") }),
    );
    const smoothing = [["1", "none"], ["5", "5 steps"], ["20", "20 steps"], ["100", "100 steps"]];
    return el(
      "div",
      { class: "controls" },
      labelled("Over", selectBox("x", [["step", "steps"], ["time", "time"]], this.axis, (x) => change({ x }))),
      labelled("Smooth", selectBox("smooth", smoothing, String(this.smoothing), (smooth) => change({ smooth }))),
      labelled("Metric", pick),
      chosen.length ? el("button", { onclick: () => change({ m: "" }) }, "Remove added") : null,
      el("span", { class: "note" }, "Dots are evaluations. Hover shows the values of one step in every card."),
    );
  },

  makeCard(card, names, steps, evaluations) {
    const at = (event) => (this.axis === "time" ? event.wall_s : event.step);
    const series = [];
    cardKeys(card, names).forEach((key) => {
      const [xs, ys] = [steps.map(at), steps.map((event) => numberOf(event[key]))];
      const color = seriesColor(series.length);
      if (this.smoothing > 1) series.push({ key, color, xs, ys, faint: true });
      series.push({ key, color, xs, ys: smoothed(ys, this.smoothing), raw: ys });
    });
    (card.evaluation || []).forEach((key) => {
      const found = evaluations.filter((event) => isNumber(event[key]));
      if (!found.length) return;
      const ys = found.map((event) => event[key]);
      series.push({ key: `evaluation ${key}`, color: themeColor("accent-2"), xs: found.map(at), ys, raw: ys, dots: true });
    });
    const xRange = finiteRange([...steps, ...evaluations].map(at), 0) || [0, 1];
    const yRange = finiteRange(series.flatMap((one) => one.ys)) || [0, 1];
    if (card.floor !== undefined) yRange[0] = Math.min(card.floor, yRange[0] < 0 ? yRange[0] : card.floor);
    const xText = (value) => (this.axis === "time" ? formatSeconds(value) : formatNumber(value));
    const canvas = el("canvas", { class: "chart" });
    const legend = el("div", { class: "legend" });
    const heading = el("h3", {}, card.title);
    const made = { chart: { series, xRange, yRange, xText }, canvas, legend };
    made.node = el("section", { class: "card", "data-card": card.title }, heading, canvas, legend);
    canvas.addEventListener("mousemove", (event) => this.hover(made, event));
    canvas.addEventListener("mouseleave", () => this.hover(made, null));
    return made;
  },

  hover(card, event) {
    this.hoverX = event && card.scales ? card.scales.toX(event.offsetX) : null;
    this.draw();
  },

  draw() {
    for (const card of this.cards) {
      const main = card.chart.series.find((series) => series.raw && !series.dots) || card.chart.series[0];
      const index = this.hoverX === null ? -1 : nearestIndex(main.xs, this.hoverX);
      card.chart.hoverX = index < 0 ? null : main.xs[index];
      card.scales = drawChart(card.canvas, card.chart, CARD_HEIGHT);
      fill(card.legend, index < 0 ? null : el("span", { class: "at" }, `${this.axis} ${card.chart.xText(main.xs[index])}`));
      for (const series of card.chart.series.filter((one) => one.raw)) card.legend.append(legendItem(series, card.chart.hoverX));
    }
  },
};

/** Return a legend entry with the value at `x`, or the last one. */
function legendItem(series, x) {
  let index = x === null ? -1 : nearestIndex(series.xs, x);
  if (x === null) for (index = series.raw.length - 1; index > 0 && !isNumber(series.raw[index]); ) index -= 1;
  const swatch = el("i", { class: series.dots ? "dot" : "" });
  swatch.style.background = series.color;
  const name = series.key.replace(/^trainer\./, "");
  return el("span", { class: "item" }, swatch, name, el("b", {}, formatNumber(series.raw[index])));
}

function numberOf(value) {
  return isNumber(value) ? value : null;
}

function cardKeys(card, names) {
  return card.match ? names.filter((name) => card.match.test(name)) : card.keys.filter((key) => names.includes(key));
}

/** Return the names of the numbers in step events, sorted. */
function metricNames(steps) {
  const names = new Set();
  for (const event of steps) for (const [key, value] of Object.entries(event)) if (isNumber(value)) names.add(key);
  return [...names].filter((name) => !NO_CURVE.has(name)).sort();
}
