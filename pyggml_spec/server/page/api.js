// Requests to the server, its event streams, and its errors as sentences that say what to do.

const KEY = "pyspec.key"; // kept until the tab is closed

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";
export const setApiKey = (key) => sessionStorage.setItem(KEY, key.trim());

export class Failure extends Error {
  /** `kind`: of the server's errors, or "unreached", "cut"; `seconds`: after which it may be tried again. */
  constructor(message, { status = 0, kind = "", seconds = 0 } = {}) {
    super(message);
    Object.assign(this, { status, kind, seconds });
  }
}

/** The response to a request that was taken. Throws Failure, or what an AbortController throws. */
export async function request(path, { body, signal } = {}) {
  const key = apiKey(), headers = { ...(body ? { "content-type": "application/json" } : {}), ...(key ? { authorization: "Bearer " + key } : {}) };
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    throw error instanceof TypeError ? new Failure("the server cannot be reached: " + error.message, { kind: "unreached" }) : error;
  }
  if (response.ok) return response;
  let error = { message: "the server answered " + response.status };
  try { error = (await response.json()).error; } catch { /* a proxy answered, not the server */ }
  throw new Failure(error.message, { status: response.status, kind: error.type, seconds: Number(response.headers.get("retry-after") ?? 0) });
}

/** The events of a stream; with `notes` its comments too, as {note}: what is waited for. Throws Failure where one is an error, or the connection breaks. */
export async function* events(response, notes = false) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      throw error instanceof TypeError ? new Failure("the connection broke: " + error.message, { kind: "unreached" }) : error;
    }
    if (read.done) return;
    const parts = (held + read.value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (notes && part.startsWith(": ")) yield { note: part.slice(2) };
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (!data || data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new Failure(event.error.message, { status: event.error.code, kind: event.error.type });
      yield event;
    }
  }
}

/** The events of a generation up to the last one, which has its timings. Throws Failure: it was cut off too. */
export async function* generation(path, body, signal) {
  let ended = false;
  for await (const event of events(await request(path, { body: { ...body, stream: true }, signal }), true)) {
    ended ||= event.timings !== undefined && event.speculation?.mode !== undefined;
    yield event;
  }
  if (!ended) throw new Failure("the server ended the stream before its end; its log says why", { kind: "cut" });
}

/** What failed: a title, what to do, and the one action that helps ("retry", "key", "new" or none). Plain data, which is kept with a message. */
export function explain(failure) {
  const { status, kind, seconds, message } = failure, said = message[0].toUpperCase() + message.slice(1);
  if (kind === "unreached") {
    return { title: "The server cannot be reached", text: "Check that pyspec serve still runs at this address, and the network to it. Then try again.", act: "retry" };
  }
  if (kind === "cut") return { title: "The answer was cut off", text: said + ".", act: "retry" };
  if (status === 401) return { title: "This server needs an API key", text: "Enter the key that it was started with (--api-key).", act: "key" };
  if (kind === "exceed_context_size_error") return { title: "The context is full", text: said + ". Or start a new conversation, or edit an earlier message.", act: "new" };
  if (status === 429) return { title: "The server is busy", text: said + ".", act: "retry", until: Date.now() + 1000 * Math.max(1, seconds) };
  if (status === 503) return { title: "The server takes no requests now", text: said + ".", act: "retry", until: Date.now() + 1000 * seconds };
  if (status >= 400 && status < 500 || status === 501) return { title: "The server refused this request", text: said + ".", act: "retry" };
  return { title: status ? "The server failed" : "The page failed", text: said + ".", act: "retry" };
}
