// One episode: facts, the tree of its turns, and the conversation of one branch as text or as tokens.

const episodeView = {
  open(container, route) {
    this.container = container;
    this.wanted = route.parts[0];
    this.episode = null;
    fill(container, el("p", { class: "note" }, "Reading the episode…"));
    this.load();
  },

  async load() {
    const wanted = this.wanted;
    try {
      const episode = await readEpisode(wanted);
      if (this.wanted === wanted) this.show(episode);
    } catch (error) {
      if (this.wanted === wanted) fill(this.container, emptyState(`No episode ${wanted}`, error.message));
    }
  },

  update(changed) {
    if (changed.has("episodes") && this.siblings) fill(this.siblings, siblingLinks(this.episode));
  },

  resize() {},

  close() {
    this.wanted = null;
    this.siblings = null;
    this.conversation = null;
    hideTip();
  },

  show(episode) {
    this.episode = episode;
    const query = readRoute().query;
    const leaves = leavesOf(episode.turns);
    const asked = Number(query.get("leaf") ?? NaN);
    this.leaf = leaves.includes(asked) ? asked : leaves[leaves.length - 1];
    this.layer = LAYERS.some(([name]) => name === query.get("layer")) ? query.get("layer") : "text";
    this.siblings = el("nav", { class: "siblings", "aria-label": "Episodes of the group" }, siblingLinks(episode));
    this.tree = el("div", {});
    this.layers = el("div", { class: "layers", role: "group", "aria-label": "Layers" });
    this.legend = el("div", { class: "legend" });
    this.conversation = el("div", { class: "conversation" });
    const side = el("aside", {}, factsNode(episode), this.tree, metricsNode(episode), taskNode(episode));
    const main = el("div", { class: "episode-main" }, failureNode(episode), el("div", { class: "sticky" }, this.layers, this.legend), this.conversation);
    fill(this.container, episodeHead(episode), this.siblings, el("div", { class: "episode-body" }, side, main));
    this.draw();
  },

  draw() {
    const { episode } = this;
    if (!episode.turns.length) {
      fill(this.conversation, emptyState("This episode made no model call", "It ended before its first turn."));
      return;
    }
    fill(this.tree, episode.turns.length > 1 ? treeNode(episode, this.leaf, (leaf, turn) => this.pick(leaf, turn)) : null);
    const focused = document.activeElement?.dataset?.layer;
    fill(this.layers, LAYERS.map(([name, text, hint], number) => this.layerButton(name, text, hint, number)));
    if (focused) this.layers.querySelector(`[data-layer=${focused}]`).focus();
    this.legend.hidden = this.layer === "text";
    fill(this.legend, this.layer === "text" ? null : layerLegend(this.layer, episode));
    fill(this.conversation, conversationNodes(episode, this.leaf, this.layer, () => this.draw()));
  },

  layerButton(name, text, hint, number) {
    const isOn = name === this.layer;
    const pick = () => this.setLayer(name);
    return el("button", { "aria-pressed": String(isOn), title: `${hint} (${number + 1})`, "data-layer": name, onclick: pick }, text);
  },

  setLayer(name) {
    if (!this.episode) return;
    this.layer = name;
    setQuery({ layer: name === "text" ? "" : name });
    this.draw();
  },

  pick(leaf, turn) {
    this.leaf = leaf;
    setQuery({ leaf: String(leaf) });
    this.draw();
    const node = this.conversation.querySelector(`[data-turn="${turn}"]`);
    if (node) node.scrollIntoView({ block: "center" });
  },

  keys: {
    j: (view) => goToEpisode(view.wanted, 1),
    k: (view) => goToEpisode(view.wanted, -1),
    ...Object.fromEntries(LAYERS.map(([name], number) => [String(number + 1), (view) => view.setLayer(name)])),
    Escape: () => history.length > 1 && history.back(),
  },
};

/** Return an episode with what the views need beside its record. */
async function readEpisode(episodeId, run = store) {
  const episode = embedded ? embedded.episode : await run.fetchJson(`episode/${encodeURIComponent(episodeId)}`);
  const sizes = episode.turns.map((turn) => Math.abs(turn.advantage ?? 0));
  episode.max_advantage = Math.max(0, ...sizes);
  return episode;
}

/** Open the episode that is some rows further in the table as it was last shown; Escape still leads back to the table. */
function goToEpisode(episodeId, by) {
  const ids = shownEpisodes.length ? shownEpisodes : store.columns.episode_id || [];
  const next = ids[ids.indexOf(episodeId) + by];
  if (next !== undefined) location.replace(routeTo("episode", [next], Object.fromEntries(layerOfRoute())));
}

function layerOfRoute() {
  const layer = readRoute().query.get("layer");
  return layer ? [["layer", layer]] : [];
}

function episodeHead(episode) {
  const { summary } = episode;
  return el(
    "div",
    { class: "episode-head" },
    el("h2", {}, `Episode ${summary.episode_id}`),
    outcomeChips(summary),
    el("span", { class: "note" }, `task ${summary.task_id}`),
    embedded ? null : el("span", { class: "note right" }, "j and k open the next and the previous episode, 1 to 6 the layers"),
  );
}

