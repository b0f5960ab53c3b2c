// Elements, numbers and the tooltip. The files of this folder are joined into one script, so they share these names.
// Text of a run reaches the page through text nodes and attributes only, never as markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

/** Return a new element: `class`, `on...` listeners, `value`, `checked` and `open` as properties, the rest as attributes. */
function el(tag, options, ...children) {
  const node = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(options || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "open") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function fill(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** Return a number as people read it: at most four digits that count, thousands apart. */
function formatNumber(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en-US").replaceAll(",", "\u202f");
  if (size >= 1e6) return `${trim(value / 1e6, 4)}M`;
  if (size >= 1e4) return `${trim(value / 1e3, 4)}k`;
  if (size > 0 && size < 1e-3) return value.toExponential(1).replace("e-", "e−");
  return trim(value, 4);
}

function trim(value, digits) {
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

/** Return the seconds between two moments; null where one of them is not known. */
function duration(start, end) {
  return isNumber(start) && isNumber(end) ? end - start : null;
}

function formatSeconds(value) {
  if (!isNumber(value)) return "–";
  if (Math.abs(value) < 60) return `${trim(value, 3)} s`;
  const whole = Math.round(value);
  const [hours, minutes, seconds] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (part) => String(part).padStart(2, "0");
  return hours ? `${hours} h ${two(minutes)} min` : `${minutes} min ${two(seconds)} s`;
}

function formatShare(value) {
  return isNumber(value) ? `${trim(100 * value, 3)} %` : "–";
}

/** Return the value of a color of the theme, for a canvas. */
function themeColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Return the name of the color of the series with this number; there are eight. */
function seriesColor(number) {
  return `series-${number % 8}`;
}

/** Return a small mark in a color of the theme, which follows a change of the theme. */
function swatch(color, kind = "swatch") {
  const node = el("i", { class: kind });
  node.style.background = `var(--${color})`;
  return node;
}

/** Return the color of text on a colored ground: the darker or the lighter one, whichever stands out more. */
function textColorOn(ground) {
  const [red, green, blue] = [1, 3, 5].map((at) => Number.parseInt(ground.slice(at, at + 2), 16));
  return 0.3 * red + 0.59 * green + 0.11 * blue > 115 ? "#101214" : "#ffffff";
}

/** Show rows of `[name, value]`, or one text, beside `event`: a pointer, or anything with `clientX` and `clientY`. */
function showTip(event, title, rows = []) {
  const tip = document.getElementById("tip");
  fill(
    tip,
    el("b", {}, title),
    rows.map(([name, value]) => el("div", { class: "tip-row" }, el("span", {}, name), el("span", {}, value))),
  );
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 10 : event.clientX + 14;
  const top = Math.min(event.clientY + 14, innerHeight - box.height - 6);
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}

/** Return a canvas context in CSS pixels, cleared, for sharp lines on every screen. */
function startDrawing(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  return context;
}

/** Return about `count` round numbers between two bounds. */
function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + 1e-9 * span; at += 1) found.push(at * step);
  return found;
}

/** Return a message for a place that has nothing to show. */
function emptyState(title, text) {
  return el("div", { class: "empty" }, el("h2", {}, title), el("p", {}, text));
}

/** Return an element with a label before it. */
function labelled(text, control, hint) {
  return el("label", { class: "field", title: hint }, el("span", {}, text), control);
}

function selectBox(name, choices, value, onchange, label) {
  const options = choices.map(([key, text]) => el("option", { value: key }, text));
  const box = el("select", { name, "aria-label": label, onchange: () => onchange(box.value) }, options);
  box.value = value;
  return box;
}
