// What a request says: its method, by name or in parts, and how tokens are chosen.

import { at, make } from "./view.js";

const OWN = "", PARTS = "-";

export class Settings {
  constructor() {
    this.offered = null;
    this.offline = false; // a replay is open
    at("method").addEventListener("change", () => this.named());
    at("draft").addEventListener("change", () => this.parted("draft"));
    at("tree").addEventListener("change", () => this.parted("tree"));
    at("verify").addEventListener("change", () => this.parted("verify"));
    at("settings").addEventListener("input", () => this.say());
  }

  /** What the server offers. */
  offer(offered) {
    this.offered = offered;
    const own = offered.serving;
    const names = offered.methods.map(({ name }) => name).filter((name) => name !== own?.name);
    fill("method", [[OWN, own ? `${own.name} (served)` : "the server's own"], ...names.map((name) => [name, name]), ...(offered.lanes ? [[PARTS, "parts of your choice"]] : [])], OWN);
    for (const id of ["method", "draft", "tree", "verify"]) at(id).disabled = !offered.lanes;
    at("race").disabled = !offered.lanes;
    fill("task", [["", "found as it goes"], ...offered.tasks.map((name) => [name, name])], "");
    this.named();
  }

  close() {
    this.offline = true;
    at("composer").hidden = true;
  }

  get method() {
    return this.offered.methods.find(({ name }) => name === at("method").value) ?? this.offered.serving;
  }

  /** A method was chosen by its name. */
  named() {
    if (at("method").value === PARTS) return this.parted("draft");
    const method = this.method;
    this.parts(method?.draft ?? "auto", method?.tree ?? "", method?.verify ?? "match");
  }

  /** A part was chosen: the others stay, if they fit. */
  parted() {
    at("method").value = PARTS;
    this.parts(at("draft").value, at("tree").value, at("verify").value);
  }

  parts(draft, tree, verify) {
    const named = at("method").value !== PARTS;
    at("task").parentElement.hidden = at("method").value !== OWN || !this.offered.tasks.length; // the specialists are the server's own
    const drafter = this.offered.drafters.find(({ name }) => name === draft) ?? (named ? null : this.offered.drafters[0]);
    const fits = drafter?.fits ?? { [tree]: [verify] };
    if (!named && !(tree in fits)) tree = "";
    const verifiers = fits[tree] ?? [verify];
    if (!named && !verifiers.includes(verify)) verify = verifiers[0];
    fill("draft", this.offered.drafters.map(({ name }) => [name, name]), drafter?.name ?? draft);
    fill("tree", Object.keys(fits).map((name) => [name, name || "its own"]), tree);
    fill("verify", verifiers.map((name) => [name, name]), verify);
    const about = [named ? this.method?.about : drafter && `${drafter.name}: ${drafter.about}.`, `${verify}: ${this.offered.verifiers[verify]}.`];
    at("about").textContent = about.filter(Boolean).join(" ");
    this.say();
  }

  say() {
    const { temperature } = this.sampling;
    const bits = [at("method").value === PARTS ? this.label : at("method").selectedOptions[0]?.text, temperature ? `temperature ${temperature}` : "greedy", `${this.sampling.max_tokens} tokens`];
    at("said").replaceChildren(make("b", { text: bits[0] ?? "" }), ` · ${bits.slice(1).join(" · ")}`);
  }

  get label() {
    const name = at("method").value;
    if (name === OWN) return this.offered?.serving?.name ?? "the server's method";
    return name === PARTS ? [at("draft").value, at("tree").value, at("verify").value].filter(Boolean).join(" / ") : name;
  }

  get plain() {
    return at("draft").value === "none";
  }

  get sampling() {
    const number = (id, least, most, otherwise) => {
      const value = Number.parseFloat(at(id).value);
      return Number.isFinite(value) ? Math.min(most, Math.max(least, value)) : otherwise;
    };
    return {
      temperature: number("temperature", 0, 2, 0),
      max_tokens: Math.round(number("length", 1, 4096, 128)),
      seed: Math.round(number("seed", 0, 999999999, 1)),
    };
  }

  /** The fields of a request, a name for people, and whether a seed writes the same text with any drafter. */
  request() {
    const name = at("method").value, verify = at("verify").value, tree = at("tree").value;
    let said = {};
    if (name === PARTS) said = { draft: at("draft").value, verify, ...(tree ? { tree } : {}) };
    else if (name !== OWN) said = { method: name };
    else if (at("task").value) said = { task: at("task").value };
    const sampling = this.sampling;
    return { body: { ...sampling, ...said }, label: this.label, same: verify === "match" || sampling.temperature === 0 };
  }
}

/** Let a select offer pairs of value and text; what is chosen is offered too. */
function fill(id, pairs, chosen) {
  const values = pairs.map(([value]) => value);
  const all = values.includes(chosen) ? pairs : [...pairs, [chosen, chosen]];
  at(id).replaceChildren(...all.map(([value, text]) => make("option", { value, text })));
  at(id).value = chosen;
}
