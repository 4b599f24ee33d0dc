// Sends the pages' requests to the scheduler's admin port, or to its public port. Sessions: see dashboard_sessions.py.

const DATA = "api";
let commandToken = null;
export const view = { isWhole: true, takesKeys: false }; // takesKeys: users may log in with API keys

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function failure(answer) {
  let message = `HTTP ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // the body is not one of our errors, so only the status is known
  }
  return new Refused(message, answer.status);
}

export async function send(path, { method = "GET", body, headers = {}, signal } = {}) {
  const answer = await fetch(`${DATA}${path}`, {
    method,
    signal,
    credentials: "same-origin",
    headers: {
      ...(body === undefined ? {} : { "Content-Type": "application/json" }),
      ...(method === "GET" ? {} : { "X-PD-Dashboard": commandToken ?? "" }),
      ...headers,
    },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!answer.ok) throw await failure(answer);
  return answer;
}

export const get = async (path) => (await send(path)).json();
export const command = async (path, body = {}) => (await send(path, { method: "POST", body })).json();

function heed(told) {
  commandToken = told.command_token;
  view.isWhole = told.is_whole;
  view.takesKeys = told.takes_keys;
}

// Begins a session with a code or an API key.
export async function login(proof) {
  heed(await (await send("/session", { method: "POST", body: proof })).json());
}

// Uses the code of the link, if there is one, and removes it from the address. Returns whether there is a session.
export async function begin() {
  const code = new URLSearchParams(location.hash.slice(1)).get("code");
  if (code) {
    history.replaceState(null, "", location.pathname);
    try {
      await login({ code });
      return true;
    } catch (error) {
      heed(await get("/session"));
      if (commandToken === null) throw error; // with a session that is still valid, a used link does no harm
    }
  } else heed(await get("/session"));
  return commandToken !== null;
}
