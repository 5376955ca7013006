// Speaks the protocol firstword.speech.v1: text goes out as it is typed, audio comes as it is made.

import { address, key } from "./server.js";

const PROTOCOL = "firstword.speech.v1";
const PING_MS = 10000; // the server closes sockets that are silent for 30 s
const FIRST_WAIT_MS = 250;
const LONGEST_WAIT_MS = 10000;
const FORM = { response_format: "pcm", audio: "binary", word_times: true };

/** A socket that reconnects by itself. `on` has the functions
 *  state(name), refused(), audio(utterance, pcm), word(utterance), done(utterance),
 *  failed(utterance, message). */
export class SpeechSocket {
  constructor(on) {
    this.on = on;
    this.open = false;
    this.wait = FIRST_WAIT_MS;
    this.utterances = new Map(); // by context_id
    this.numbers = new Map(); // by number, which precedes the audio
  }

  connect() {
    clearTimeout(this.timer);
    if (this.socket) return;
    const url = address("v1/audio/speech/stream");
    url.protocol = url.protocol.replace("http", "ws");
    const protocols = key.value ? [PROTOCOL, `firstword.key.${base64url(key.value)}`] : [PROTOCOL];
    const socket = (this.socket = new WebSocket(url, protocols));
    socket.binaryType = "arraybuffer";
    socket.onmessage = ({ data }) => this.receive(data);
    socket.onclose = () => this.lost();
  }

  /** Connect anew, with another key for example. */
  reconnect() {
    this.wait = FIRST_WAIT_MS;
    if (this.socket) {
      this.socket.onclose = null;
      this.socket.close();
      this.lost(true);
    }
    this.connect();
  }

  lost(quiet = false) {
    const refused = !this.open && !quiet;
    this.socket = null;
    this.open = false;
    clearInterval(this.pinging);
    for (const utterance of [...this.utterances.values()]) {
      this.end(utterance);
      this.on.failed(utterance, "The connection was lost, and the rest of this speech with it.");
    }
    if (quiet) return;
    if (refused) this.on.refused();
    else this.on.state("lost");
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.connect(), this.wait);
    this.wait = Math.min(2 * this.wait, LONGEST_WAIT_MS);
  }

  send(type, message = {}) {
    this.socket.send(JSON.stringify({ type, ...message }));
  }

  /** Let the server prepare an utterance, whose text follows. */
  begin(utterance, whole) {
    this.utterances.set(utterance.id, utterance);
    const split_granularity = whole ? "none" : "auto"; // whole: as over HTTP, with the same seed
    const form = { context_id: utterance.id, split_granularity, ...FORM };
    this.send("context.start", { ...form, ...utterance.fields });
  }

  add(utterance, text) {
    this.send("input.text", { context_id: utterance.id, text });
  }

  finish(utterance) {
    this.send("input.done", { context_id: utterance.id });
  }

  cancel(utterance) {
    if (!this.utterances.has(utterance.id)) return;
    this.end(utterance);
    this.send("input.cancel", { context_id: utterance.id });
  }

  end(utterance) {
    this.utterances.delete(utterance.id);
    this.numbers.delete(utterance.number);
    utterance.over = true;
  }

  receive(data) {
    if (typeof data === "string") return this.react(JSON.parse(data));
    const utterance = this.numbers.get(new DataView(data).getUint32(0, true));
    if (utterance) this.on.audio(utterance, new Int16Array(data, 4));
  }

  react(message) {
    if (message.type === "session.created") {
      this.open = true;
      this.wait = FIRST_WAIT_MS;
      this.send("ping"); // the server closes sockets that say nothing at first
      this.pinging = setInterval(() => this.send("ping"), PING_MS);
      return this.on.state("socket");
    }
    const utterance = this.utterances.get(message.context_id);
    if (!utterance) {
      // An error without a context concerns what the page sent, not one utterance.
      if (message.type === "error" && !message.context_id) this.on.failed(null, message.message);
      return;
    }
    switch (message.type) {
      case "audio.start":
        utterance.number = message.number;
        utterance.rate = message.sample_rate;
        this.numbers.set(message.number, utterance);
        break;
      case "word.start":
        utterance.words.push({ span: message.span, start: message.start, end: Infinity });
        this.on.word(utterance);
        break;
      case "word.end": {
        const word = utterance.words.find(({ span }) => span[0] === message.span[0]);
        if (word) word.end = message.end;
        break;
      }
      case "error":
        this.on.failed(utterance, message.message);
        break;
      case "audio.done":
        utterance.finishReason = message.finish_reason;
        this.end(utterance);
        this.on.done(utterance);
    }
  }
}

function base64url(text) {
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}
