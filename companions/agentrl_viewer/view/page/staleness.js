// How old the trained tokens were: over the run from the metrics, and token by token for one step.

const BAR_HEIGHT = 220;

const stalenessView = {
  open(container) {
    this.container = container;
    this.counts = null;
    this.slider = null;
    this.build();
  },

  /** Take in new steps, and leave the slider that the reader may hold in place. */
  update(changed) {
    if (!changed.has("metrics")) return;
    const steps = stepsWithStaleness();
    if (!this.slider || !steps.length) {
      this.build();
      return;
    }
    const before = this.step;
    this.takeSteps(steps);
    [this.slider.min, this.slider.max, this.slider.value] = [steps[0].step, steps[steps.length - 1].step, this.step];
    this.draw();
    // What a step trained is written a moment after its metrics.
    const isKnown = this.counts && Object.keys(this.counts.tokens).length > 0;
    if (this.step !== before || !isKnown) this.load();
  },

  /** Show the step of the address, or the newest. */
  takeSteps(steps) {
    const asked = Number(readRoute().query.get("step") ?? NaN);
    this.steps = steps;
    this.step = steps.some((event) => event.step === asked) ? asked : steps[steps.length - 1].step;
  },

  resize() {
    this.draw();
  },

  close() {
    hideTip();
    this.container = null;
  },

  build() {
    const steps = stepsWithStaleness();
    if (!steps.length) {
      this.slider = null;
      fill(this.container, emptyState("No step has trained a token yet", "The histogram appears with the first training step."));
      return;
    }
    this.takeSteps(steps);
    const text = "How many versions of the policy lie between the one that sampled a token and the one that was trained.";
    const onpick = (x) => this.pick(Math.round(x));
    this.over = new ChartCard({ title: "Staleness of trained tokens by step, versions", text, chart: this.overview(), onpick });
    this.bars = el("canvas", { class: "chart", role: "img", "aria-label": "Trained tokens of the step by staleness" });
    this.heading = el("h3", {});
    this.note = el("p", { class: "note" });
    const pick = el("input", { type: "range", min: steps[0].step, max: steps[steps.length - 1].step, value: this.step, "aria-label": "Step" });
    pick.addEventListener("input", () => this.pick(Number(pick.value)));
    this.slider = pick;
    const detail = el("section", { class: "card" }, this.heading, labelled("Step", pick), this.bars, this.note);
    fill(this.container, el("div", { class: "stack" }, this.over.node, detail));
    this.draw();
    this.load();
  },

  pick(step) {
    const nearest = this.steps[nearestIndex(this.steps.map((event) => event.step), step)];
    this.step = nearest.step;
    this.slider.value = this.step;
    setQuery({ step: String(this.step) });
    this.draw();
    this.load();
  },

  async load() {
    const step = this.step;
    try {
      const counts = await store.fetchJson("staleness", { step });
      if (this.step === step && this.container) this.counts = counts;
    } catch (error) {
      this.counts = { step, tokens: {}, problem: error.message };
    }
    this.draw();
  },

  draw() {
    if (!this.over || !this.container) return;
    this.over.chart = this.overview();
    this.over.draw(this.step);
    this.drawBars();
  },

  overview() {
    const xs = this.steps.map((event) => event.step);
    const series = ["mean", "p50", "p99", "max"].map((name, number) => {
      const key = `staleness_${name}`;
      const ys = this.steps.map((event) => numberOf(event[key]));
      return { name: wordsOf(key).name.replace("staleness ", ""), hint: wordsOf(key).meaning, color: seriesColor(number), xs, ys, raw: ys };
    });
    return chartOf(series, { floor: 0 });
  },

  drawBars() {
    const known = this.counts && this.counts.step === this.step ? this.counts : null;
    fill(this.heading, `Trained tokens of step ${this.step} by staleness`);
    const ages = known ? Object.keys(known.tokens).map(Number).sort((a, b) => a - b) : [];
    const width = this.bars.clientWidth;
    if (!width) return;
    const context = startDrawing(this.bars, width, BAR_HEIGHT);
    fill(this.note, known ? known.problem || (ages.length ? "" : "No record says which episodes this step trained.") : "Counting…");
    if (!ages.length) return;
    const total = ages.reduce((sum, age) => sum + known.tokens[age], 0);
    const most = Math.max(...ages.map((age) => known.tokens[age]));
    const slot = Math.min(90, (width - CHART.left) / (ages[ages.length - 1] - ages[0] + 1));
    context.textAlign = "center";
    for (const age of ages) {
      const count = known.tokens[age];
      const [x, height] = [CHART.left + (age - ages[0]) * slot, ((BAR_HEIGHT - 52) * count) / most];
      context.fillStyle = themeColor("series-0");
      context.fillRect(x + slot * 0.1, BAR_HEIGHT - 24 - height, slot * 0.8, height);
      context.fillStyle = themeColor("text");
      if (slot > 34) context.fillText(formatShare(count / total), x + slot / 2, BAR_HEIGHT - 30 - height);
      context.fillStyle = themeColor("muted");
      context.fillText(String(age), x + slot / 2, BAR_HEIGHT - 8);
    }
    const parts = ages.map((age) => `${formatNumber(known.tokens[age])} of age ${age}`);
    fill(this.note, `${formatNumber(total)} tokens: ${parts.join(", ")}.`);
  },
};

function stepsWithStaleness() {
  return stepEvents().filter((event) => isNumber(event.staleness_mean));
}
