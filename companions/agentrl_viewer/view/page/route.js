// What the page shows is in the hash of its address, so that a view can be bookmarked and sent.

/** Return the parts of the hash: `#/episode/3.0.0?layer=mask` is view `episode`, parts `["3.0.0"]`, and a query. */
function readRoute() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map(decodeURIComponent);
  return { view: parts[0] || "curves", parts: parts.slice(1), query: new URLSearchParams(query || "") };
}

/** Return the address of a view of the run that is shown; `run` of the query names another one. */
function routeTo(view, parts = [], query = {}) {
  const given = Object.entries({ run: store.number || "", ...query }).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = new URLSearchParams(given).toString();
  return `#/${[view, ...parts].map(encodeURIComponent).join("/")}${search ? `?${search}` : ""}`;
}

/** Change fields of the query in place, without a step in the browser's history; a value of "" removes the field. */
function setQuery(changes) {
  const route = readRoute();
  for (const [name, value] of Object.entries(changes)) {
    if (value === "" || value === null) route.query.delete(name);
    else route.query.set(name, value);
  }
  history.replaceState(null, "", routeTo(route.view, route.parts, { run: "", ...Object.fromEntries(route.query) }));
}