/** Return how an episode ended, and its return. */
function outcomeChips(summary) {
  const graded = summary.success === null ? "not graded" : summary.success ? "success" : "no success";
  const outcome = summary.failure !== null ? "failed" : graded;
  return [
    el("span", { class: `chip outcome-${outcome.startsWith("no") ? "no" : outcome}` }, outcome),
    el("span", { class: "chip" }, `return ${formatNumber(summary.episode_return)}`),
  ];
}

/** Return links to the other episodes of the group, and one to compare each with this one. */
function siblingLinks(episode) {
  const rows = embedded ? [] : rowsOfGroup(episode.summary.group);
  if (rows.length < 2) return [];
  const links = rows.map((row) => {
    const id = store.columns.episode_id[row];
    const text = `${id} · ${formatNumber(store.columns.episode_return[row])}`;
    const kind = `chip outcome-${outcomeOf(store.columns, row)}`;
    if (id === episode.summary.episode_id) return el("span", { class: `${kind} current` }, text);
    const compare = el("a", { class: "compare", title: "side by side", "aria-label": `side by side with ${id}`, href: routeTo("compare", [episode.summary.episode_id, id]) }, "⇄");
    return el("span", { class: kind }, el("a", { href: routeTo("episode", [id]) }, text), compare);
  });
  return [el("span", { class: "note" }, `Group ${episode.summary.group}:`), ...links];
}

function factsNode(episode) {
  const { summary, trained } = episode;
  const versions = summary.min_version === null ? "–" : [...new Set([summary.min_version, summary.max_version])].join(" to ");
  const facts = [
    ["purpose", summary.purpose],
    ["step", formatNumber(summary.step)],
    ["stop reason", summary.stop_reason],
    ["final reward", formatNumber(summary.final_reward)],
    ["turns", formatNumber(summary.turns)],
    ["output tokens", formatNumber(summary.output_tokens)],
    ["context tokens", formatNumber(summary.context_tokens)],
    ["branches", formatNumber(summary.branches)],
    ["versions", versions],
    ["trained", trained ? `step ${trained.step}, version ${trained.policy_version}` : "no"],
    ["staleness, versions", trained && summary.min_version !== null ? `at most ${trained.policy_version - summary.min_version}` : "–"],
    ["started", formatSeconds(summary.started_s)],
    ["took", formatSeconds(duration(summary.started_s, summary.ended_s))],
  ];
  if (summary.players.some((player) => player)) facts.push(["players", summary.players.join(", ")]);
  return el("dl", { class: "facts" }, facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function metricsNode(episode) {
  const names = Object.keys(episode.metrics);
  if (!names.length) return null;
  const rows = names.flatMap((name) => [el("dt", {}, name), el("dd", {}, formatNumber(episode.metrics[name]))]);
  return el("section", {}, el("h3", {}, "Recorded by the workflow"), el("dl", { class: "facts" }, rows));
}

function taskNode(episode) {
  if (episode.task === null) return null;
  return el("details", { class: "fold task", open: innerWidth > 900 }, el("summary", {}, "Task"), el("pre", {}, JSON.stringify(episode.task, null, 2)));
}

function failureNode(episode) {
  if (episode.failure === null) return null;
  const { kind, message, traceback } = episode.failure;
  return el("div", { class: "failure" }, el("b", {}, kind), ` ${message}`, traceback ? el("details", { class: "fold" }, el("summary", {}, "traceback"), el("pre", {}, traceback)) : null);
}

/** Return the nodes of the branch that ends at `leaf`, as text or in a token layer. */
function conversationNodes(episode, leaf, layer, onchange) {
  const nodes = [];
  for (const index of pathTo(episode.turns, leaf)) {
    const turn = episode.turns[index];
    nodes.push(forkNote(turn));
    if (turn.tools) nodes.push(toolsNode(turn.tools));
    if (layer === "text") nodes.push(...turn.messages.map((message) => messageNode(message)));
    else nodes.push(el("article", { class: "message role-context" }, el("header", {}, el("span", { class: "role" }, "context"), el("span", {}, `${formatNumber(turn.context_ids.length)} tokens`)), contextNode(turn, onchange)));
    const body = layer === "text" ? null : outputNode(episode, turn, layer);
    const node = messageNode({ role: "assistant", ...turn.message }, { heading: turnFacts(episode, index), body });
    node.setAttribute("data-turn", index);
    nodes.push(node, ...(turn.closing || []).map((message) => messageNode(message)));
  }
  return nodes;
}

function toolsNode(tools) {
  const names = tools.map((tool) => (tool.function || tool).name).join(", ");
  return el("details", { class: "fold tools" }, el("summary", {}, `tools: ${shortened(names, 120)}`), el("pre", {}, JSON.stringify(tools, null, 2)));
}
