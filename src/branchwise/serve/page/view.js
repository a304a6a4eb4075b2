// What is seen of texts: answers token by token, the strip of steps, the numbers beside them.

import { milliseconds } from "./record.js";
import { draw, spoken, visible } from "./tree.js";

const EXAMPLE = {
  nodes: [
    { parent: -1, token: " The" },
    { parent: 0, token: " river", source: "suffix", p: 0.62 }, { parent: 0, token: " water", source: "recycle", p: 0.21 },
    { parent: 1, token: " runs", source: "suffix", p: 0.48 }, { parent: 1, token: " is", source: "recycle", p: 0.3 }, { parent: 2, token: " is", source: "recycle", p: 0.4 },
    { parent: 3, token: " under", source: "suffix", p: 0.07 }, { parent: 3, token: " through", source: "recycle", p: 0.71 }, { parent: 4, token: " a", source: "recycle", p: 0.35 },
    { parent: 7, token: " the", source: "recycle", p: 0.88 }, { parent: 9, token: " city", source: "recycle", p: 0.09 },
  ],
  path: [0, 1, 3, 7, 9],
  own: { token: " valley", p: 0.37 },
};

const HINT = "Point at a box, or go through the tree with the arrow keys, to see its probability.";

export const at = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") element.textContent = value; else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

// Known sources have the same colour in every session and in every replay.
const colours = new Map(Object.entries({ auto: "s1", head: "s1", model: "s1", suffix: "s2", recycle: "s5", ngram: "s3", stand: "s4", trigram: "s6", memories: "s2" }));

/** The class of a source; empty for the model's own. */
export function colour(source) {
  if (!source) return "";
  if (!colours.has(source)) colours.set(source, `s${(colours.size % 6) + 1}`);
  return colours.get(source);
}

export function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

/** One answer on the page. */
export class Answer {
  constructor(run, choose) {
    this.run = run;
    this.choose = choose;
    this.shown = 0; // tokens that are on the page
    this.spans = [];
    this.speed = make("b", { title: "by the time of its own passes: texts that are written together share the machine" });
    this.fill = make("i");
    this.text = make("div", { class: "text", tabindex: "0", role: "group", "aria-label": `Answer, ${run.label}: arrow keys go from step to step` });
    const title = make("h3", {}, make("span", { text: run.label }), this.speed);
    this.box = make("div", { class: run.plain ? "run plain" : "run" }, title, make("div", { class: "bar" }, this.fill), this.text);
    this.text.addEventListener("click", (event) => {
      const token = this.spans.indexOf(event.target);
      choose(this, token >= 0 ? run.stepOf(token) : null);
    });
    this.text.addEventListener("focus", () => choose(this, null));
  }

  /** Show the tokens of the first steps, by default all; `most` is how many there may be. */
  show(steps = null, most = 0) {
    const { run } = this;
    const end = steps === null ? run.tokens.length : Math.min(run.starts[steps] ?? run.tokens.length, run.tokens.length);
    while (this.spans.length > end) this.spans.pop().remove();
    for (let place = this.spans.length; place < end; place += 1) {
      const token = run.tokens[place];
      const span = make("span", { class: `tok ${colour(token.source)}`.trim(), text: token.text });
      if (token.source) span.title = `drafted by ${token.source}`;
      this.spans.push(span);
      this.text.append(span);
    }
    const { speed } = run.stats(steps ?? undefined);
    this.speed.textContent = speed ? `${speed.toFixed(1)} tokens/s` : "";
    this.fill.style.width = `${Math.min(100, (100 * end) / (most || run.tokens.length || 1))}%`;
  }

  writing(on) {
    this.text.classList.toggle("writing", on);
    if (!on) this.fill.style.width = "100%";
    if (this.run.error && !on) this.box.append(make("p", { class: "problem", role: "alert", text: this.run.error }));
  }

  mark(step) {
    const first = step === null ? -1 : this.run.starts[step], last = step === null ? -1 : first + this.run.steps[step].emitted;
    this.spans.forEach((span, place) => span.classList.toggle("here", place >= first && place < last));
  }
}

/** The panel that shows one step of one answer. */
export class Inspector {
  constructor() {
    this.answer = null;
    this.step = null;
    this.nodes = [];
    this.node = null;
    this.bars = [];
    at("drawing").addEventListener("keydown", (event) => this.walk(event));
    at("drawing").addEventListener("focus", () => this.point(this.node ?? 0));
    at("drawing").addEventListener("blur", () => this.tip(null));
  }

  /** Show an answer up to a step; without one its last. */
  show(answer, step = null) {
    if (this.answer !== answer) {
      this.answer?.mark(null);
      this.answer?.box.classList.remove("chosen");
      answer.box.classList.add("chosen");
      this.answer = answer;
      this.bars = [];
      at("strip").replaceChildren();
    }
    const { run } = answer, last = run.steps.length - 1;
    this.numbers(run);
    this.strip(run);
    if (last < 0) return this.empty();
    this.step = step === null ? last : Math.max(0, Math.min(step, last));
    answer.mark(step === null ? null : this.step);
    this.bars.forEach((bar, place) => bar.classList.toggle("here", place === this.step));
    this.bars[this.step]?.scrollIntoView?.({ block: "nearest", inline: "nearest" });
    const strip = at("strip");
    strip.setAttribute("aria-valuemax", last);
    strip.setAttribute("aria-valuenow", this.step);
    strip.setAttribute("aria-valuetext", `step ${this.step + 1} of ${last + 1}`);
    this.tell(run.steps[this.step], last);
  }

