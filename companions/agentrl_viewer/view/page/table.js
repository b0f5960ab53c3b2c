// The table of episodes: only the rows in sight are elements, so that 50,000 scroll as smoothly as fifty.

const ROW_HEIGHT = 26;
const SPARE_ROWS = 8;
const TABLE_COLUMNS = [
  { name: "episode", width: "minmax(72px, 1fr)", value: (c, r) => c.episode_id[r], isText: true, isNarrow: true },
  { name: "task", width: "minmax(80px, 1.2fr)", value: (c, r) => c.task_id[r], isText: true },
  {
    name: "prompt",
    width: "minmax(120px, 3fr)",
    value: (c, r) => c.prompt[r] || c.task_id[r],
    title: "first words of the prompt; the task's id where they are not recorded",
    isText: true,
    isNarrow: true,
  },
  { name: "step", width: "44px", value: (c, r) => c.step[r] },
  { name: "group", width: "52px", value: (c, r) => c.group[r] },
  { name: "purpose", width: "84px", value: (c, r) => c.purpose[r], isText: true },
  { name: "return", width: "66px", value: (c, r) => c.episode_return[r], isReturn: true, isNarrow: true },
  { name: "outcome", width: "68px", value: (c, r) => outcomeOf(c, r), isText: true, isOutcome: true, isNarrow: true },
  { name: "turns", width: "44px", value: (c, r) => c.turns[r] },
  { name: "output", width: "54px", value: (c, r) => c.output_tokens[r], title: "output tokens" },
  { name: "context", width: "58px", value: (c, r) => c.context_tokens[r], title: "context tokens" },
  { name: "branches", width: "64px", value: (c, r) => c.branches[r] },
  { name: "forks", width: "minmax(90px, 1.3fr)", value: (c, r) => forksText(c.forks[r]), isText: true },
  { name: "stop", width: "minmax(84px, 1fr)", value: (c, r) => c.failure[r] || c.stop_reason[r], isText: true },
  { name: "versions", width: "64px", value: (c, r) => c.min_version[r], title: "of the sampled tokens", isVersions: true },
  { name: "seconds", width: "62px", value: (c, r) => duration(c.started_s[r], c.ended_s[r]), isSeconds: true },
];

/** Return the columns that the page has room for. */
function shownColumns() {
  return innerWidth > 700 ? TABLE_COLUMNS : TABLE_COLUMNS.filter((column) => column.isNarrow);
}

/** A list of rows that scrolls: `onopen(row)` is called for the row that is clicked or entered. */
class RowTable {
  constructor(onopen, onsort) {
    this.onopen = onopen;
    this.rows = [];
    this.columns = { count: 0 };
    this.selected = 0;
    this.selectedRow = null;
    this.drawn = new Map();
    this.returns = [0, 1];
    this.header = el("div", { class: "row header", role: "row" });
    this.body = el("div", { class: "rows" });
    this.scroller = el("div", { class: "scroller", tabindex: "0", role: "grid", "aria-label": "Episodes" }, this.header, this.body);
    this.node = this.scroller;
    this.scroller.addEventListener("scroll", () => this.draw());
    this.onsort = onsort;
  }

  /** Show `rows` of `columns`; the header marks the column that sorts them. */
  show(columns, rows, sort) {
    this.columns = columns;
    this.rows = rows;
    const at = rows.indexOf(this.selectedRow); // the same episode, wherever it stands now
    this.selected = at >= 0 ? at : Math.min(this.selected, Math.max(0, rows.length - 1));
    this.returns = finiteRange(columns.episode_return || [], 0) || [0, 1];
    const template = shownColumns().map((column) => column.width).join(" ");
    this.scroller.style.setProperty("--columns", template);
    const focused = this.header.contains(document.activeElement) ? document.activeElement.dataset.column : null;
    fill(this.header, shownColumns().map((column) => this.heading(column, sort)));
    if (focused) this.header.querySelector(`[data-column=${focused}]`)?.focus();
    this.body.style.height = `${rows.length * ROW_HEIGHT}px`;
    this.drawn.clear();
    this.draw();
  }

  heading(column, sort) {
    const isSorted = sort.name === column.name;
    const arrow = isSorted ? (sort.isDescending ? " ▾" : " ▴") : "";
    const kind = column.isText ? "cell" : "cell number";
    const onclick = () => this.onsort(column.name);
    const button = el("button", { class: isSorted ? "sorted" : null, title: column.title, "data-column": column.name, onclick }, column.name + arrow);
    const order = isSorted ? (sort.isDescending ? "descending" : "ascending") : null;
    return el("span", { class: kind, role: "columnheader", "aria-sort": order }, button);
  }

