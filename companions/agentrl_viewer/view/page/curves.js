// The curves: a card for each idea, in sections, with a common hover line; of one run, or of two over each other.

const SMOOTHING = [["1", "none"], ["5", "5 steps"], ["20", "20 steps"], ["100", "100 steps"]];

/** The cards of `runs` with their controls. One run has a color for each metric; of two, each run has a color. */
class CurveGrid {
  constructor(container, runs) {
    [this.runs, this.hoverX, this.cards, this.openFolds] = [runs, null, [], new Set()];
    this.body = el("div", { class: "stack" });
    this.readQuery();
    fill(container, this.controls(), this.body);
    this.refresh();
  }

  readQuery() {
    const query = readRoute().query;
    this.axis = query.get("x") === "time" ? "time" : "step";
    this.smoothing = Number(query.get("smooth") || 1);
    this.wanted = (query.get("find") || "").toLowerCase();
  }

  controls() {
    const change = (changes) => {
      setQuery(changes);
      this.readQuery();
      this.refresh();
    };
    const find = el("input", {
      name: "find",
      type: "search",
      placeholder: "metric or its meaning  ( / )",
      "aria-label": "Find a metric",
      value: readRoute().query.get("find") || "",
      oninput: (event) => change({ find: event.target.value }),
    });
    return el(
      "div",
      { class: "controls" },
      labelled("Over", selectBox("x", [["step", "steps"], ["time", "time"]], this.axis, (x) => change({ x }))),
      labelled("Smooth", selectBox("smooth", SMOOTHING, String(this.smoothing), (smooth) => change({ smooth }))),
      find,
      el("span", { class: "note" }, "Dots are evaluations. The pointer, or ← and →, shows the values of one step in every card."),
    );
  }

  /** Make the cards anew from what is known of the runs. */
  refresh() {
    this.cards = [];
    const names = metricNames(this.runs);
    const made = this.wanted ? [this.foundSection(names)] : arrangeCards(names).map((section) => this.sectionNode(section));
    fill(this.body, made);
    this.draw();
  }

  foundSection(names) {
    const isWanted = (name) => [name, ...Object.values(wordsOf(name))].some((text) => text.toLowerCase().includes(this.wanted));
    const found = names.filter(isWanted).map((name) => plainCard([name]));
    if (!found.length) return emptyState("No metric says that", "The search reads names, units and meanings.");
    return el("div", { class: "cards" }, this.makeCards(found));
  }

  sectionNode({ title, cards, folded }) {
    const more = folded.length ? this.foldNode(title, folded) : null;
    return el("section", { class: "curves" }, el("h2", {}, title), el("div", { class: "cards" }, this.makeCards(cards)), more);
  }

  foldNode(title, folded) {
    const grid = el("div", { class: "cards" });
    const fillGrid = () => {
      if (grid.childElementCount) return;
      fill(grid, this.makeCards(folded));
      this.openFolds.add(title);
    };
    const isOpen = this.openFolds.has(title);
    const node = el("details", { class: "fold", open: isOpen }, el("summary", {}, `${folded.length} more: ${shortened(folded.map((card) => card.title).join(", "), 90)}`), grid);
    if (isOpen) fillGrid();
    node.addEventListener("toggle", () => {
      if (!node.open) return this.openFolds.delete(title);
      fillGrid();
      this.draw();
    });
    return node;
  }

  makeCards(cards) {
    // Two runs in one card are read by their colors, which leaves one metric for each card.
    const shown = this.runs.length === 1 ? cards : cards.flatMap(splitCard);
    const made = shown.map((card) => this.makeCard(card)).filter(Boolean);
    this.cards.push(...made);
    return made.map((card) => card.node);
  }

  makeCard(card) {
    const series = this.runs.flatMap((run, number) => card.keys.flatMap((key, at) => this.seriesOf(run, key, this.runs.length > 1 ? number : at, card)));
    if (!series.length) return null;
    const xText = this.axis === "time" ? formatSeconds : formatNumber;
    const chart = chartOf(series, { floor: card.floor, xText, xName: this.axis });
    const text = card.text || plainCard(card.keys).text;
    return new ChartCard({ id: card.id, title: card.title, text, chart, onhover: (x) => this.hover(x) });
  }

  /** Return the curve of a metric in the steps of a run, and its dots in the evaluations. */
  seriesOf(run, key, number, card) {
    const at = (event) => (this.axis === "time" ? event.wall_s : event.step);
    const found = [];
    const words = wordsOf(key);
    const name = this.runs.length > 1 ? run.name : words.name;
    const common = { color: seriesColor(number), hint: `${key}: ${words.meaning}` };
    const steps = run.events("step");
    if (steps.some((event) => isNumber(event[key]))) {
      const [xs, ys] = [steps.map(at), steps.map((event) => numberOf(event[key]))];
      if (this.smoothing > 1) found.push({ ...common, xs, ys, faint: true });
      found.push({ ...common, name, xs, ys: smoothed(ys, this.smoothing), raw: ys });
    }
    const evaluations = run.events("evaluation").filter((event) => isNumber(event[key]));
    if (evaluations.length) {
      const ys = evaluations.map((event) => event[key]);
      const isAlone = this.runs.length === 1 && card.keys.length === 1 && found.length;
      const color = isAlone ? "accent-2" : common.color;
      found.push({ ...common, color, name: `${name}, evaluation`, xs: evaluations.map(at), ys, raw: ys, dots: true });
    }
    return found;
  }

  hover(x) {
    this.hoverX = x;
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.draw();
    });
  }

  /** Move the hover line by some steps, for readers without a pointer. */
  moveHover(by) {
    const events = [...this.runs[0].events("step"), ...this.runs[0].events("evaluation")];
    const xs = [...new Set(events.map((event) => (this.axis === "time" ? event.wall_s : event.step)))].sort((a, b) => a - b);
    const now = this.hoverX === null ? (by > 0 ? -1 : xs.length) : nearestIndex(xs, this.hoverX);
    this.hover(xs[Math.min(Math.max(now + by, 0), xs.length - 1)] ?? null);
  }

  draw() {
    for (const card of this.cards) card.draw(this.hoverX);
  }
}

/** Return a card for each metric of a card. */
function splitCard(card) {
  if (card.keys.length === 1) return [card];
  return card.keys.map((key) => ({ ...card, id: key, title: `${card.title}: ${wordsOf(key).name}`, keys: [key] }));
}

/** The keys of a view with a grid of curves. */
const CURVE_KEYS = {
  ArrowRight: (view) => view.grid && view.grid.moveHover(1),
  ArrowLeft: (view) => view.grid && view.grid.moveHover(-1),
  Escape: (view) => view.grid && view.grid.hover(null),
  "/": (view) => view.grid && view.container.querySelector("input[name=find]").focus(),
};

const curvesView = {
  open(container) {
    this.container = container;
    this.grid = null;
    this.build();
  },

  update(changed) {
    if (!changed.has("metrics")) return;
    if (this.grid) this.grid.refresh();
    else this.build();
  },

  resize() {
    if (this.grid) this.grid.draw();
  },

  close() {
    this.grid = null;
    hideTip();
  },

  build() {
    if (metricNames([store]).length) this.grid = new CurveGrid(this.container, [store]);
    else fill(this.container, emptyState("No step has ended yet", "The curves appear with the first training step."));
  },

  keys: CURVE_KEYS,
};
