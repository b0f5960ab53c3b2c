// The token layer: the ids that the server saw and sampled, colored by what is known of each.

const LAYERS = [
  ["text", "Text", "messages as text"],
  ["logprob", "Log-prob", "how sure the policy was; red tokens were unlikely"],
  ["difference", "Difference", "the server's log-prob minus the trainer's before the step; tokens of earlier versions also differ by what was learned since"],
  ["version", "Version", "the policy version that sampled the token"],
  ["mask", "Loss mask", "which tokens are trained"],
  ["advantage", "Advantage", "of the turn, as it was trained"],
];
const HEAT_STEPS = 10;
const MAX_CONTEXT_TOKENS = 600;

/** Return the class that colors an output token in a layer. */
function tokenClass(layer, episode, turn, at) {
  if (layer === "logprob") return heat(-turn.output_logprobs[at] / 5);
  if (layer === "difference") return differenceClass(tokenDifference(turn, at));
  if (layer === "version") return `version-${tokenVersion(turn, at) % 8}`;
  if (layer === "mask") return isTrained(turn, at) ? "trained" : "untrained";
  if (layer === "advantage") return advantageClass(turn.advantage, episode.max_advantage);
  return "";
}

/** Return the class of a value from 0 (nothing) to 1 (most). */
function heat(share) {
  if (!isNumber(share)) return "unknown";
  return `heat-${Math.max(0, Math.min(HEAT_STEPS, Math.round(share * HEAT_STEPS)))}`;
}

/** A difference of 1e-6 nats or less is nothing, one of 1 nat or more is most. */
function differenceClass(difference) {
  return difference === null ? "unknown" : heat((Math.log10(Math.max(Math.abs(difference), 1e-6)) + 6) / 6);
}

function advantageClass(advantage, most) {
  if (!isNumber(advantage)) return "unknown";
  const size = Math.round((HEAT_STEPS * Math.abs(advantage)) / (most || 1));
  return size === 0 ? "heat-0" : `${advantage > 0 ? "good" : "heat"}-${size}`;
}

function tokenVersion(turn, at) {
  const span = turn.spans.find(([start, end]) => start <= at && at < end);
  return span ? span[2] : -1;
}

/** Return whether a token was in the loss: the trainer recomputes those of a turn with an advantage, but no masked ones. */
function isTrained(turn, at) {
  return turn.is_trained && !(turn.proximal_logprobs && turn.proximal_logprobs[at] === null);
}

function tokenDifference(turn, at) {
  const proximal = turn.proximal_logprobs && turn.proximal_logprobs[at];
  return isNumber(proximal) ? turn.output_logprobs[at] - proximal : null;
}

/** Return the context tokens of a turn: dim, and folded in the middle where there are many. */
function contextNode(turn, onchange) {
  const node = el("div", { class: "tokens context" });
  const total = turn.context_ids.length;
  const shown = turn.is_unfolded || total <= MAX_CONTEXT_TOKENS ? total : MAX_CONTEXT_TOKENS;
  for (let at = 0; at < shown; at += 1) {
    node.append(el("span", { class: "token", "data-at": at }, tokenText(turn.context_texts, turn.context_ids, at)));
  }
  if (shown < total) {
    const show = () => {
      turn.is_unfolded = true;
      onchange();
    };
    node.append(el("button", { class: "more", onclick: show }, `show ${formatNumber(total - shown)} more context tokens`));
  }
  return node;
}

/** Return the output tokens of a turn in the colors of a layer; the pointer shows what is known of a token. */
function outputNode(episode, turn, layer) {
  const node = el("div", { class: "tokens output", tabindex: "0", role: "group", "aria-label": "Sampled tokens; the arrow keys move" });
  for (let at = 0; at < turn.output_ids.length; at += 1) {
    const text = tokenText(turn.output_texts, turn.output_ids, at);
    node.append(el("span", { class: `token ${tokenClass(layer, episode, turn, at)}`, "data-at": at }, text));
  }
  const tell = (place, at) => showTip(place, visibleText(tokenText(turn.output_texts, turn.output_ids, at)), tokenFacts(turn, at));
  node.addEventListener("mousemove", (event) => {
    const at = event.target.dataset && event.target.dataset.at;
    if (at === undefined) hideTip();
    else tell(event, Number(at));
  });
  node.addEventListener("mouseleave", hideTip);
  walkTokens(node, tell);
  return node;
}

