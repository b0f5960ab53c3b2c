// What the page knows of the run. It asks for what is new every second, also after the run has ended: a run may be resumed.

const POLL_MS = 1000;
const HIDDEN_POLL_MS = 10000;

const store = {
  run: null,
  metrics: [],
  spans: [],
  columns: { count: 0 },
  failure: "",
  marks: { metrics: "", timeline: "", episodes: "" },
};

/** Return the JSON of an endpoint. */
async function fetchJson(path) {
  const reply = await fetch(path, { headers: { Accept: "application/json" } }).catch(() => {
    throw new Error("the viewer has ended; start `agentrl view` again");
  });
  if (!reply.ok) {
    const text = await reply.text();
    throw new Error(text || `the viewer answered with status ${reply.status}`);
  }
  return reply.json();
}

async function pollMetrics() {
  const news = await fetchJson(`data/metrics?from=${store.marks.metrics}`);
  if (news.reset) store.metrics = [];
  for (const event of news.events) store.metrics.push(event);
  store.marks.metrics = news.next;
  return news.reset || news.events.length > 0;
}

async function pollTimeline() {
  const news = await fetchJson(`data/timeline?from=${store.marks.timeline}`);
  if (news.reset) store.spans = [];
  for (const span of news.spans) store.spans.push(span);
  store.marks.timeline = news.next;
  return news.reset || news.spans.length > 0;
}

async function pollEpisodes() {
  const news = await fetchJson(`data/episodes?from=${store.marks.episodes}`);
  if (news.reset || store.columns.count === 0) store.columns = { ...news.columns, count: news.count };
  else if (news.count) appendColumns(store.columns, news);
  store.marks.episodes = news.next;
  return news.reset || news.count > 0;
}

function appendColumns(columns, news) {
  for (const [name, values] of Object.entries(news.columns)) {
    columns[name] = columns[name].concat(values);
  }
  columns.count += news.count;
}

/** Ask once for everything that is new, and call `onchange` with the name of each thing that changed as soon as it is there. */
async function pollOnce(onchange) {
  const ask = async (name, poll) => {
    if (await poll()) onchange(new Set([name]));
  };
  const askRun = async () => {
    const run = await fetchJson("data/run");
    const differs = JSON.stringify(run) !== JSON.stringify(store.run);
    store.run = run;
    return differs;
  };
  // Each answer is waited for: a second poll beside one that still runs would ask from the same place, and double its rows.
  const answers = await Promise.allSettled([
    ask("run", askRun),
    ask("metrics", pollMetrics),
    ask("timeline", pollTimeline),
    ask("episodes", pollEpisodes),
  ]);
  const failed = answers.find((answer) => answer.status === "rejected");
  if (failed) throw failed.reason;
}

/** Poll for as long as the page is open. */
async function pollForever(onchange) {
  for (;;) {
    const failure = store.failure;
    try {
      await pollOnce(onchange);
      store.failure = "";
    } catch (error) {
      store.failure = error.message;
    }
    if (store.failure !== failure) onchange(new Set(["run"]));
    await new Promise((done) => setTimeout(done, document.hidden ? HIDDEN_POLL_MS : POLL_MS));
  }
}

function stepEvents() {
  return store.metrics.filter((event) => event.event === "step");
}

/** Return the row of an episode in the table's columns, or -1. */
function rowOf(episodeId) {
  return store.columns.count ? store.columns.episode_id.indexOf(episodeId) : -1;
}

/** Return the rows of the episodes of a training group, in the order of the table. */
function rowsOfGroup(group) {
  const rows = [];
  if (group === null || group === undefined) return rows;
  for (let row = 0; row < store.columns.count; row += 1) if (store.columns.group[row] === group) rows.push(row);
  return rows;
}
