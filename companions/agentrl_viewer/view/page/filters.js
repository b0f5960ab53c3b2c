// Which episodes of the index the table shows: the filters are in the hash, and one pass over the columns applies them.

const RANGES = [
  ["return", "Return", (columns, row) => columns.episode_return[row]],
  ["turns", "Turns", (columns, row) => columns.turns[row]],
  ["tokens", "Output tokens", (columns, row) => columns.output_tokens[row]],
  ["step", "Step", (columns, row) => columns.step[row]],
];
const OUTCOMES = [
  ["", "any outcome"],
  ["success", "success"],
  ["no", "no success"],
  ["failed", "failed attempts"],
];

/** Return the filters of a query as plain values. */
function readFilters(query) {
  const text = (name) => query.get(name) || "";
  const filters = { text: text("q").toLowerCase(), purpose: text("purpose"), outcome: text("outcome") };
  Object.assign(filters, { stop: text("stop"), fork: text("fork"), group: text("group"), player: text("player") });
  filters.ranges = RANGES.map(([name, , value]) => ({
    value,
    low: query.has(`${name}_min`) ? Number(query.get(`${name}_min`)) : null,
    high: query.has(`${name}_max`) ? Number(query.get(`${name}_max`)) : null,
  })).filter((range) => range.low !== null || range.high !== null);
  return filters;
}

function outcomeOf(columns, row) {
  if (columns.failure[row] !== null) return "failed";
  return columns.success[row] ? "success" : "no";
}

/** Return the rows that pass; `found` is null or the set of ids that a text search found. */
function matchingRows(columns, filters, found) {
  const rows = [];
  for (let row = 0; row < columns.count; row += 1) if (passes(columns, row, filters, found)) rows.push(row);
  return rows;
}

function passes(columns, row, filters, found) {
  if (found && !found.has(columns.episode_id[row])) return false;
  if (filters.purpose && columns.purpose[row] !== filters.purpose) return false;
  if (filters.outcome && outcomeOf(columns, row) !== filters.outcome) return false;
  if (filters.stop && columns.stop_reason[row] !== filters.stop) return false;
  if (filters.fork && !hasFork(columns.forks[row], filters.fork)) return false;
  if (filters.group && String(columns.group[row]) !== filters.group) return false;
  if (filters.player && !columns.players[row].includes(filters.player)) return false;
  for (const { value, low, high } of filters.ranges) {
    const given = value(columns, row);
    if (!isNumber(given) || (low !== null && given < low) || (high !== null && given > high)) return false;
  }
  if (!filters.text) return true;
  return ["episode_id", "task_id", "prompt"].some((name) => columns[name][row].toLowerCase().includes(filters.text));
}

function hasFork(forks, wanted) {
  return wanted === "any" ? Object.keys(forks).length > 0 : Boolean(forks[wanted]);
}

/** Return the distinct values of a column, sorted. */
function distinct(columns, name) {
  const values = new Set();
  for (let row = 0; row < columns.count; row += 1) if (columns[name][row] !== null) values.add(columns[name][row]);
  return [...values].sort();
}

function distinctKeys(columns, name) {
  const keys = new Set();
  for (let row = 0; row < columns.count; row += 1) for (const key of Object.keys(columns[name][row])) keys.add(key);
  return [...keys].sort();
}

function distinctItems(columns, name) {
  const items = new Set();
  for (let row = 0; row < columns.count; row += 1) for (const item of columns[name][row]) if (item) items.add(item);
  return [...items].sort();
}

/** Return the controls, with the search in texts among them; `onchange` is called with the changes of the query. */
function filterControls(columns, query, onchange, textInput) {
  const named = (values, all) => [["", all], ...values.map((value) => [value, String(value).replaceAll("_", " ")])];
  const select = (name, choices) => selectBox(name, choices, query.get(name) || "", (value) => onchange({ [name]: value }), name);
  const forks = distinctKeys(columns, "forks");
  const players = distinctItems(columns, "players");
  const search = el("input", {
    name: "q",
    type: "search",
    placeholder: "id, task or prompt  ( / )",
    "aria-label": "Filter by id, task or first words of the prompt",
    value: query.get("q") || "",
    oninput: (event) => onchange({ q: event.target.value }),
  });
  const bounds = el(
    "details",
    { class: "fold bounds", open: innerWidth > 700 },
    el("summary", {}, "Bounds"),
    el("div", { class: "controls" }, RANGES.map(([name, text]) => rangeControl(name, text, query, onchange))),
  );
  return el(
    "div",
    { class: "controls filters" },
    search,
    textInput,
    select("purpose", named(distinct(columns, "purpose"), "any purpose")),
    select("outcome", OUTCOMES),
    select("stop", named(distinct(columns, "stop_reason"), "any stop reason")),
    forks.length ? select("fork", [["", "forks or not"], ["any", "any fork"], ...named(forks, "").slice(1)]) : null,
    players.length ? select("player", named(players, "any player")) : null,
    bounds,
  );
}

function rangeControl(name, text, query, onchange) {
  const input = (bound) =>
    el("input", {
      name: `${name}_${bound}`,
      type: "number",
      step: "any",
      placeholder: bound,
      "aria-label": `${text} ${bound}`,
      value: query.get(`${name}_${bound}`) || "",
      oninput: (event) => onchange({ [`${name}_${bound}`]: event.target.value }),
    });
  return el("span", { class: "range" }, text, input("min"), "–", input("max"));
}
