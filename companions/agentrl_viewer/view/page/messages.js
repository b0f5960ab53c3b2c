// One conversation: messages as plain text, tool calls and tool results folded.

const LONG_TEXT = 1600;

/** Return the text of a message's content: a string, or the texts of its parts. */
function contentText(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return JSON.stringify(content, null, 2);
  return content.map((part) => (typeof part === "string" ? part : part.text ?? `[${part.type || "part"}]`)).join("\n");
}

/** Return the node of one message; `body`, if given, replaces its text (the token layer does that). */
function messageNode(message, { heading = [], body = null } = {}) {
  const role = String(message.role || "message");
  const isTool = role === "tool" || role === "function";
  const name = message.name ? ` ${message.name}` : "";
  const head = el("header", {}, el("span", { class: "role" }, role + name), heading);
  const content = contentText(message.content);
  const parts = body ? [body] : [reasoningNode(message), textNode(content, isTool), ...(message.tool_calls || []).map(callNode)];
  return el("article", { class: `message role-${roleClass(role)}` }, head, parts);
}

function roleClass(role) {
  return ["system", "user", "assistant", "tool"].includes(role) ? role : "other";
}

function textNode(text, isFolded) {
  if (!text) return null;
  if (!isFolded && text.length <= LONG_TEXT) return el("div", { class: "text" }, text);
  const isShort = text.length <= 200 && !text.includes("\n");
  if (isShort) return el("div", { class: "text" }, text);
  const first = text.split("\n", 1)[0].slice(0, 100);
  const summary = el("summary", {}, first + (first.length < text.length ? " …" : ""), el("small", {}, ` ${formatNumber(text.length)} characters`));
  const whole = el("div", { class: "text" }, text);
  return el("details", { class: "fold", open: !isFolded }, summary, whole);
}

function reasoningNode(message) {
  const reasoning = message.reasoning_content || message.reasoning;
  if (!reasoning) return null;
  return el("details", { class: "fold reasoning" }, el("summary", {}, "reasoning"), el("div", { class: "text" }, contentText(reasoning)));
}

function callNode(call) {
  const named = call.function || call;
  const given = typeof named.arguments === "string" ? named.arguments : JSON.stringify(named.arguments ?? {});
  const summary = el("summary", {}, el("b", {}, `${named.name || "tool"}`), el("code", {}, shortened(given, 90)));
  return el("details", { class: "fold call" }, summary, el("pre", {}, prettyJson(given)));
}

function shortened(text, length) {
  return text.length > length ? `${text.slice(0, length)}…` : text;
}

/** Return JSON with line breaks, or the text as it is where it is not JSON: models write both. */
function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Return what a turn's header says: its number, tokens, version, log-prob, reward, advantage, why it stopped or forked. */
function turnFacts(episode, index) {
  const turn = episode.turns[index];
  const versions = [...new Set(turn.spans.map((span) => span[2]))];
  const facts = [el("span", {}, `turn ${index}`), el("span", {}, `${formatNumber(turn.output_ids.length)} tokens`)];
  if (turn.role) facts.push(el("span", { class: "chip", title: "role of the turn" }, turn.role));
  if (turn.player) facts.push(el("span", { class: "chip" }, turn.player));
  if (versions.length) facts.push(el("span", { title: "policy version of the sampled tokens" }, `v${versions.join(", v")}`));
  if (turn.output_ids.length) facts.push(el("span", { title: "mean log-prob of a token, nats" }, `log-prob ${formatNumber(mean(turn.output_logprobs))}`));
  if (isNumber(turn.reward)) facts.push(el("span", { class: "chip reward" }, `reward ${formatNumber(turn.reward)}`));
  if (isNumber(turn.advantage)) facts.push(el("span", { class: "chip" }, `advantage ${formatNumber(turn.advantage)}`));
  if (turn.temperature === 0) facts.push(el("span", { class: "chip" }, "greedy"));
  if (turn.truncated_by) {
    const settings = Object.entries(turn.truncated_by).map(([name, value]) => `${name} ${formatNumber(value)}`).join(", ");
    facts.push(el("span", { class: "chip warn", title: "the log-probs are those of the whole distribution" }, `truncated: ${settings}`));
  }
  if (turn.stop_reason !== "stop") facts.push(el("span", { class: "chip warn" }, turn.stop_reason));
  if (turn.kept_thinking) facts.push(el("span", { class: "chip" }, "kept reasoning"));
  if (isNumber(turn.cached_tokens)) facts.push(el("span", { title: "prompt tokens from the server's prefix cache" }, `${formatNumber(turn.cached_tokens)} cached`));
  if (isNumber(turn.started_s)) facts.push(el("span", {}, formatSeconds(turn.ended_s - turn.started_s)));
  return facts;
}

function forkNote(turn) {
  if (!turn.fork) return null;
  return el("div", { class: "fork-note" }, `${FORK_MARK} fork: ${forkText(turn.fork)}`);
}

const FORK_MARK = "↳";
const FORK_TEXTS = {
  history_edited: "the request changed, removed or inserted an earlier message",
  thinking_stripped: "the chat template drops earlier reasoning",
  tools_changed: "the request has other tools",
  new_conversation: "the request continues no recorded turn",
  template_changed: "the chat template writes known messages differently",
};

function forkText(reason) {
  const known = FORK_TEXTS[reason];
  return known ? `${reason.replaceAll("_", " ")} – ${known}` : String(reason).replaceAll("_", " ");
}

function mean(values) {
  const given = values.filter(isNumber);
  return given.length ? given.reduce((sum, value) => sum + value, 0) / given.length : NaN;
}
