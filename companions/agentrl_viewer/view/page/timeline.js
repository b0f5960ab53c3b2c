// Who works and who waits: a lane for each actor, and the episodes in flight below them, over the run's clock.

const LANES = ["trainer", "dispatcher", "servers", "evaluation"];
const ROW = 24;
const LANE_GAP = 8;
const FLIGHT_HEIGHT = 170;
/** The least height of an activity in a column of pixels, so that a short one is seen. */
const LEAST_HEIGHT = 1;
const AXIS_HEIGHT = 22;
/** Colors by meaning: work of the trainer, weights, waits, the rest. */
const ACTIVITY_COLORS = {
  train: "series-0",
  publish: "series-2",
  update: "series-4",
  pause: "series-5",
  checkpoint: "series-3",
  evaluate: "series-1",
  spot_check: "series-6",
  wait_for_batch: "wait",
  wait_for_servers: "wait",
  wait_for_evaluation: "wait-2",
  wait_for_bound: "wait",
  wait_for_slot: "wait-2",
};

const timelineView = {
  open(container) {
    this.container = container;
    this.drag = null;
    this.canvas = null;
    this.build();
  },

  update(changed) {
    if (!changed.has("timeline") && !changed.has("episodes")) return;
    if (this.canvas) this.refresh();
    else this.build();
  },

  resize() {
    this.draw();
  },

  close() {
    hideTip();
  },

  /** Take in what is new; a window that reached the end of the run follows it. */
  refresh() {
    const before = this.whole;
    this.measure();
    if (!this.whole) {
      this.build(); // the run began again, and has no span yet
      return;
    }
    const grown = this.whole[1] - before[1];
    const isWhole = this.range[0] <= before[0] && this.range[1] >= before[1];
    if (isWhole || grown < 0) this.range = [...this.whole];
    else if (this.range[1] >= before[1]) this.range = this.range.map((time) => time + grown);
    this.draw();
  },

  measure() {
    this.flight = inFlight(store.columns);
    this.whole = timelineRange(store.spans, this.flight);
    this.lanes = LANES.map((actor) => packLane(actor, store.spans.filter((span) => span.actor === actor)));
  },

  build() {
    this.measure();
    if (!this.whole) {
      this.canvas = null;
      fill(this.container, emptyState("No spans are recorded yet", "timeline.jsonl of the run directory is empty or missing."));
      return;
    }
    const query = readRoute().query;
    const asked = [Number(query.get("from") ?? NaN), Number(query.get("to") ?? NaN)];
    this.range = asked[1] > asked[0] ? asked : [...this.whole];
    this.canvas = el("canvas", { class: "timeline", role: "img", "aria-label": "Timeline; the table below has its sums" });
    this.totals = el("div", { class: "totals" });
    this.listen();
    const zoom = (factor) => () => this.zoom((this.range[0] + this.range[1]) / 2, factor);
    const controls = el(
      "div",
      { class: "controls" },
      el("button", { onclick: zoom(0.5), title: "Zoom in (+)" }, "+"),
      el("button", { onclick: zoom(2), title: "Zoom out (-)" }, "−"),
      el("button", { onclick: () => this.setRange(this.whole), title: "Show the whole run (0)" }, "Whole run"),
      el("button", { onclick: () => this.setRange([this.whole[1] - 60, this.whole[1]]) }, "Last minute"),
      el("span", { class: "note" }, "Wheel or + and − zoom, dragging or ← and → move, the pointer names a span. Where several spans share a column of pixels, each has its share of the height."),
    );
    fill(this.container, controls, this.canvas, this.totals);
    this.draw();
  },

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(this.toTime(event.offsetX), event.deltaY > 0 ? 1.25 : 0.8);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.drag = { x: event.offsetX, range: [...this.range] };
    });
    canvas.addEventListener("pointerup", () => {
      this.drag = null;
      setQuery({ from: this.range[0].toFixed(3), to: this.range[1].toFixed(3) });
    });
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("dblclick", () => this.setRange(this.whole));
  },

  keys: {
    "+": (view) => view.canvas && view.zoom((view.range[0] + view.range[1]) / 2, 0.5),
    "-": (view) => view.canvas && view.zoom((view.range[0] + view.range[1]) / 2, 2),
    0: (view) => view.canvas && view.setRange(view.whole),
    ArrowLeft: (view) => view.canvas && view.setRange(view.shifted(view.range, -0.25)),
    ArrowRight: (view) => view.canvas && view.setRange(view.shifted(view.range, 0.25)),
  },

  toTime(x) {
    const [left, right] = this.lanesAt();
    return this.range[0] + ((x - left) / (right - left)) * (this.range[1] - this.range[0]);
  },

  toX(time) {
    const [left, right] = this.lanesAt();
    return left + ((time - this.range[0]) / (this.range[1] - this.range[0])) * (right - left);
  },

  /** Return where the lanes begin and end, in pixels. */
  lanesAt() {
    const width = this.canvas.clientWidth;
    return width < 600 ? [74, width - 8] : [92, width - 28];
  },

  /** Return a window moved by a part of its length, within the run. */
  shifted([low, high], part) {
    const shift = Math.min(Math.max(part * (high - low), this.whole[0] - low), this.whole[1] - high);
    return [low + shift, high + shift];
  },

  zoom(center, factor) {
    const [low, high] = this.range;
    if ((high - low) * factor < 0.01) return;
    this.setRange([center - (center - low) * factor, center + (high - center) * factor]);
  },

  setRange([low, high]) {
    this.range = [Math.max(low, this.whole[0]), Math.min(high, this.whole[1])];
    const isWhole = this.range[0] === this.whole[0] && this.range[1] === this.whole[1];
    setQuery(isWhole ? { from: "", to: "" } : { from: this.range[0].toFixed(3), to: this.range[1].toFixed(3) });
    this.draw();
  },

  move(event) {
    if (this.drag) {
      const [left, right] = this.lanesAt();
      this.range = this.shifted(this.drag.range, (this.drag.x - event.offsetX) / (right - left));
      this.draw();
      return;
    }
    const hit = this.spanAt(event.offsetX, event.offsetY);
    const time = this.toTime(event.offsetX);
    if (hit) {
      const rows = [["from", formatSeconds(hit.start_s)], ["to", formatSeconds(hit.end_s)]];
      rows.push(["length", formatSeconds(hit.end_s - hit.start_s)]);
      if (isNumber(hit.step)) rows.push(["step", formatNumber(hit.step)]);
      showTip(event, `${hit.actor}: ${hit.activity.replaceAll("_", " ")}`, rows);
    } else if (event.offsetY > this.flightTop && event.offsetX > this.lanesAt()[0] && time <= this.whole[1]) {
      const rows = [["training", flightAt(this.flight.training, time)], ["evaluation", flightAt(this.flight.evaluation, time)]];
      showTip(event, `Episodes in flight at ${formatSeconds(time)}`, rows.map(([name, count]) => [name, String(count)]));
    } else hideTip();
  },

  spanAt(x, y) {
    for (const lane of this.lanes) {
      const row = Math.floor((y - lane.top) / ROW);
      if (row < 0 || row >= lane.rows.length) continue;
      const near = lane.rows[row].filter((span) => this.toX(span.start_s) - 1 <= x && x <= Math.max(this.toX(span.end_s), this.toX(span.start_s) + 2));
      return near.sort((a, b) => b.end_s - b.start_s - (a.end_s - a.start_s))[0]; // the longest: most of the column is its
    }
    return null;
  },

  draw() {
    if (!this.canvas || !this.canvas.clientWidth) return;
    let top = 6;
    for (const lane of this.lanes) {
      lane.top = top;
      top += lane.rows.length * ROW + LANE_GAP;
    }
    this.flightTop = top + 10;
    const width = this.canvas.clientWidth;
    const height = this.flightTop + FLIGHT_HEIGHT + AXIS_HEIGHT;
    const context = startDrawing(this.canvas, width, height);
    this.colors = {};
    for (const name of [...Object.values(ACTIVITY_COLORS), "series-7", "text"]) this.colors[name] = themeColor(name);
    this.drawTimes(context, width, height);
    for (const lane of this.lanes) this.drawLane(context, lane);
    this.drawFlight(context);
    this.fillTotals();
  },

  drawTimes(context, width, height) {
    context.strokeStyle = themeColor("grid");
    context.fillStyle = themeColor("muted");
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const time of ticks(this.range[0], this.range[1], Math.max(2, Math.floor(width / 120)))) {
      const x = Math.round(this.toX(time)) + 0.5;
      strokeLine(context, x, 0, x, height - AXIS_HEIGHT);
      context.fillText(formatSeconds(time), x, height - AXIS_HEIGHT + 5);
    }
  },

  drawLane(context, lane) {
    const [left, right] = this.lanesAt();
    context.fillStyle = themeColor("text");
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText(lane.actor, left - 10, lane.top + ROW / 2);
    lane.rows.forEach((row, number) => {
      const top = lane.top + number * ROW;
      const shown = row.filter((span) => span.end_s >= this.range[0] && span.start_s <= this.range[1]);
      this.paintRow(context, shown, top, left, right);
      for (const span of shown) this.writeSpan(context, span, top, left, right);
    });
  },

  /** Paint each column of pixels with the activities in it, each as high as its share of the column's time. */
  paintRow(context, spans, top, left, right) {
    const covers = new Map();
    for (const span of spans) {
      if (!covers.has(span.activity)) covers.set(span.activity, new Float32Array(Math.ceil(right - left) + 1));
      addCover(covers.get(span.activity), Math.max(this.toX(span.start_s) - left, 0), Math.min(this.toX(span.end_s), right) - left);
    }
    const order = Object.keys(ACTIVITY_COLORS);
    const layers = [...covers].sort(([one], [other]) => order.indexOf(one) - order.indexOf(other));
    const filled = new Float32Array(Math.ceil(right - left) + 1);
    for (const [activity, cover] of layers) {
      context.fillStyle = this.colors[ACTIVITY_COLORS[activity] || "series-7"];
      cover.forEach((share, x) => {
        const height = Math.min(share > 0 ? Math.max(share * (ROW - 4), LEAST_HEIGHT) : 0, ROW - 4 - filled[x]);
        if (height <= 0) return;
        filled[x] += height;
        context.fillRect(left + x, top + ROW - 2 - filled[x], 1, height);
      });
    }
  },

  /** Write the name of a span into it where there is room. */
  writeSpan(context, span, top, left, right) {
    const from = Math.max(this.toX(span.start_s), left);
    const length = Math.min(this.toX(span.end_s), right) - from;
    if (length < 46) return;
    const color = ACTIVITY_COLORS[span.activity] || "series-7";
    context.fillStyle = color.startsWith("wait") ? this.colors.text : textColorOn(this.colors[color]);
    context.textAlign = "left";
    context.save();
    context.beginPath();
    context.rect(from, top, length - 4, ROW);
    context.clip();
    context.fillText(span.activity.replaceAll("_", " "), from + 5, top + ROW / 2 + 0.5);
    context.restore();
  },

  drawFlight(context) {
    const [left, right] = this.lanesAt();
    const { training, evaluation } = this.flight;
    const bottom = this.flightTop + FLIGHT_HEIGHT;
    const columns = [];
    let most = 1;
    for (let x = left; x < right; x += 1) {
      const time = this.toTime(x + 0.5);
      const counts = [flightAt(training, time), flightAt(evaluation, time)];
      columns.push(counts);
      most = Math.max(most, counts[0] + counts[1]);
    }
    const scale = (FLIGHT_HEIGHT - 14) / most;
    columns.forEach(([train, evaluate], index) => {
      context.fillStyle = this.colors["series-0"];
      context.globalAlpha = 0.55;
      context.fillRect(left + index, bottom - train * scale, 1, train * scale);
      context.fillStyle = this.colors["series-1"];
      context.fillRect(left + index, bottom - (train + evaluate) * scale, 1, evaluate * scale);
      context.globalAlpha = 1;
    });
    context.fillStyle = themeColor("text");
    context.textAlign = "right";
    context.fillText("episodes", left - 10, this.flightTop + 8);
    context.fillText("in flight", left - 10, this.flightTop + 22);
    context.fillStyle = themeColor("muted");
    context.fillText(String(most), left - 10, bottom - most * scale + 26);
    context.fillText("0", left - 10, bottom - 5);
  },

  fillTotals() {
    const totals = activityTotals(store.spans, this.range);
    const seconds = this.range[1] - this.range[0];
    const head = el("tr", {}, ["Actor", "Activity", "Spans", "Time", "Share"].map((name, at) => el("th", { class: at > 1 ? "number" : "" }, name)));
    const rows = totals.map((total) => {
      const cells = [formatNumber(total.count), formatSeconds(total.seconds), formatShare(total.seconds / seconds)];
      return el(
        "tr",
        {},
        el("td", {}, total.actor),
        el("td", {}, swatch(ACTIVITY_COLORS[total.activity] || "series-7"), total.activity.replaceAll("_", " ")),
        cells.map((text) => el("td", { class: "number" }, text)),
      );
    });
    const title = `What took the time, from ${formatSeconds(this.range[0])} to ${formatSeconds(this.range[1])}`;
    fill(this.totals, el("h3", {}, title), el("table", { class: "plain" }, head, rows));
  },
};