/** Let the arrow keys move a cursor over the tokens of a node; `tell(place, at)` shows what is known of the one below it. */
function walkTokens(node, tell) {
  let cursor = null;
  const moveTo = (token) => {
    if (cursor) cursor.classList.remove("cursor");
    cursor = token;
    if (!token) return hideTip();
    token.classList.add("cursor");
    token.scrollIntoView({ block: "nearest" });
    const box = token.getBoundingClientRect();
    tell({ clientX: box.left, clientY: box.bottom }, Number(token.dataset.at));
  };
  const steps = {
    ArrowRight: () => cursor.nextElementSibling,
    ArrowLeft: () => cursor.previousElementSibling,
    Home: () => node.firstElementChild,
    End: () => node.lastElementChild,
  };
  node.addEventListener("focus", () => moveTo(cursor || node.firstElementChild));
  node.addEventListener("blur", () => moveTo(null));
  node.addEventListener("keydown", (event) => {
    if (!steps[event.key] || !cursor) return;
    event.preventDefault();
    moveTo(steps[event.key]() || cursor);
  });
}

function tokenText(texts, ids, at) {
  return texts ? texts[at] : `${ids[at]} `;
}

/** Return a text with its white space visible. */
function visibleText(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(no text)";
}

function tokenFacts(turn, at) {
  const logprob = turn.output_logprobs[at];
  const facts = [
    ["id", String(turn.output_ids[at])],
    ["log-prob", `${formatNumber(logprob)} nats`],
    ["probability", formatShare(Math.exp(logprob))],
    ["version", String(tokenVersion(turn, at))],
  ];
  const proximal = turn.proximal_logprobs && turn.proximal_logprobs[at];
  if (isNumber(proximal)) {
    facts.push(["trainer before the step", `${formatNumber(proximal)} nats`], ["difference", `${formatNumber(tokenDifference(turn, at))} nats`]);
  }
  facts.push(["trained", isTrained(turn, at) ? "yes" : "no"]);
  if (isNumber(turn.advantage)) facts.push(["advantage", formatNumber(turn.advantage)]);
  return facts;
}

/** Return what the colors of a layer mean in this episode. */
function layerLegend(layer, episode) {
  const key = (name, text) => el("span", { class: "item" }, el("i", { class: `token ${name}` }), text);
  const scale = (kind, low, high) => {
    const steps = [];
    for (let step = 0; step <= HEAT_STEPS; step += 1) steps.push(el("i", { class: `token ${step ? kind : "heat"}-${step}` }));
    return el("span", { class: "item scale" }, low, el("span", { class: "ramp" }, steps), high);
  };
  if (layer === "logprob") return [scale("heat", "certain", "5 nats or more (probability under 0.7 %)")];
  if (layer === "difference") {
    const isKnown = episode.turns.some((turn) => turn.proximal_logprobs);
    return isKnown
      ? [scale("heat", "1e−6 nats", "1 nat"), key("unknown", "not recomputed")]
      : ["The trainer recomputed no token of this episode."];
  }
  if (layer === "version") {
    const versions = new Set(episode.turns.flatMap((turn) => turn.spans.map((span) => span[2])));
    const trained = episode.trained ? [`trained at version ${episode.trained.policy_version}`] : [];
    return [...[...versions].sort((a, b) => a - b).map((version) => key(`version-${version % 8}`, `v${version}`)), ...trained];
  }
  if (layer === "mask") {
    if (!episode.trained) return ["No step has trained this episode."];
    return [key("trained", `trained in step ${episode.trained.step}`), key("untrained", "not trained"), "context is never trained"];
  }
  if (layer === "advantage") {
    if (!episode.trained) return ["No step has trained this episode, so its turns have no advantage."];
    const most = formatNumber(episode.max_advantage);
    return [scale("heat", "0", `−${most}`), scale("good", "0", most)];
  }
  return [];
}
