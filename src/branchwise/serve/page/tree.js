// The draft tree of a step as a drawing: the root at the left, a column for each level, the kept path on top.

const SVG = "http://www.w3.org/2000/svg";
const ROW = 38, BOX = 26, GAP = 26, PAD = 8, LETTER = 7.3, MOST = 14;

export function make(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** A token so that blanks and line ends can be seen. */
export function visible(token) {
  const blanks = (run) => (run.length > 2 ? `·×${run.length}` : "·".repeat(run.length));
  return token.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ {2,}|^ | $/g, blanks);
}

export function percent(p) {
  if (p === null || p === undefined) return "?";
  return p >= 0.9995 ? "100 %" : p >= 0.01 ? `${(100 * p).toFixed(p >= 0.1 ? 0 : 1)} %` : "< 1 %";
}

function short(token) {
  const text = [...visible(token)];
  return text.length > MOST ? text.slice(0, MOST - 1).join("") + "…" : text.join("");
}

/** The nodes of a step in places: the model's own token is one more, behind the kept path. */
export function placed(step) {
  const kept = new Set(step.path), end = step.path[step.path.length - 1];
  const nodes = step.nodes.map((node, index) => ({ ...node, index, kept: kept.has(index), own: false, below: [] }));
  nodes.push({ parent: end, token: step.own.token, p: step.own.p, index: nodes.length, kept: true, own: true, below: [], source: "" });
  for (const node of nodes.slice(1)) nodes[node.parent].below.push(node);
  for (const node of nodes) {
    node.depth = node.index ? nodes[node.parent].depth + 1 : 0;
    node.label = short(node.token);
    // What was kept comes first, then the model's own token: what it decided reads as one line.
    node.below.sort((one, other) => rank(one) - rank(other) || one.index - other.index);
  }
  let rows = 0;
  const lay = (node, row) => {
    node.row = row;
    node.below.forEach((child, place) => lay(child, place ? (rows += 1) : row));
  };
  lay(nodes[0], 0);
  const widths = [];
  for (const node of nodes) {
    node.width = Math.max(34, [...node.label].length * LETTER + 16);
    widths[node.depth] = Math.max(widths[node.depth] || 0, node.width);
  }
  const lefts = widths.map((_, depth) => PAD + widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, 0));
  for (const node of nodes) {
    node.x = lefts[node.depth];
    node.y = PAD + node.row * ROW;
  }
  return { nodes, width: lefts[lefts.length - 1] + widths[widths.length - 1] + PAD, height: 2 * PAD + rows * ROW + BOX + 8 };
}

function rank(node) {
  return node.own ? 1 : node.kept ? 0 : 2;
}

/** Draw a step into a box; `colour(source)` names a class, `seen(node)` is told what is pointed at. */
export function draw(box, step, colour, seen) {
  const { nodes, width, height } = placed(step);
  const lines = make("g"), boxes = make("g");
  for (const node of nodes) {
    if (node.index) lines.append(edge(nodes[node.parent], node));
    boxes.append(shape(node, colour, seen));
  }
  const scale = Math.min(1.35, Math.max(1, (box.clientWidth - 14) / width)); // a small tree fills its box
  const drawing = make("svg", { viewBox: `0 0 ${width} ${height}`, width: scale * width, height: scale * height, role: "presentation" }, lines, boxes);
  box.replaceChildren(drawing);
  return nodes;
}

function edge(parent, node) {
  const x = parent.x + parent.width, y = parent.y + BOX / 2, goal = node.y + BOX / 2, half = (node.x - x) / 2;
  const kind = node.own ? "edge own" : node.kept ? "edge kept" : "edge";
  const thick = node.own ? 1.6 : 1 + 3.5 * (node.p || 0);
  return make("path", { d: `M${x} ${y}C${x + half} ${y} ${node.x - half} ${goal} ${node.x} ${goal}`, class: kind, "stroke-width": thick.toFixed(2) });
}

function shape(node, colour, seen) {
  const kind = ["node", node.kept ? "kept" : "left", node.own ? "own" : "", node.index && !node.own ? colour(node.source) : ""];
  const group = make("g", { class: kind.filter(Boolean).join(" "), transform: `translate(${node.x} ${node.y})`, role: "treeitem", "aria-label": spoken(node), "data-node": node.index });
  group.append(make("rect", { width: node.width, height: BOX, rx: 7 }));
  const text = make("text", { x: node.width / 2, y: 17, "text-anchor": "middle" });
  text.textContent = node.label;
  group.append(text);
  if (node.index) {
    const chance = make("rect", { class: "chance", x: 4, y: BOX + 2.5, height: 2.5, rx: 1.2, width: Math.max(0.5, (node.width - 8) * (node.p || 0)) });
    group.append(chance);
  }
  group.addEventListener("pointerenter", (event) => seen(node, event));
  group.addEventListener("pointerleave", () => seen(null));
  group.addEventListener("click", (event) => seen(node, event));
  return group;
}

/** What a node is, in a sentence. */
export function spoken(node) {
  const token = `“${visible(node.token)}”`;
  if (!node.index) return `${token}: where the step began, the last token of the text so far`;
  if (node.own) return `${token}: the model's own token, to which it gives ${percent(node.p)}`;
  const drawn = node.q === undefined ? "" : `, drawn with q = ${percent(node.q)}`;
  return `${token}: ${node.kept ? "kept" : "not kept"}, drafted by ${node.source}${drawn}; the model gives it p = ${percent(node.p)}`;
}
