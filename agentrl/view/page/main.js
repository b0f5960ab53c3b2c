// The frame: the bar with the state of the run, the views, the keys, and light or dark.

const VIEWS = {
  curves: ["Curves", curvesView],
  timeline: ["Timeline", timelineView],
  episodes: ["Episodes", episodesView],
  staleness: ["Staleness", stalenessView],
  episode: [null, episodeView],
  compare: [null, compareView],
};
const embeddedText = document.getElementById("embedded").textContent;
/** What a file for one episode carries; null in the page of a server. */
const embedded = embeddedText ? JSON.parse(embeddedText) : null;

let current = null;

function openRoute() {
  const route = embedded ? { ...readRoute(), view: "episode", parts: [embedded.episode.summary.episode_id] } : readRoute();
  const view = (VIEWS[route.view] || VIEWS.curves)[1];
  if (current) current.close();
  current = view;
  hideTip();
  const main = document.getElementById("view");
  main.className = `view-${VIEWS[route.view] ? route.view : "curves"}`;
  scrollTo(0, 0);
  view.open(main, route);
  drawBar();
}

function drawBar() {
  const shown = readRoute().view;
  const links = Object.entries(VIEWS).filter(([, [title]]) => title && !embedded);
  const tabs = links.map(([name, [title]]) => {
    const isOn = name === shown || (name === "episodes" && (shown === "episode" || shown === "compare"));
    return el("a", { href: routeTo(name), "aria-current": isOn ? "page" : null }, title);
  });
  const run = embedded ? embedded.run : store.run;
  const name = el("span", { class: "run-name", title: store.run ? store.run.path : null }, run ? run.name : "");
  const theme = el("button", { class: "theme", title: "Light or dark (t)", onclick: switchTheme }, "◐");
  fill(document.getElementById("bar"), el("span", { class: "brand" }, "agentrl"), name, stateChip(run), el("nav", {}, tabs), theme);
  if (run) document.title = `${run.name} · agentrl view`;
}

/** Return a chip that says whether the run goes, has ended, or cannot be read. */
function stateChip(run) {
  if (embedded) return null;
  if (store.failure) return el("span", { class: "chip outcome-failed", id: "state", title: store.failure }, shortened(store.failure, 60));
  if (!run) return el("span", { class: "chip", id: "state" }, "reading…");
  const last = store.metrics[store.metrics.length - 1];
  const step = stepEvents().length ? ` · step ${stepEvents().slice(-1)[0].step}` : "";
  if (run.is_running) return el("span", { class: "chip live", id: "state" }, `running${step}`);
  if (last && last.event === "end" && last.error === "cancelled") {
    return el("span", { class: "chip", id: "state", title: "agentrl train --resume continues it" }, `interrupted${step}`);
  }
  if (last && last.event === "end" && last.error) {
    return el("span", { class: "chip outcome-failed", id: "state", title: last.error }, `failed${step}`);
  }
  return el("span", { class: "chip", id: "state" }, `${last && last.event === "end" ? "ended" : "stopped"}${step}`);
}

function switchTheme() {
  const isDark = getComputedStyle(document.documentElement).colorScheme.includes("dark");
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
  openRoute();
}

function onKey(event) {
  const isTyping = event.target.closest("input, select, textarea");
  if (isTyping && event.key === "Escape") event.target.blur();
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Enter" && event.target.closest("a, button")) return; // the browser follows it
  const action = (current.keys || {})[event.key];
  if (action) {
    event.preventDefault();
    action(current);
  } else if (event.key === "t") switchTheme();
  else if (event.key === "/" && !embedded) location.hash = routeTo("episodes");
}

function main() {
  addEventListener("hashchange", openRoute);
  addEventListener("keydown", onKey);
  addEventListener("resize", () => current.resize());
  openRoute();
  if (embedded) return;
  pollForever((changed) => {
    drawBar();
    current.update(changed);
  });
}

main();
