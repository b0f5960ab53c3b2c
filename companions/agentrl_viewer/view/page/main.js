// The frame: the bar with the state of the run, the views, the keys, and light or dark.

const VIEWS = {
  runs: ["Comparison", runsView],
  curves: ["Curves", curvesView],
  timeline: ["Timeline", timelineView],
  episodes: ["Episodes", episodesView],
  staleness: ["Staleness", stalenessView],
  episode: [null, episodeView],
  compare: [null, compareView],
};
const HELP = [
  ["Everywhere", [["?", "this list"], ["t", "light or dark"], ["Tab, Enter", "to a control, and use it"], ["Escape", "back"]]],
  ["Curves and comparison", [["← →", "the values of a step in every card"], ["/", "find a metric"]]],
  ["Timeline", [["+ −", "zoom"], ["← →", "move"], ["0", "the whole run"]]],
  ["Episodes", [["j k, ↓ ↑", "next and previous row"], ["Enter", "open the row"], ["/", "filter by id, task or prompt"], ["s", "search in messages"]]],
  ["One episode", [["j k", "next and previous episode"], ["1 to 6", "layers"], ["Tab to the tokens, ← →", "what is known of a token"]]],
];
const embeddedText = document.getElementById("embedded").textContent;
/** What a file for one episode carries; null in the page of a server. */
const embedded = embeddedText ? JSON.parse(embeddedText) : null;
const darkSystem = matchMedia("(prefers-color-scheme: dark)");

let current = null;
let isThemeChosen = false;

/** Return the view of the address: a page of two runs begins with their comparison. */
function viewName() {
  const { view } = readRoute();
  const isKnown = VIEWS[view] && (view !== "runs" || stores.length > 1);
  return isKnown && location.hash.length > 2 ? view : stores.length > 1 ? "runs" : "curves";
}

function openRoute() {
  const route = embedded ? { ...readRoute(), view: "episode", parts: [embedded.episode.summary.episode_id] } : readRoute();
  store = stores[Number(route.query.get("run") || 0)] || stores[0];
  const name = embedded ? "episode" : viewName();
  if (current) current.close();
  current = VIEWS[name][1];
  hideTip();
  const view = document.getElementById("view");
  view.className = `view-${name}`;
  scrollTo(0, 0);
  current.open(view, route);
  // A reader without a pointer goes on in what has just opened, unless a control of the frame is in use.
  if (document.activeElement === document.body) view.focus({ preventScroll: true });
  updateBar();
}

/** Build the bar once: a control in it keeps the focus while the run goes on. */
function buildBar() {
  const tabs = Object.entries(VIEWS).filter(([, [title]]) => title && !embedded).map(([name, [title]]) => el("a", { "data-view": name }, title));
  const skip = el("button", { class: "skip", onclick: () => document.getElementById("view").focus() }, "Skip to the content");
  const help = el("button", { class: "icon", title: "Keys (?)", "aria-label": "Keys", onclick: openHelp }, "?");
  const theme = el("button", { class: "icon theme", title: "Light or dark (t)", "aria-label": "Light or dark", onclick: switchTheme }, "◐");
  const name = el("span", { class: "run-name" });
  fill(document.getElementById("bar"), skip, el("span", { class: "brand" }, "agentrl"), name, el("span", { id: "state", class: "chip" }), el("nav", { "aria-label": "Views" }, tabs), help, theme);
}

