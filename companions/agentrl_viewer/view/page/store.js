// What the page knows of each run. It asks for what is new every second, also after a run has ended: it may be resumed.

const POLL_MS = 1000;
const HIDDEN_POLL_MS = 10000;

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

/** One run: what the server has said of it so far. */
class RunStore {
  constructor(number) {
    this.number = number;
    this.run = null;
    this.metrics = [];
    this.names = {};
    this.spans = [];
    this.columns = { count: 0 };
    this.marks = { metrics: "", timeline: "", episodes: "" };
  }

  get name() {
    return this.run ? this.run.name : "";
  }

  /** Return the address of an endpoint for this run. */
  address(name, query = {}) {
    return `data/${name}?${new URLSearchParams({ run: this.number, ...query })}`;
  }

  fetchJson(name, query) {
    return fetchJson(this.address(name, query));
  }

  /** Ask for what is new behind the last answer, and give it to `take`; return whether there was something. */
  async ask(name, take) {
    const news = await this.fetchJson(name, { from: this.marks[name] });
    const count = take(news);
    this.marks[name] = news.next;
    return news.reset || count > 0;
  }

  askMetrics() {
    return this.ask("metrics", (news) => {
      if (news.reset) this.metrics = [];
      for (const event of news.events) this.metrics.push(event);
      Object.assign(this.names, news.names);
      return news.events.length;
    });
  }

  askTimeline() {
    return this.ask("timeline", (news) => {
      if (news.reset) this.spans = [];
      for (const span of news.spans) this.spans.push(span);
      return news.spans.length;
    });
  }

  askEpisodes() {
    return this.ask("episodes", (news) => {
      if (news.reset || this.columns.count === 0) this.columns = { ...news.columns, count: news.count };
      else if (news.count) appendColumns(this.columns, news);
      return news.count;
    });
  }

  async askRun() {
    const run = await this.fetchJson("run");
    const differs = JSON.stringify(run) !== JSON.stringify(this.run);
    this.run = run;
    return differs;
  }

  /** Ask once for everything that is new, and call `onchange` with each thing that changed as soon as it is there. */
  async poll(onchange) {
    const ask = async (name, answer) => {
      if (await answer) onchange(new Set([name]), this);
    };
    // Each answer is waited for: a second poll beside one that still runs would ask from the same place, and double its rows.
    const answers = await Promise.allSettled([
      ask("run", this.askRun()),
      ask("metrics", this.askMetrics()),
      ask("timeline", this.askTimeline()),
      ask("episodes", this.askEpisodes()),
    ]);
    const failed = answers.find((answer) => answer.status === "rejected");
    if (failed) throw failed.reason;
  }

  events(kind) {
    return this.metrics.filter((event) => event.event === kind);
  }
}

/** The runs of the page: one, or two that are compared. */
const stores = [new RunStore(0)];
/** The run that the views show. */
let store = stores[0];
/** Why the last poll failed; else empty. */
let pollFailure = "";

function appendColumns(columns, news) {
  for (const [name, values] of Object.entries(news.columns)) {
    columns[name] = columns[name].concat(values);
  }
  columns.count += news.count;
}

/** Poll for as long as the page is open. */
async function pollForever(onchange) {
  for (;;) {
    const failure = pollFailure;
    try {
      for (const one of stores) await one.poll(onchange); // with its first answer, a run says how many others there are
      pollFailure = "";
    } catch (error) {
      pollFailure = error.message;
    }
    if (pollFailure !== failure) onchange(new Set(["run"]), store);
    await new Promise((done) => setTimeout(done, document.hidden ? HIDDEN_POLL_MS : POLL_MS));
  }
}

function stepEvents() {
  return store.events("step");
}

/** Return the rows of the episodes of a training group, in the order of the table. */
function rowsOfGroup(group) {
  const rows = [];
  if (group === null || group === undefined) return rows;
  for (let row = 0; row < store.columns.count; row += 1) if (store.columns.group[row] === group) rows.push(row);
  return rows;
}
