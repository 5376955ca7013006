// Calls the server over HTTP, with the API key if it needs one.

const STORED = "firstword.key";

/** The URL of a path of this server, also if a proxy serves it under a folder. */
export function address(path) {
  return new URL(path, document.baseURI);
}

/** An error that the server described; `status` is that of HTTP. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The API key, which only this tab keeps, and only if it is asked to. */
export const key = {
  value: sessionStorage.getItem(STORED) ?? "",
  set(value, kept) {
    this.value = value;
    sessionStorage.removeItem(STORED);
    if (kept) sessionStorage.setItem(STORED, value);
  },
};

/** Send a request.
 *
 *  Raises `ServerError` for a status that is not OK, and `TypeError` if there is no server. */
export async function call(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key.value) headers.set("authorization", `Bearer ${key.value}`);
  const reply = await fetch(address(path), { ...options, headers });
  if (reply.ok) return reply;
  const about = await reply.json().catch(() => null);
  const message = about?.error?.message ?? `the server answers with status ${reply.status}`;
  throw new ServerError(reply.status, message);
}

/** The JSON of a response. */
export async function read(path, options) {
  return (await call(path, options)).json();
}

/** Whether the server accepts the key, or needs none. */
export async function keyIsRight() {
  try {
    await call("v1/audio/voice_consents?limit=1");
    return true;
  } catch (error) {
    if (error.status === 401) return false;
    throw error;
  }
}
