// Which curves stand where. A metric that no card names still has one: in the first section whose pattern its key matches.

const NO_CURVE = new Set(["step", "policy_version", "wall_s", "min_version", "max_version"]);
/** How many cards beyond the named ones a section shows without a fold. */
const MAX_FREE_CARDS = 9;
const SECTIONS = [
  {
    title: "Results",
    match: /^(success|return|pass|workflow|limits|turns_|output_tokens)/,
    isFree: true,
    cards: [
      { title: "Success", text: "Share of the episodes that reached their goal.", keys: ["success_rate"], floor: 0 },
      { title: "Return", text: "Mean sum of the rewards of an episode.", keys: ["return_mean"] },
      { title: "Pass at k", text: "Share of the tasks that one of k attempts solves.", match: /^pass/, floor: 0 },
      { title: "Turns of an episode", text: "Mean number of model calls.", keys: ["turns_mean"], floor: 0 },
      { title: "Output tokens of an episode", text: "Mean number of sampled tokens.", keys: ["output_tokens_mean"], floor: 0 },
    ],
  },
  {
    title: "Learning signal",
    match: /signal|variance|_right|_wrong|solved|advantage|^groups?[._]|^dropped/,
    isFree: true,
    cards: [
      {
        title: "Groups with a signal",
        text: "Share of the groups whose returns differ; the others teach nothing.",
        keys: ["signal_share"],
        floor: 0,
      },
    ],
  },
  {
    title: "Age and agreement of tokens",
    match: /stale|(^|[._])age([._]|$)|by_age|fresh|interrupted|logprob|difference|probe|spot|unchecked|masked|over_age/,
    cards: [
      {
        title: "Staleness, versions",
        text: "How many versions old the trained tokens were.",
        keys: ["staleness_mean", "staleness_p99", "staleness_max"],
        floor: 0,
      },
      {
        title: "Log-probs: server against trainer, nats",
        text: "Both compute the same tokens under the same weights; the two ought to agree.",
        keys: ["trainer.max_logprob_difference", "trainer.mean_logprob_difference", "probe_difference"],
        floor: 0,
      },
    ],
  },
  {
    title: "Policy and loss",
    match: /^trainer\.(loss$|grad|lr|kl|entropy|clip|cap|fallen|log_ratio|ratio|effective|behavior|optimizer|bad|value|critic|learn)|entropy/,
    cards: [
      { title: "Loss", text: "Mean over the optimizer steps. It need not fall: it is no measure of success.", keys: ["trainer.loss"] },
      {
        title: "KL, nats per token",
        text: "How far the policy that is trained has moved from the one that sampled; two estimates of the same.",
        match: /^trainer\.kl_behavior_proximal_k\d$/,
      },
      {
        title: "Gradient norm",
        text: "Size of the gradient before clipping; a jump warns of a step that goes too far.",
        keys: ["trainer.grad_norm"],
        floor: 0,
      },
      {
        title: "Movement of praised tokens, nats per token",
        text: "How far tokens with positive advantage rose since they were sampled; where they fall, success falls later.",
        keys: ["trainer.log_ratio_positive"],
      },
      {
        title: "Entropy, nats per token",
        text: "How undecided the policy is; near 0 it always says the same.",
        match: /^trainer\.entropy$/,
        floor: 0,
      },
    ],
  },
  {
    title: "Speed and waits",
    match: /_s$|_per_s|seconds|busy|cores|bytes|sync_share/,
    cards: [
      { title: "Tokens per second", text: "Sampled since the step before.", keys: ["tokens_per_s"], floor: 0 },
      {
        title: "Waits, seconds",
        text: "Who stood still in a step, and for how long.",
        keys: ["trainer_wait_s", "rollout_wait_s", "loop_blocked_s"],
        floor: 0,
      },
      { title: "Work, seconds", text: "Training, and bringing weights to the servers.", keys: ["train_s", "publish_s", "update_s", "pause_s"], floor: 0 },
    ],
  },
  { title: "Counts and the rest", match: /./, cards: [] },
];

/** Return the names of the numbers in step and evaluation events of runs, sorted. */
function metricNames(runs) {
  const names = new Set();
  for (const run of runs) {
    for (const event of run.metrics) {
      if (event.event !== "step" && event.event !== "evaluation") continue;
      for (const [key, value] of Object.entries(event)) if (isNumber(value)) names.add(key);
    }
  }
  return [...names].filter((name) => !NO_CURVE.has(name)).sort();
}

/** Return the words for a key, which the server takes from the reference of metrics. */
function wordsOf(key) {
  const known = stores.map((one) => one.names[key]).find(Boolean);
  return known || { name: key, unit: "", meaning: "", family: "" };
}

/** Return the title and the sentence of a card for one metric, or for a family such as `forks.REASON`. */
function plainCard(keys) {
  const { name, unit, meaning, family } = wordsOf(keys[0]);
  const title = family && keys.length > 1 ? family.replace(/\.[A-Z_]+$/, "").replaceAll(/[._]/g, " ") : name;
  return { id: family || keys[0], title: capital(title), text: sentenceOf(name, unit, meaning), keys };
}

/** Return the meaning of a metric as a sentence, with its unit where the name does not say it. */
function sentenceOf(name, unit, meaning) {
  const end = unit && !name.includes(unit) && unit !== "as recorded" ? ` (${unit})` : "";
  return meaning || end ? `${capital(meaning || "Unit")}${end}.` : "";
}

function capital(text) {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

/** Return the keys of a card among `names`. */
function cardKeys(card, names) {
  return card.match ? names.filter((name) => card.match.test(name)) : card.keys.filter((key) => names.includes(key));
}

/** Return the sections with the cards for `names`: `cards` in sight, and `folded` ones. */
function arrangeCards(names) {
  const named = new Set(SECTIONS.flatMap((section) => section.cards.flatMap((card) => cardKeys(card, names))));
  const rest = new Map(SECTIONS.map((section) => [section, new Map()]));
  for (const name of names.filter((one) => !named.has(one))) {
    const families = rest.get(SECTIONS.find((section) => section.match.test(name)));
    const family = wordsOf(name).family || name;
    families.set(family, [...(families.get(family) || []), name]);
  }
  return SECTIONS.map((section) => {
    const cards = section.cards.map((card) => ({ ...card, keys: cardKeys(card, names) })).filter((card) => card.keys.length);
    const others = [...rest.get(section).values()].map(plainCard);
    const isFree = section.isFree && others.length <= MAX_FREE_CARDS;
    return { title: section.title, cards: isFree ? [...cards, ...others] : cards, folded: isFree ? [] : others };
  }).filter((section) => section.cards.length + section.folded.length);
}