  /** Before anything is written: what a tree shows. */
  explain() {
    at("story").replaceChildren(make("b", { text: "An example." }), " Each box is a drafted token, its colour who drafted it. The bar below and the line to it are the wider the more probable the model finds it. The bold path was kept; the dashed token is the model's own.");
    this.nodes = draw(at("drawing"), EXAMPLE, colour, (found, event) => this.hover(found, event));
    at("node").textContent = HINT;
  }

  empty() {
    this.step = null;
    for (const id of ["drawing", "story", "node", "times"]) at(id).replaceChildren();
    at("where").textContent = "Steps appear here: one bar each, as high as the tokens it gave.";
  }

  numbers(run) {
    const { tokens, steps, drafted, speed, sources } = run.stats();
    at("m-speed").textContent = speed ? speed.toFixed(1) : "–";
    at("m-length").textContent = steps ? (tokens / steps).toFixed(2) : "–";
    at("m-drafted").textContent = tokens ? `${Math.round((100 * drafted) / tokens)} %` : "–";
    at("m-steps").textContent = steps ? String(steps) : "–";
    const chips = [...sources].sort((one, other) => other[1] - one[1]).map(([source, count]) =>
      make("span", { class: `chip ${colour(source)}`.trim(), "data-source": source }, make("i"), source || "the model's own", make("b", { text: count })));
    at("legend").replaceChildren(...chips);
  }

  strip(run) {
    const strip = at("strip"), follow = strip.scrollWidth - strip.scrollLeft - strip.clientWidth < 40;
    for (let place = this.bars.length; place < run.steps.length; place += 1) {
      const step = run.steps[place], parts = [];
      const kept = step.path.slice(1, step.emitted + 1).map((node) => step.nodes[node].source);
      if (kept.length < step.emitted) parts.push(make("i"));
      for (const source of kept.reverse()) parts.push(make("i", { class: colour(source) }));
      const bar = make("button", { type: "button", tabindex: "-1", "aria-label": `Step ${place + 1}: ${plural(step.emitted, "token")}` }, ...parts);
      bar.addEventListener("click", () => this.onChoose(place));
      this.bars.push(bar);
      strip.append(bar);
    }
    if (follow) strip.scrollLeft = strip.scrollWidth;
  }

  tell(step, last) {
    const drafted = step.nodes.length - 1, kept = step.path.length - 1, own = `“${visible(step.own.token)}”`;
    const bold = (text) => make("b", { text });
    const spent = milliseconds(step); // of a step on a GPU it may not be known yet
    at("where").textContent = `Step ${this.step + 1} of ${last + 1}${spent ? ` · ${spent.toFixed(0)} ms` : ""}${step.batch > 1 ? ` · with ${plural(step.batch - 1, "other text")}` : ""}`;
    const story = at("story");
    if (!drafted) {
      story.replaceChildren("Nothing was drafted: one pass, one token, the model's own ", bold(own), ".");
    } else {
      story.replaceChildren(
        bold(plural(drafted, "token")), " drafted, one pass over all of them. The model kept ", bold(kept ? plural(kept, "token") : "none"),
        " and added its own ", bold(own), ": ", bold(plural(kept + 1, "token")), kept ? " for the price of about one." : ", as without a draft.");
    }
    const node = this.node;
    this.nodes = draw(at("drawing"), step, colour, (found, event) => this.hover(found, event));
    this.node = null;
    if (document.activeElement === at("drawing")) this.point(Math.min(node ?? 0, this.nodes.length - 1));
    else at("node").textContent = HINT;
    const names = { draft: "draft", score: "pass of the model", verify: "verify", commit: "keep and learn" };
    at("times").replaceChildren(...Object.entries(step.ms).map(([phase, spent]) => make("span", { text: `${names[phase] || phase} ${spent.toFixed(1)} ms` })));
  }

  // Nodes

  hover(node, event) {
    if (event?.type === "click" && node) this.point(node.index);
    else this.tip(node, event);
  }

  tip(node, event) {
    const tip = at("tip");
    tip.hidden = !node;
    if (!node) return;
    tip.textContent = spoken(node);
    const box = at("drawing").querySelector(`[data-node="${node.index}"]`).getBoundingClientRect(), size = tip.getBoundingClientRect();
    const left = event ? event.clientX : box.left + box.width / 2;
    tip.style.left = `${Math.max(8, Math.min(left - size.width / 2, innerWidth - size.width - 8))}px`;
    const below = box.bottom + 6;
    tip.style.top = `${below + size.height < innerHeight ? below : Math.max(4, box.top - size.height - 6)}px`;
  }

  point(index) {
    if (!this.nodes.length) return;
    this.node = index;
    const box = at("drawing");
    for (const group of box.querySelectorAll(".node")) group.classList.toggle("here", Number(group.dataset.node) === index);
    const found = box.querySelector(`[data-node="${index}"]`);
    found?.scrollIntoView?.({ block: "nearest", inline: "nearest" });
    at("node").textContent = spoken(this.nodes[index]);
  }

  walk(event) {
    const here = this.nodes[this.node ?? 0];
    if (!here) return;
    const column = this.nodes.filter((node) => node.depth === here.depth).sort((one, other) => one.row - other.row);
    const beside = column.indexOf(here);
    const goal = {
      ArrowRight: here.below[0], ArrowLeft: this.nodes[here.parent],
      ArrowDown: column[beside + 1], ArrowUp: column[beside - 1], Home: this.nodes[0], End: this.nodes[this.nodes.length - 1],
    };
    if (!(event.key in goal)) return;
    event.preventDefault();
    event.stopPropagation();
    if (goal[event.key]) this.point(goal[event.key].index);
  }
}