  draw() {
    const top = this.scroller.scrollTop;
    const first = Math.max(0, Math.floor(top / ROW_HEIGHT) - SPARE_ROWS);
    const last = Math.min(this.rows.length, Math.ceil((top + this.scroller.clientHeight) / ROW_HEIGHT) + SPARE_ROWS);
    for (const [at, node] of this.drawn) {
      if (at >= first && at < last) continue;
      node.remove();
      this.drawn.delete(at);
    }
    if (!this.drawn.size) this.body.replaceChildren();
    const added = [];
    for (let at = first; at < last; at += 1) {
      if (this.drawn.has(at)) continue;
      const node = this.rowNode(at);
      this.drawn.set(at, node);
      added.push(node);
    }
    this.body.append(...added);
  }

  rowNode(at) {
    const row = this.rows[at];
    const node = el("a", {
      class: `row${at === this.selected ? " selected" : ""}`,
      role: "row",
      id: `row-${at}`,
      tabindex: "-1", // the arrow keys move in the table, so that Tab leads past its rows
      href: routeTo("episode", [this.columns.episode_id[row]]),
      onclick: () => this.select(at),
    });
    node.style.top = `${at * ROW_HEIGHT}px`;
    for (const column of shownColumns()) {
      const cell = this.cell(column, row);
      cell.setAttribute("role", "gridcell");
      node.append(cell);
    }
    return node;
  }

  cell(column, row) {
    const value = column.value(this.columns, row);
    if (column.isText) {
      const outcome = column.isOutcome ? ` outcome-${value}` : "";
      return el("span", { class: `cell${outcome}`, title: column.name === "prompt" ? value : null }, value === "no" && column.isOutcome ? "–" : String(value ?? "–"));
    }
    if (column.isVersions) {
      const [low, high] = [this.columns.min_version[row], this.columns.max_version[row]];
      return el("span", { class: "cell number" }, low === null ? "–" : low === high ? String(low) : `${low}–${high}`);
    }
    const node = el("span", { class: "cell number" }, column.isSeconds ? formatSeconds(value) : formatNumber(value));
    if (column.isReturn && isNumber(value)) {
      const share = (value - this.returns[0]) / (this.returns[1] - this.returns[0] || 1);
      node.style.setProperty("--share", `${Math.round(100 * share)}%`);
      node.classList.add("return");
    }
    return node;
  }

  select(at) {
    for (const [number, node] of this.drawn) node.classList.toggle("selected", number === at);
    this.selected = at;
    this.selectedRow = this.rows[at];
    this.scroller.setAttribute("aria-activedescendant", `row-${at}`);
  }

  /** Move the selection by some rows and keep it in sight. */
  move(by) {
    this.scroller.focus({ preventScroll: true }); // Enter opens the row, and does not use a heading once more
    this.select(Math.min(Math.max(this.selected + by, 0), Math.max(0, this.rows.length - 1)));
    const [top, height] = [this.selected * ROW_HEIGHT, this.scroller.clientHeight - ROW_HEIGHT];
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    if (top + ROW_HEIGHT > this.scroller.scrollTop + height) this.scroller.scrollTop = top + ROW_HEIGHT - height;
    this.draw();
  }

  enter() {
    if (this.rows.length) this.onopen(this.rows[this.selected]);
  }
}

function forksText(forks) {
  const reasons = Object.entries(forks).map(([reason, count]) => (count > 1 ? `${count} × ` : "") + reason.replaceAll("_", " "));
  return reasons.join(", ") || null;
}

/** Return `rows` sorted by a column; rows without a value come last. */
function sortedRows(columns, rows, sort) {
  const column = TABLE_COLUMNS.find((one) => one.name === sort.name);
  if (!column) return sort.isDescending ? rows.slice().reverse() : rows;
  const sign = sort.isDescending ? -1 : 1;
  const values = new Map(rows.map((row) => [row, column.value(columns, row)]));
  const compare = (a, b) => {
    const [x, y] = [values.get(a), values.get(b)];
    if (x === null || x === undefined || Number.isNaN(x)) return y === null || y === undefined || Number.isNaN(y) ? a - b : 1;
    if (y === null || y === undefined || Number.isNaN(y)) return -1;
    return x < y ? -sign : x > y ? sign : a - b;
  };
  return rows.slice().sort(compare);
}