/** Add a span from pixel `from` to pixel `to` to the covered part of each column. */
function addCover(cover, from, to) {
  const [first, last] = [Math.floor(from), Math.min(Math.floor(to), cover.length - 1)];
  for (let x = first; x <= last; x += 1) cover[x] += Math.min(to, x + 1) - Math.max(from, x);
}

/** Spread spans that overlap over rows, so that each is visible. */
function packLane(actor, spans) {
  const rows = [];
  for (const span of [...spans].sort((a, b) => a.start_s - b.start_s)) {
    const row = rows.find((taken) => taken[taken.length - 1].end_s <= span.start_s + 1e-9);
    if (row) row.push(span);
    else rows.push([span]);
  }
  return { actor, rows: rows.length ? rows : [[]] };
}

/** Return the sorted starts and ends of episodes, by purpose. */
function inFlight(columns) {
  const found = { training: { starts: [], ends: [] }, evaluation: { starts: [], ends: [] } };
  for (let row = 0; row < columns.count; row += 1) {
    const lists = found[columns.purpose[row] === "evaluation" ? "evaluation" : "training"];
    if (!isNumber(columns.started_s[row])) continue;
    lists.starts.push(columns.started_s[row]);
    lists.ends.push(columns.ended_s[row]);
  }
  for (const lists of Object.values(found)) {
    lists.starts = Float64Array.from(lists.starts).sort();
    lists.ends = Float64Array.from(lists.ends).sort();
  }
  return found;
}

function flightAt({ starts, ends }, time) {
  return countUpTo(starts, time) - countUpTo(ends, time);
}

/** Return how many of the sorted values are at most `bound`. */
function countUpTo(values, bound) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= bound) low = middle + 1;
    else high = middle;
  }
  return low;
}

function timelineRange(spans, flight) {
  const last = (values) => (values.length ? values[values.length - 1] : 0);
  let end = Math.max(last(flight.training.ends), last(flight.evaluation.ends));
  for (const span of spans) end = Math.max(end, span.end_s);
  return end > 0 ? [0, end] : null;
}

function activityTotals(spans, [low, high]) {
  const totals = new Map();
  for (const span of spans) {
    const seconds = Math.min(span.end_s, high) - Math.max(span.start_s, low);
    if (seconds < 0) continue;
    const key = `${span.actor} ${span.activity}`;
    const total = totals.get(key) || { actor: span.actor, activity: span.activity, count: 0, seconds: 0 };
    total.count += 1;
    total.seconds += seconds;
    totals.set(key, total);
  }
  return [...totals.values()].sort((a, b) => LANES.indexOf(a.actor) - LANES.indexOf(b.actor) || b.seconds - a.seconds);
}
