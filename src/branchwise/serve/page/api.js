// What is asked of the server: the paths that every client asks, with a key if it wants one.

const KEY = "branchwise-key";
let askKey = async () => null;
let asking = null;

/** Who is asked for a key when the server wants one. */
export function onLocked(ask) {
  askKey = ask;
}

async function ask(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(path, { ...options, headers });
    if (answer.status !== 401) return answer;
    // Of several that are refused at once, one asks.
    if (key === sessionStorage.getItem(KEY)) {
      asking ??= askKey().finally(() => (asking = null));
      const given = await asking;
      if (!given) return answer;
      sessionStorage.setItem(KEY, given);
    }
  }
}

async function sentence(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server answered ${answer.status}.`;
  }
}

async function json(path) {
  const answer = await ask(path);
  if (!answer.ok) throw new Error(await sentence(answer));
  return answer.json();
}

/** Wait until the model is loaded; `waiting` is told the state meanwhile, and says whether nobody waits any more. */
export async function ready(waiting) {
  for (let left = false; !left; ) {
    try {
      const { status } = await (await fetch("health")).json();
      if (status === "ready") return;
      left = waiting(status);
    } catch {
      left = waiting("not reached");
    }
    await new Promise((resolve) => setTimeout(resolve, 700));
  }
}

export async function describe() {
  const [models, methods] = await Promise.all([json("v1/models"), json("v1/methods")]);
  return { model: models.data[0].id, ...methods };
}

/** Let the server write; `heard(part, finish)` gets what each event brings. */
export async function chat(body, heard, signal) {
  const answer = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, trace: true }),
    signal,
  });
  if (!answer.ok) throw new Error(await sentence(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const said = JSON.parse(data);
      if (said.error) throw new Error(said.error.message);
      const finish = said.choices.length ? said.choices[0].finish_reason : null;
      if (said.branchwise || finish) heard(said.branchwise || { tokens: [], steps: [] }, finish);
    }
  }
}
