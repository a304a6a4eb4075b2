// The page: who is asked, with which method, what is shown of it; the keyboard; replays.

import { chat, describe, onLocked, ready } from "./api.js";
import { parse, Run, serialise } from "./record.js";
import { Answer, at, Inspector, make, plural } from "./view.js";
import { Settings } from "./settings.js";

const EXAMPLES = [
  "Write a short story about a river and a bridge.",
  "List the numbers from one to twenty in words.",
  "Write a Python class for a stack with push, pop and peek.",
  "Repeat this sentence five times: The quick brown fox jumps over the lazy dog.",
];

const settings = new Settings();
const inspector = new Inspector();
const turns = []; // {prompt, runs, answers}
let model = "";
let writing = null; // the AbortController of what is being written
let playing = null;
let following = true; // the newest step is shown as it comes

// What is shown

function status(text, wrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", wrong);
}

function choose(answer, step) {
  if (step === null && inspector.answer === answer) return;
  following = step === null && writing !== null;
  inspector.show(answer, step);
}

inspector.onChoose = (step) => {
  following = false;
  inspector.show(inspector.answer, step);
};

function move(by) {
  const answer = inspector.answer;
  if (!answer?.run.steps.length) return;
  following = false;
  inspector.show(answer, (inspector.step ?? 0) + by);
}

function addTurn(prompt, runs) {
  at("intro").hidden = true;
  const answers = runs.map((run) => new Answer(run, choose));
  const row = make("div", { class: runs.length > 1 ? "runs two" : "runs" }, ...answers.map((answer) => answer.box));
  const verdict = make("p", { class: "verdict", role: "status" });
  const box = make("article", { class: "turn" }, make("div", { class: "said", text: prompt }), row, verdict);
  at("turns").append(box);
  const turn = { prompt, runs, answers, verdict };
  turns.push(turn);
  at("save").disabled = false;
  return turn;
}

/** At the end of a race: are the texts the same, and how much faster was it? */
function compare({ runs, verdict }, same) {
  if (runs.length < 2 || runs.some((run) => run.error || !run.finish)) return;
  const [drafted, plain] = runs, ratio = drafted.stats().speed / plain.stats().speed;
  const speed = `${ratio.toFixed(2)} times the speed of plain decoding`;
  const equal = drafted.text === plain.text;
  const differs = same ? " In 16 bits near-ties may fall differently." : " This verifier keeps the distribution, not the text of a seed.";
  verdict.textContent = equal ? `✓ The same text, ${speed}.` : `The texts differ, ${speed}.${differs}`;
  verdict.className = equal ? "verdict same" : same ? "verdict other" : "verdict";
}

// Writing

let frame = 0;
function soon(turn, most) {
  if (frame) return;
  frame = requestAnimationFrame(() => {
    frame = 0;
    for (const answer of turn.answers) answer.show(null, most);
    const shown = turn.answers.includes(inspector.answer) ? inspector.answer : turn.answers[0];
    inspector.show(shown, following ? null : inspector.step);
    if (following) turn.verdict.parentElement.scrollIntoView({ block: "end" });
  });
}

async function write(run, body, began, changed, signal) {
  try {
    await chat(body, (part, finish) => {
      run.add(part, performance.now() - began);
      if (finish) run.finish = finish;
      changed();
    }, signal);
  } catch (error) {
    if (signal.aborted) run.finish = "stopped"; else run.error = error.message;
  }
}

async function send(prompt) {
  const { body, label, same } = settings.request();
  const racing = at("race").checked && !settings.plain;
  const runs = [new Run(label, settings.plain), ...(racing ? [new Run("plain decoding", true)] : [])];
  const messages = turns.flatMap(({ prompt: said, runs: [first] }) => [{ role: "user", content: said }, { role: "assistant", content: first.text }]);
  const asked = { ...body, messages: [...messages, { role: "user", content: prompt }] };
  const turn = addTurn(prompt, runs);
  writing = new AbortController();
  following = true;
  stopPlaying();
  inspector.show(turn.answers[0]);
  at("send").textContent = "Stop";
  at("story").setAttribute("aria-live", "off"); // it changes with every step
  for (const answer of turn.answers) answer.writing(true);
  const changed = () => soon(turn, asked.max_tokens), began = performance.now();
  const { method, draft, tree, verify, task, ...rest } = asked;
  await Promise.all(runs.map((run, place) =>
    write(run, place ? { ...rest, method: "plain" } : asked, began, changed, writing.signal).then(() => turn.answers[place].writing(false))));
  writing = null;
  cancelAnimationFrame(frame);
  frame = 0;
  for (const answer of turn.answers) answer.show();
  at("send").textContent = "Send";
  at("story").setAttribute("aria-live", "polite");
  compare(turn, same);
  const shown = inspector.answer ?? turn.answers[0];
  inspector.show(shown, following ? shown.run.best : inspector.step);
  const { tokens, steps, speed } = runs[0].stats();
  status(runs[0].error ? runs[0].error : `${model} · ${plural(tokens, "token")} in ${steps} ${steps === 1 ? "pass" : "passes"}, ${speed.toFixed(1)} tokens/s`, Boolean(runs[0].error));
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (writing) return writing.abort();
  const prompt = at("prompt").value.trim();
  if (!prompt || !model || settings.offline) return at("prompt").focus();
  at("prompt").value = "";
  send(prompt);
});

