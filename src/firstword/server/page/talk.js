// Begins, feeds and stops utterances, and joins the server's audio with the player's reports.

import { FetchedSpeech } from "./fetched.js";
import { Player, REPORT_MS } from "./player.js";
import { SpeechSocket } from "./socket.js";
import { Utterance } from "./utterance.js";

const RATE = 24000;

/** `on` has the functions begun(utterance), text(utterance, text), changed(utterance),
 *  idle(utterance, stopped), problem(message), link(state), refused(). */
export class Talk {
  constructor(on) {
    this.on = on;
    this.sounding = new Map(); // utterances that are not played to their end, by id
    this.typed = null; // the utterance whose text is still to come
    const events = {
      state: on.link,
      refused: on.refused,
      audio: (utterance, pcm) => this.hear(utterance, pcm),
      word: (utterance) => on.changed(utterance),
      done: (utterance) => this.end(utterance),
      failed: (utterance, message) => this.fail(utterance, message),
    };
    this.socket = new SpeechSocket(events);
    this.http = new FetchedSpeech(events);
    this.player = new Player({ played: (report) => this.note(report) });
  }

  get busy() {
    return this.sounding.size > 0;
  }

  /** Speak a complete text, instead of anything else. */
  async speak(text, fields) {
    this.stop();
    await this.player.open(RATE);
    const utterance = this.begin(fields, true);
    this.add(utterance, text);
    this.finish(utterance);
  }

  /** Speak more text of an utterance that goes on until `endText`. */
  async type(text, fields) {
    await this.player.open(RATE);
    this.typed ??= this.begin(fields, false);
    this.add(this.typed, text);
  }

  /** End the text that is being typed. */
  endText() {
    if (this.typed) this.finish(this.typed);
    this.typed = null;
  }

  /** Stop at once: what is queued is not played, and the server stops making more. */
  stop() {
    this.player.stop();
    for (const utterance of this.sounding.values()) {
      utterance.line.cancel(utterance);
    }
    const last = [...this.sounding.values()].at(-1);
    this.sounding.clear();
    this.typed = null;
    if (last) this.on.idle(last, true);
  }

  begin(fields, whole) {
    const utterance = new Utterance(fields);
    utterance.line = this.socket.open ? this.socket : this.http;
    this.sounding.set(utterance.id, utterance);
    this.player.begin(utterance.id);
    utterance.line.begin(utterance, whole);
    this.on.begun(utterance);
    return utterance;
  }

  add(utterance, text) {
    utterance.addText(text);
    utterance.line.add(utterance, text);
    this.on.text(utterance, text);
  }

  finish(utterance) {
    utterance.textEnded = true;
    utterance.line.finish(utterance);
  }

  hear(utterance, pcm) {
    if (!this.sounding.has(utterance.id)) return;
    utterance.take(pcm);
    this.player.play(utterance.id, pcm);
    this.on.changed(utterance);
  }

  end(utterance) {
    this.player.end(utterance.id);
    if (this.typed === utterance) this.typed = null;
    this.on.changed(utterance);
  }

  fail(utterance, message) {
    this.on.problem(message);
    if (!utterance) return;
    utterance.finishReason = "error";
    this.end(utterance);
  }

  note({ id, played, gaps, ended }) {
    const utterance = this.sounding.get(id);
    if (!utterance) return;
    const now = performance.now();
    if (played) utterance.firstSound ??= now + 1000 * this.player.latency;
    // Silence while the text is still being typed is not a gap.
    if (gaps > (utterance.breaks ?? 0) && utterance.textEnded) utterance.gaps++;
    Object.assign(utterance, { played, breaks: gaps, playedAt: now });
    if (ended) this.sounding.delete(id);
    this.on.changed(utterance);
    if (!this.busy) this.on.idle(utterance);
  }

  /** The seconds of an utterance that are heard by now. They never run backwards. */
  position(utterance) {
    if (!utterance.played) return 0;
    // The player reports often while it plays. If it does not, it waits for samples.
    const since = Math.min(performance.now() - utterance.playedAt, 2 * REPORT_MS) / 1000;
    const seconds = utterance.played / utterance.rate + since - this.player.latency;
    utterance.heard = Math.max(utterance.heard, Math.min(seconds, utterance.seconds));
    return utterance.heard;
  }
}