function updateBar() {
  const shown = viewName();
  for (const link of document.querySelectorAll("#bar nav a")) {
    const name = link.dataset.view;
    link.hidden = name === "runs" && stores.length < 2;
    link.setAttribute("href", routeTo(name, [], name === "runs" ? { run: "" } : {}));
    const isOn = name === shown || (name === "episodes" && (shown === "episode" || shown === "compare"));
    if (isOn) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const run = embedded ? embedded.run : store.run;
  const name = document.querySelector("#bar .run-name");
  if (stores.length > 1) showRunChoice(name);
  else fill(name, run ? run.name : "");
  name.title = (store.run && store.run.path) || "";
  updateState(run);
  if (run) document.title = `${stores.map((one) => one.name || run.name).join(" against ")} · agentrl view`;
}

/** Show which of two runs the views show, and let the reader choose. */
function showRunChoice(node) {
  const names = stores.map((one) => one.name).join("\n");
  if (node.dataset.names !== names) {
    const choices = stores.map((one) => [String(one.number), one.name]);
    const choose = (number) => {
      const name = viewName();
      location.hash = routeTo(["runs", "episode", "compare"].includes(name) ? (name === "runs" ? "curves" : "episodes") : name, [], { run: number === "0" ? "" : number });
    };
    fill(node, selectBox("run", choices, String(store.number), choose, "Run that the views show"));
    node.dataset.names = names;
  }
  node.firstElementChild.value = String(store.number);
}

/** Say in the bar whether the run goes, has ended, or cannot be read. */
function updateState(run) {
  const chip = document.getElementById("state");
  const say = (text, kind = "", title = "") => {
    [chip.textContent, chip.className, chip.title, chip.hidden] = [text, `chip ${kind}`, title, false];
  };
  if (embedded) chip.hidden = true;
  else if (pollFailure) say(shortened(pollFailure, 60), "outcome-failed", pollFailure);
  else if (!run) say("reading…");
  else {
    const last = store.metrics[store.metrics.length - 1];
    const steps = stepEvents();
    const step = steps.length ? ` · step ${steps[steps.length - 1].step}` : "";
    if (run.is_running) say(`running${step}`, "live");
    else if (!last || last.event !== "end") say(`stopped${step}`);
    else if (last.error === "cancelled") say(`interrupted${step}`, "", "agentrl train --resume continues it");
    else if (last.error) say(`failed${step}`, "outcome-failed", last.error);
    else say(`ended${step}`);
  }
}

function showTheme(isDark) {
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  if (current) current.resize(); // a canvas has the colors of its last drawing
}

function switchTheme() {
  isThemeChosen = true;
  showTheme(document.documentElement.dataset.theme !== "dark");
}

function openHelp() {
  const tables = HELP.map(([title, rows]) => [el("h3", {}, title), el("dl", { class: "keys" }, rows.flatMap(([keys, text]) => [el("dt", {}, keys), el("dd", {}, text)]))]);
  const help = document.getElementById("help");
  const close = el("button", { onclick: () => help.close() }, "Close");
  fill(help, el("h2", {}, "Keys"), tables.flat(), close);
  help.showModal();
}

function onKey(event) {
  const isTyping = event.target.closest("input, select, textarea");
  if (isTyping && event.key === "Escape") event.target.blur();
  if (isTyping || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (document.getElementById("help").open) return;
  // The browser uses the control that has the focus.
  if ((event.key === "Enter" || event.key === " ") && event.target.closest("a, button, summary")) return;
  const action = (current.keys || {})[event.key];
  if (action) {
    event.preventDefault();
    action(current);
  } else if (event.key === "t") switchTheme();
  else if (event.key === "?") openHelp();
  else if (event.key === "/" && !embedded) location.hash = routeTo("episodes");
}

function main() {
  showTheme(darkSystem.matches);
  darkSystem.addEventListener("change", () => isThemeChosen || showTheme(darkSystem.matches));
  buildBar();
  addEventListener("hashchange", openRoute);
  addEventListener("keydown", onKey);
  addEventListener("resize", () => current.resize());
  openRoute();
  if (embedded) return;
  pollForever((changed, polled) => {
    if (stores[0].run && stores[0].run.others && stores.length < 2) {
      stores.push(new RunStore(1));
      openRoute();
    }
    updateBar();
    if (polled === store || current === runsView) current.update(changed);
  });
}

main();
