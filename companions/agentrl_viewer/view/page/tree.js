// The turns of an episode as a tree: a line for each branch, a dot for each turn, a dashed dot and a reason for each fork.

const TREE = { x: 30, y: 30, left: 18, top: 18 };

/** Return the indices of turns that no turn continues. */
function leavesOf(turns) {
  const parents = new Set(turns.map((turn) => turn.parent));
  return turns.map((_, index) => index).filter((index) => !parents.has(index));
}

/** Return the turn indices from the root to `leaf`. */
function pathTo(turns, leaf) {
  const path = [];
  for (let index = leaf; index !== null && index !== undefined; index = turns[index].parent) path.unshift(index);
  return path;
}

/** Place each turn: x is its depth, y the number of its branch; a first child stays on the line of its parent. */
function placeTurns(turns) {
  const places = [];
  let lines = 0;
  turns.forEach((turn, index) => {
    const isRoot = turn.parent === null;
    const isFirst = !isRoot && !turns.slice(0, index).some((other) => other.parent === turn.parent);
    const depth = isRoot ? 0 : places[turn.parent].depth + 1;
    const line = isFirst ? places[turn.parent].line : lines;
    if (!isFirst) lines += 1;
    places.push({ depth, line });
  });
  return { places, lines };
}

/** Return the tree; `onpick(leaf)` is called with a leaf of the branch that the reader picks. */
function treeNode(episode, leaf, onpick) {
  const { places, lines } = placeTurns(episode.turns);
  const path = new Set(pathTo(episode.turns, leaf));
  const at = (index) => [TREE.left + places[index].depth * TREE.x, TREE.top + places[index].line * TREE.y];
  const width = TREE.left * 2 + Math.max(...places.map((place) => place.depth)) * TREE.x + 10;
  const height = TREE.top + lines * TREE.y;
  const picture = el("svg:svg", { width, height, class: "tree", role: "tree" });
  episode.turns.forEach((turn, index) => {
    if (turn.parent === null) return;
    const [[x0, y0], [x1, y1]] = [at(turn.parent), at(index)];
    const bend = `M${x0},${y0} C${(x0 + x1) / 2},${y0} ${(x0 + x1) / 2},${y1} ${x1},${y1}`;
    picture.append(el("svg:path", { d: bend, class: path.has(index) ? "edge on" : "edge" }));
  });
  episode.turns.forEach((turn, index) => picture.append(turnDot(episode, index, at(index), path.has(index), onpick)));
  return el("div", { class: "tree-box" }, picture, forkList(episode));
}

function turnDot(episode, index, [x, y], isOn, onpick) {
  const turn = episode.turns[index];
  const kind = ["turn", isOn ? "on" : "", turn.fork ? "forked" : "", isNumber(turn.reward) && turn.reward > 0 ? "rewarded" : ""];
  const node = el("svg:g", { class: kind.join(" "), tabindex: "0", role: "treeitem", "aria-label": `turn ${index}`, "data-turn": index });
  node.append(el("svg:circle", { cx: x, cy: y, r: 9 }), el("svg:text", { x, y: y + 3.5 }, String(index)));
  const pick = () => onpick(leafBelow(episode.turns, index), index);
  node.addEventListener("click", pick);
  node.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    pick();
  });
  node.addEventListener("mousemove", (event) => showTip(event, `Turn ${index}`, treeFacts(turn)));
  node.addEventListener("mouseleave", hideTip);
  return node;
}

function treeFacts(turn) {
  const facts = [["context tokens", formatNumber(turn.context_ids.length)], ["output tokens", formatNumber(turn.output_ids.length)]];
  if (turn.role) facts.push(["role", turn.role]);
  if (turn.player) facts.push(["player", turn.player]);
  if (turn.branch?.length) facts.push(["independent branch", turn.branch.join(".")]);
  if (isNumber(turn.reward)) facts.push(["reward", formatNumber(turn.reward)]);
  if (isNumber(turn.advantage)) facts.push(["advantage", formatNumber(turn.advantage)]);
  if (turn.fork) facts.push(["fork", turn.fork.replaceAll("_", " ")]);
  return facts;
}

/** Return the last leaf at or below a turn. */
function leafBelow(turns, index) {
  const leaves = leavesOf(turns).filter((leaf) => pathTo(turns, leaf).includes(index));
  return leaves[leaves.length - 1];
}

function forkList(episode) {
  const forked = episode.turns.map((turn, index) => [turn, index]).filter(([turn]) => turn.fork);
  if (!forked.length) return null;
  return el("ul", { class: "fork-list" }, forked.map(([turn, index]) => el("li", {}, el("b", {}, `turn ${index}`), ` ${forkText(turn.fork)}`)));
}
