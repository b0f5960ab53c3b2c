// Two episodes side by side, turn by turn; words that only one of them has are marked.

const MAX_WORDS = 1500;

const compareView = {
  open(container, route) {
    this.container = container;
    const numbers = (route.query.get("runs") || "").split(",");
    this.sides = route.parts.slice(0, 2).map((id, side) => ({ id, run: stores[Number(numbers[side] || store.number)] || store }));
    this.wanted = location.hash;
    fill(container, el("p", { class: "note" }, "Reading the episodes…"));
    this.load(this.wanted);
  },

  async load(wanted) {
    try {
      const episodes = await Promise.all(this.sides.map(({ id, run }) => readEpisode(id, run)));
      if (this.wanted === wanted) this.show(episodes);
    } catch (error) {
      if (this.wanted === wanted) fill(this.container, emptyState("These episodes cannot be compared", error.message));
    }
  },

  update() {},
  resize() {},

  close() {
    this.wanted = null;
  },

  show([left, right]) {
    const paths = [left, right].map((episode) => {
      const leaves = leavesOf(episode.turns);
      return leaves.length ? pathTo(episode.turns, leaves[leaves.length - 1]) : [];
    });
    const heads = [left, right].map((episode, side) => this.head(episode, this.sides[side].run));
    const cells = [];
    for (let at = 0; at < Math.max(paths[0].length, paths[1].length); at += 1) {
      const turns = [left.turns[paths[0][at]], right.turns[paths[1][at]]];
      cells.push(...comparedTurns(left, right, turns, [paths[0][at], paths[1][at]]));
    }
    fill(this.container, comparedFacts(left, right), el("div", { class: "compared" }, heads, cells));
  },

  /** Return who is compared and how it ended: also where the two ended alike. */
  head({ summary }, run) {
    const link = el("a", { href: routeTo("episode", [summary.episode_id], { run: run.number || "" }) }, `Episode ${summary.episode_id}`);
    const own = stores.length > 1 ? el("span", { class: "note" }, swatch(seriesColor(run.number)), run.name) : null;
    return el("div", { class: "compare-head" }, el("h2", {}, link), own, outcomeChips(summary), summary.prompt ? el("p", { class: "note" }, summary.prompt) : null);
  },

  keys: { Escape: () => history.length > 1 && history.back() },
};

/** Return a table of the facts that differ between two episodes. */
function comparedFacts(left, right) {
  const names = ["task_id", "episode_return", "final_reward", "success", "stop_reason", "turns", "output_tokens", "context_tokens", "branches", "min_version", "max_version"];
  const text = (value) => (typeof value === "number" ? formatNumber(value) : String(value ?? "–"));
  const metrics = [...new Set([...Object.keys(left.metrics), ...Object.keys(right.metrics)])];
  const rows = [
    ...names.map((name) => [name.replaceAll("_", " "), text(left.summary[name]), text(right.summary[name])]),
    ...metrics.map((name) => [name, text(left.metrics[name]), text(right.metrics[name])]),
  ];
  const head = el("tr", {}, el("th", {}, ""), [left, right].map((episode) => el("th", {}, episode.summary.episode_id)));
  const always = new Set(["episode return", "success"]);
  const different = rows.filter(([name, one, other]) => one !== other || always.has(name));
  const body = different.map(([name, one, other]) => el("tr", {}, el("td", {}, name), el("td", {}, one), el("td", {}, other)));
  return el("details", { class: "fold compare-facts", open: true }, el("summary", {}, "Return, success, and what differs"), el("table", { class: "plain" }, head, body));
}

/** Return the two cells of a pair of turns: new messages in common are shown as they are, outputs with their differences. */
function comparedTurns(left, right, turns, indices) {
  const texts = turns.map((turn) => (turn ? turn.messages.map(messageText) : []));
  const outputs = turns.map((turn) => (turn ? messageText(turn.message) : ""));
  const [leftWords, rightWords] = differentWords(outputs[0], outputs[1]);
  return [left, right].map((episode, side) => {
    const turn = turns[side];
    if (!turn) return el("div", { class: "cell-turn" }, el("p", { class: "note" }, "no such turn"));
    const other = new Set(texts[1 - side]);
    const messages = turn.messages.map((message, at) => {
      const node = messageNode(message);
      if (turns[1 - side] && !other.has(texts[side][at])) node.classList.add("differs");
      return node;
    });
    const words = el("div", { class: "text" }, (side ? rightWords : leftWords).map(([word, isCommon]) => (isCommon ? word : el("mark", {}, word))));
    const answer = messageNode({ role: "assistant" }, { heading: turnFacts(episode, indices[side]), body: words });
    return el("div", { class: "cell-turn" }, forkNote(turn), messages, answer);
  });
}

/** Return all that a message says, in one text. */
function messageText(message) {
  const calls = (message.tool_calls || []).map((call) => {
    const named = call.function || call;
    return `${named.name}(${typeof named.arguments === "string" ? named.arguments : JSON.stringify(named.arguments)})`;
  });
  return [contentText(message.reasoning_content), contentText(message.content), ...calls].filter(Boolean).join("\n");
}

/** Return the words of two texts as `[word, isCommon]`, by their longest common subsequence; of the first words of long ones. */
function differentWords(left, right) {
  const split = (text) => text.match(/\s+|[^\s]+/g) || [];
  const [a, b] = [split(left), split(right)];
  const common = commonPairs(a.slice(0, MAX_WORDS), b.slice(0, MAX_WORDS));
  const inA = new Set(common.map(([at]) => at));
  const inB = new Set(common.map(([, at]) => at));
  return [a.map((word, at) => [word, inA.has(at)]), b.map((word, at) => [word, inB.has(at)])];
}

function commonPairs(a, b) {
  const width = b.length + 1;
  const lengths = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      lengths[i * width + j] = a[i] === b[j] ? lengths[(i + 1) * width + j + 1] + 1 : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  const pairs = [];
  let [i, j] = [0, 0];
  while (i < a.length && j < b.length) {
    if (a[i] === b[j]) pairs.push([i++, j++]);
    else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return pairs;
}
