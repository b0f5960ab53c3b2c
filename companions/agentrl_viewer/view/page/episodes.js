// The view of all episodes: filters, the search in their texts, and the table.

const episodesView = {
  found: null,
  foundText: "",
  search: null,

  open(container) {
    this.container = container;
    this.node = null;
    this.build();
  },

  update(changed) {
    if (!changed.has("episodes") && !changed.has("run")) return;
    if (!this.node) {
      this.build();
      return;
    }
    if (!this.controls.contains(document.activeElement)) this.fillControls();
    this.refresh();
  },

  resize() {
    if (this.node) this.refresh();
  },

  close() {
    if (this.search) {
      this.search.abort();
      this.foundText = null; // what it would have found is asked again
    }
    if (this.node) [this.scrollTop, this.selectedRow] = [this.table.scroller.scrollTop, this.table.selectedRow];
  },

  build() {
    if (!store.columns.count) {
      fill(this.container, this.nothing());
      return;
    }
    const open = (row) => (location.hash = routeTo("episode", [store.columns.episode_id[row]]));
    this.table = new RowTable(open, (name) => this.sortBy(name));
    this.table.selectedRow = this.selectedRow ?? null;
    this.count = el("span", { class: "note", id: "episode-count" });
    this.searchState = el("span", { class: "note", id: "search-state" });
    this.textInput = el("input", {
      name: "text",
      type: "search",
      placeholder: "search in messages, Enter",
      "aria-label": "Search in messages",
      value: readRoute().query.get("text") || "",
      onkeydown: (event) => event.key === "Enter" && this.searchTexts(this.textInput.value),
      onsearch: () => this.textInput.value || this.searchTexts(""),
    });
    this.controls = el("div", {});
    this.fillControls();
    const state = el("div", { class: "state" }, this.count, this.searchState);
    this.node = el("div", { class: "episodes" }, this.controls, state, this.table.node);
    fill(this.container, this.node);
    this.refresh();
    this.table.scroller.scrollTop = this.scrollTop || 0;
    this.table.scroller.focus({ preventScroll: true });
    const text = readRoute().query.get("text") || "";
    if (text !== this.foundText) this.searchTexts(text);
  },

  fillControls() {
    const onchange = (changes) => {
      setQuery(changes);
      this.refresh();
    };
    fill(this.controls, filterControls(store.columns, readRoute().query, onchange, this.textInput));
  },

  nothing() {
    if (!store.run) return emptyState("Reading the run…", "");
    if (!store.run.saves_episodes) {
      return emptyState("This run records no episodes", "engine.save_trajectories is false in its run file.");
    }
    return emptyState("No episode has ended yet", "They appear here as soon as one has.");
  },

  sort() {
    const given = readRoute().query.get("sort") || "";
    return { name: given.replace(/^-/, ""), isDescending: given.startsWith("-") || given === "" };
  },

  sortBy(name) {
    const { name: current, isDescending } = this.sort();
    setQuery({ sort: current === name && isDescending ? name : `-${name}` });
    this.refresh();
  },

  refresh() {
    const filters = readFilters(readRoute().query);
    const sort = this.sort();
    const rows = sortedRows(store.columns, matchingRows(store.columns, filters, this.found), sort);
    this.table.show(store.columns, rows, sort);
    fill(this.count, `${formatNumber(rows.length)} of ${formatNumber(store.columns.count)} episodes`);
    shownEpisodes = rows.map((row) => store.columns.episode_id[row]);
  },

  /** Read the search's answer line by line: each is a match or how far the search has come. */
  async searchTexts(text) {
    if (this.search) this.search.abort();
    this.search = null;
    setQuery({ text });
    this.foundText = text;
    this.found = text ? new Set() : null;
    fill(this.searchState);
    if (!text) return this.refresh();
    const search = (this.search = new AbortController());
    try {
      const reply = await fetch(store.address("search", { text }), { signal: search.signal });
      if (!reply.ok) throw new Error(await reply.text());
      for await (const line of readLines(reply.body)) this.takeLine(JSON.parse(line));
      this.search = null;
    } catch (error) {
      if (error.name !== "AbortError") fill(this.searchState, `The search failed: ${error.message}`);
    }
  },

  takeLine(line) {
    if (line.problem) throw new Error(line.problem);
    for (const match of line.matches) this.found.add(match);
    const state = line.is_complete ? "" : line.is_cut ? "; the search stopped here" : "…";
    const read = `${formatNumber(line.files_read)} of ${formatNumber(line.files)} files read`;
    fill(this.searchState, `${formatNumber(this.found.size)} found, ${read}${state}`);
    this.refresh();
  },

  keys: {
    j: (view) => view.table && view.table.move(1),
    k: (view) => view.table && view.table.move(-1),
    ArrowDown: (view) => view.table && view.table.move(1),
    ArrowUp: (view) => view.table && view.table.move(-1),
    Enter: (view) => view.table && view.table.enter(),
    "/": (view) => view.node && view.node.querySelector("input[name=q]").focus(),
    s: (view) => view.node && view.textInput.focus(),
  },
};

/** The ids in the order of the table, for j and k in one episode. */
let shownEpisodes = [];

async function* readLines(stream) {
  const decoder = new TextDecoder();
  const reader = stream.getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    yield* lines;
  }
}
