// What was written: the tokens and steps of texts, and files of them.

export const FORMAT = "branchwise-replay";

/** One text: its tokens with their origin, and the steps that gave them. */
export class Run {
  constructor(label, plain = false) {
    this.label = label;
    this.plain = plain;
    this.tokens = [];
    this.steps = [];
    this.starts = []; // the first token of each step
    this.given = 0; // tokens that the steps so far gave
    this.finish = null;
    this.error = null;
  }

  /** What an event of the stream brought, at a time in milliseconds. */
  add(part, at) {
    for (const step of part.steps) {
      this.starts.push(this.given);
      this.given += step.emitted;
      this.steps.push({ ...step, at: Math.round(at) });
    }
    this.tokens.push(...part.tokens);
  }

  /** The step of a token. */
  stepOf(token) {
    let low = 0, high = this.starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= token) low = middle; else high = middle - 1;
    }
    return low;
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  /** The step that gave most tokens. */
  get best() {
    return this.steps.reduce((best, step, place) => (step.emitted > this.steps[best].emitted ? place : best), 0);
  }

  /** Counts over the first steps, by default over all. */
  stats(steps = this.steps.length) {
    let tokens = 0, ms = 0, drafted = 0;
    for (const step of this.steps.slice(0, steps)) {
      tokens += step.emitted;
      ms += milliseconds(step);
    }
    const sources = new Map();
    for (const token of this.tokens.slice(0, tokens)) {
      sources.set(token.source, (sources.get(token.source) || 0) + 1);
      if (token.source) drafted += 1;
    }
    return { tokens, steps, ms, drafted, sources, speed: ms ? (1000 * tokens) / ms : 0 };
  }
}

export function milliseconds(step) {
  return Object.values(step.ms).reduce((sum, spent) => sum + spent, 0);
}

/** All turns as a text that `parse` reads. */
export function serialise(model, turns) {
  const saved = turns.map(({ prompt, runs }) => ({
    prompt,
    runs: runs.map(({ label, plain, tokens, steps, finish, error }) => ({ label, plain, tokens, steps, finish, error })),
  }));
  return JSON.stringify({ format: FORMAT, version: 1, model, saved: new Date().toISOString(), turns: saved });
}

/** The turns of a file; throws a sentence if it is something else. */
export function parse(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (!found || found.format !== FORMAT || !Array.isArray(found.turns)) throw new Error("This file is not a replay of Branchwise.");
  if (found.version !== 1) throw new Error("This replay was saved by another version of the page.");
  try {
    const turns = found.turns.map(({ prompt, runs }) => ({ prompt: String(prompt), runs: runs.map(revived) }));
    return { model: String(found.model), turns };
  } catch {
    throw new Error("This replay is damaged.");
  }
}

function revived(saved) {
  const run = new Run(String(saved.label), Boolean(saved.plain));
  const tokens = saved.tokens.map(({ text, token, source }) => ({ text: String(text), token: String(token), source: String(source) }));
  for (const step of saved.steps) {
    run.add({ steps: [checked(step)], tokens: [] }, Number(step.at) || 0);
  }
  run.tokens = tokens;
  run.finish = saved.finish ? String(saved.finish) : null;
  run.error = saved.error ? String(saved.error) : null;
  return run;
}

function checked(step) {
  const ok = Array.isArray(step.path) && Number.isInteger(step.emitted) && typeof step.own.token === "string" && step.nodes.length > 0
    && step.nodes.every((node, place) => Number.isInteger(node.parent) && node.parent < place && (place === 0 || node.parent >= 0) && typeof node.token === "string")
    && step.path.every((node) => step.nodes[node] !== undefined)
    && Object.values(step.ms).every(Number.isFinite);
  if (!ok) throw new Error();
  return step;
}