at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!writing) at("composer").requestSubmit();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    at("tip").hidden = true;
    writing?.abort();
    stopPlaying();
  }
  const inside = event.target instanceof HTMLElement && event.target.closest("input, textarea, select, dialog, #drawing");
  if (inside || event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
    event.preventDefault();
    move(event.key === "ArrowLeft" ? -1 : 1);
  }
});

at("back").addEventListener("click", () => move(-1));
at("next").addEventListener("click", () => move(1));

// Replays

function stopPlaying() {
  if (!playing) return;
  clearTimeout(playing.timer);
  for (const answer of playing.answers) answer.show();
  playing = null;
  at("play").textContent = "▶";
}

/** Show the steps of a turn again, in the time that they took. */
function play() {
  if (playing) return stopPlaying();
  const turn = turns.find(({ answers }) => answers.includes(inspector.answer));
  if (!turn || writing) return;
  const shown = inspector.answer, began = performance.now();
  playing = { answers: turn.answers, timer: 0 };
  at("play").textContent = "■";
  const most = Math.max(...turn.runs.map((run) => run.tokens.length));
  const first = Math.min(...turn.runs.map((run) => run.steps[0]?.at ?? 0));
  const tick = () => {
    const now = performance.now() - began + first;
    for (const answer of turn.answers) answer.show(answer.run.steps.filter((step) => step.at <= now).length, most);
    const done = shown.run.steps.filter((step) => step.at <= now).length;
    if (done) inspector.show(shown, done - 1);
    if (turn.runs.every((run) => (run.steps.at(-1)?.at ?? 0) <= now)) return stopPlaying();
    playing.timer = setTimeout(tick, 30);
  };
  tick();
}

at("play").addEventListener("click", play);

at("save").addEventListener("click", () => {
  const link = make("a", { download: "branchwise-replay.json" });
  link.href = URL.createObjectURL(new Blob([serialise(model, turns)], { type: "application/json" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
});

async function openReplay(file) {
  try {
    const found = parse(await file.text());
    writing?.abort();
    stopPlaying();
    turns.length = 0;
    at("turns").replaceChildren();
    model = found.model;
    settings.close();
    for (const { prompt, runs } of found.turns) {
      const turn = addTurn(prompt, runs);
      for (const answer of turn.answers) {
        answer.show();
        answer.writing(false);
      }
      compare(turn, true);
    }
    const last = turns.at(-1);
    if (last) inspector.show(last.answers[0], last.runs[0].best);
    status(`Replay of ${model}: ${plural(turns.length, "answer")}. Press ▶ to watch it; reload the page to write.`);
  } catch (error) {
    status(error.message, true);
  }
}

at("open").addEventListener("click", () => at("file").click());
at("file").addEventListener("change", () => {
  if (at("file").files.length) openReplay(at("file").files[0]);
  at("file").value = "";
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  if (event.dataTransfer.files.length) openReplay(event.dataTransfer.files[0]);
});

// The page itself

const THEME = "branchwise-theme";
const stored = localStorage.getItem(THEME);
if (stored) document.documentElement.dataset.theme = stored;
at("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme.includes("dark");
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem(THEME, document.documentElement.dataset.theme);
});

for (const example of EXAMPLES) {
  const button = make("button", { type: "button", text: example });
  button.addEventListener("click", () => {
    at("prompt").value = example;
    at("composer").requestSubmit();
  });
  at("examples").append(button);
}

onLocked(() => new Promise((resolve) => {
  const door = at("door");
  door.addEventListener("close", () => {
    const given = at("key").value.trim();
    at("key").value = "";
    resolve(given || null);
  }, { once: true });
  door.showModal();
}));

async function start() {
  await ready((state) => {
    if (!settings.offline) status(state === "loading" ? "The model is loading…" : `The server is ${state}.`, state !== "loading");
    return settings.offline;
  });
  if (settings.offline) return;
  try {
    const about = await describe();
    if (settings.offline) return;
    model = about.model;
    settings.offer(about);
    status(`${model} is ready.`);
  } catch (error) {
    status(error.message, true);
  }
}

inspector.explain();
start();
