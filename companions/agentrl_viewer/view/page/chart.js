// A chart of lines on a canvas, with axes, dots for evaluations and a hover line, and the card around it.

const CHART = { left: 46, right: 12, top: 8, bottom: 20 };

function finiteRange(values, share = 0.05) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (!isNumber(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return null;
  const pad = (high - low || Math.abs(high) || 1) * share;
  return [low - pad, high + pad];
}

/** Return means over the last values, weighted so that the last `width` count most; gaps stay gaps. */
function smoothed(values, width) {
  if (width <= 1) return values;
  const keep = 1 - 1 / width;
  let [sum, weight] = [0, 0];
  return values.map((value) => {
    if (!isNumber(value)) return null;
    sum = sum * keep + value;
    weight = weight * keep + 1;
    return sum / weight;
  });
}

/** The scales of a chart: from values to pixels. */
function chartScales(chart, width, height) {
  const inner = [width - CHART.left - CHART.right, height - CHART.top - CHART.bottom];
  const [x0, x1] = chart.xRange;
  const [y0, y1] = chart.yRange;
  return {
    x: (value) => CHART.left + (inner[0] * (value - x0)) / (x1 - x0 || 1),
    y: (value) => CHART.top + inner[1] * (1 - (value - y0) / (y1 - y0 || 1)),
    toX: (pixel) => x0 + ((pixel - CHART.left) / inner[0]) * (x1 - x0),
  };
}

/** Draw `chart`: `series` of `{color, xs, ys, faint, dots}` with names of colors of the theme, `xRange`, `yRange`, `hoverX`, `xText`. */
function drawChart(canvas, chart, height) {
  const width = canvas.clientWidth;
  if (!width) return null;
  const context = startDrawing(canvas, width, height);
  const scales = chartScales(chart, width, height);
  drawAxes(context, chart, scales, width, height);
  context.save();
  context.beginPath();
  context.rect(CHART.left, CHART.top - 2, width - CHART.left - CHART.right + 5, height - CHART.top - CHART.bottom + 4);
  context.clip();
  for (const series of chart.series) drawSeries(context, series, scales);
  context.restore();
  if (isNumber(chart.hoverX)) {
    context.strokeStyle = themeColor("muted");
    context.setLineDash([3, 3]);
    strokeLine(context, scales.x(chart.hoverX), CHART.top, scales.x(chart.hoverX), height - CHART.bottom);
    context.setLineDash([]);
  }
  return scales;
}

function strokeLine(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function drawAxes(context, chart, scales, width, height) {
  context.lineWidth = 1;
  context.fillStyle = themeColor("muted");
  context.strokeStyle = themeColor("grid");
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const value of ticks(chart.yRange[0], chart.yRange[1], 4)) {
    const y = Math.round(scales.y(value)) + 0.5;
    strokeLine(context, CHART.left, y, width - CHART.right, y);
    context.fillText(formatNumber(Number(value.toPrecision(10))), CHART.left - 6, y);
  }
  context.textAlign = "center";
  context.textBaseline = "top";
  for (const value of ticks(chart.xRange[0], chart.xRange[1], Math.max(3, Math.floor(width / 90)))) {
    context.fillText(chart.xText(value), scales.x(value), height - CHART.bottom + 5);
  }
}

function drawSeries(context, series, scales) {
  context.strokeStyle = themeColor(series.color);
  context.fillStyle = themeColor(series.color);
  context.globalAlpha = series.faint ? 0.25 : 1;
  context.lineWidth = series.faint ? 1 : 1.6;
  context.lineJoin = "round";
  let isOpen = false;
  if (series.dots) context.setLineDash([2, 3]);
  context.beginPath();
  series.xs.forEach((x, index) => {
    const y = series.ys[index];
    if (!isNumber(x) || !isNumber(y)) {
      isOpen = false;
      return;
    }
    if (isOpen) context.lineTo(scales.x(x), scales.y(y));
    else context.moveTo(scales.x(x), scales.y(y));
    isOpen = true;
  });
  context.stroke();
  context.setLineDash([]);
  const few = series.xs.length <= 2;
  if (series.dots || few) {
    series.xs.forEach((x, index) => {
      if (!isNumber(series.ys[index])) return;
      context.beginPath();
      context.arc(scales.x(x), scales.y(series.ys[index]), 3, 0, 7);
      context.fill();
    });
  }
  context.globalAlpha = 1;
}

/** Return the index of the x that is nearest to `value`; -1 where there is none. `xs` rise. */
function nearestIndex(xs, value) {
  let best = -1;
  let distance = Infinity;
  xs.forEach((x, index) => {
    if (isNumber(x) && Math.abs(x - value) < distance) [best, distance] = [index, Math.abs(x - value)];
  });
  return best;
}

/** A card: a heading, a sentence, a chart and its legend. `onhover(x)` gets the x under the pointer, or null; `onpick(x)` a click. */
class ChartCard {
  constructor({ id, title, text, chart, height = 150, onhover, onpick }) {
    [this.chart, this.height] = [chart, height];
    this.canvas = el("canvas", { class: onpick ? "chart pick" : "chart", role: "img", "aria-label": `${title}. ${text || ""}` });
    this.legend = el("div", { class: "legend" });
    const words = text ? el("p", { class: "note card-text" }, text) : null;
    this.node = el("section", { class: "card", "data-card": id || title }, el("h3", {}, title), words, this.canvas, this.legend);
    const toX = (event) => this.scales && this.scales.toX(event.offsetX);
    if (onhover) this.canvas.addEventListener("mousemove", (event) => onhover(toX(event)));
    if (onhover) this.canvas.addEventListener("mouseleave", () => onhover(null));
    if (onpick) this.canvas.addEventListener("click", (event) => this.scales && onpick(toX(event)));
  }

  /** Draw the chart, and the legend with the values at `x`, or with the last ones where it is null. */
  draw(x) {
    const main = this.chart.series.find((series) => series.raw && !series.dots) || this.chart.series[0];
    const index = x === null ? -1 : nearestIndex(main.xs, x);
    this.chart.hoverX = index < 0 ? null : main.xs[index];
    this.scales = drawChart(this.canvas, this.chart, this.height);
    const at = index < 0 ? null : el("span", { class: "at" }, `${this.chart.xName} ${this.chart.xText(main.xs[index])}`);
    fill(this.legend, at, this.chart.series.filter((one) => one.raw).map((one) => legendItem(one, this.chart.hoverX)));
  }
}

/** Return a legend entry with the value at `x`, or the last one. */
function legendItem(series, x) {
  let index = x === null ? -1 : nearestIndex(series.xs, x);
  if (x === null) for (index = series.raw.length - 1; index > 0 && !isNumber(series.raw[index]); ) index -= 1;
  const mark = swatch(series.color, series.dots ? "dot" : "");
  return el("span", { class: "item", title: series.hint }, mark, series.name, el("b", {}, formatNumber(series.raw[index])));
}

/** Return the ranges of a chart of series; `floor` is in sight where values are not below it. */
function chartOf(series, { floor, xText = formatNumber, xName = "step" } = {}) {
  const yRange = finiteRange(series.flatMap((one) => one.ys)) || [0, 1];
  if (floor !== undefined) yRange[0] = Math.min(floor, yRange[0] < 0 ? yRange[0] : floor);
  return { series, xRange: finiteRange(series.flatMap((one) => one.xs), 0) || [0, 1], yRange, xText, xName };
}

function numberOf(value) {
  return isNumber(value) ? value : null;
}
