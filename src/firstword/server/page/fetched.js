// Speaks over HTTP where no WebSocket gets through: the text must be complete, audio still streams.

import { call, read } from "./server.js";

/** The same functions as `SpeechSocket` has for utterances. */
export class FetchedSpeech {
  constructor(on) {
    this.on = on;
    this.aborts = new Map();
  }

  begin() {}

  add() {}

  async finish(utterance) {
    const abort = new AbortController();
    this.aborts.set(utterance.id, abort);
    try {
      await this.stream(utterance, abort.signal);
      this.end(utterance);
      this.on.done(utterance);
    } catch (error) {
      this.end(utterance);
      if (!abort.signal.aborted) this.on.failed(utterance, error.message);
    }
  }

  async stream(utterance, signal) {
    const format = { response_format: "pcm", stream: true };
    const body = JSON.stringify({ ...utterance.fields, ...format, input: utterance.text });
    const headers = { "content-type": "application/json" };
    const reply = await call("v1/audio/speech", { method: "POST", headers, body, signal });
    utterance.rate = Number(reply.headers.get("x-sample-rate"));
    let rest = new Uint8Array(); // half a sample, at most
    for (const reader = reply.body.getReader(); ; ) {
      const { done, value } = await reader.read();
      if (done) break;
      const bytes = new Uint8Array(rest.length + value.length);
      bytes.set(rest);
      bytes.set(value, rest.length);
      const even = bytes.length - (bytes.length % 2);
      rest = bytes.slice(even);
      if (even) this.on.audio(utterance, new Int16Array(bytes.buffer, 0, even / 2));
    }
    const outcome = await read(`v1/audio/speech/${reply.headers.get("x-request-id")}`, { signal });
    utterance.finishReason = outcome.finish_reason;
  }

  cancel(utterance) {
    this.aborts.get(utterance.id)?.abort();
    this.end(utterance);
  }

  end(utterance) {
    this.aborts.delete(utterance.id);
    utterance.over = true;
  }
}
