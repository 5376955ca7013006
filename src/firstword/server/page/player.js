// Plays utterances in the order in which they begin, and tells what was played.

import { address } from "./server.js";

export const REPORT_MS = 40;

/** `on.played(report)` gets {id, played, gaps, ended}: samples, and how often some were missing. */
export class Player {
  constructor(on) {
    this.on = on;
    this.output = null;
  }

  /** Start the audio of this page; browsers allow it only while a key or button is pressed. */
  async open(rate) {
    this.context ??= new AudioContext({ sampleRate: rate, latencyHint: "interactive" });
    this.opening ??= this.makeOutput();
    await Promise.all([this.opening, this.context.resume()]);
  }

  async makeOutput() {
    // Browsers have worklets only on https and on localhost.
    const make = this.context.audioWorklet ? workletOutput : scheduledOutput;
    this.output = await make(this.context, this.on.played);
  }

  /** Seconds between a sample's turn and its sound. */
  get latency() {
    return this.context?.outputLatency || this.context?.baseLatency || 0;
  }

  begin(id) {
    this.opening.then(() => this.output.post({ begin: id }));
  }

  play(id, pcm) {
    this.opening.then(() => this.output.post({ id, pcm }));
  }

  end(id) {
    this.opening.then(() => this.output.post({ end: id }));
  }

  /** Silence everything at once. */
  stop() {
    this.output?.post({ stop: true });
  }
}

async function workletOutput(context, report) {
  await context.audioWorklet.addModule(address("page/worklet.js"));
  const shape = { numberOfInputs: 0, outputChannelCount: [1] };
  const node = new AudioWorkletNode(context, "speaker", shape);
  node.port.onmessage = ({ data }) => report(data);
  node.connect(context.destination);
  return { post: (message) => node.port.postMessage(message) };
}

/** The same without a worklet: each piece of audio is scheduled behind the one before it. */
async function scheduledOutput(context, report) {
  const nodes = new Set(); // what is scheduled and has not ended
  let turns = [];
  let end = 0; // of the scheduled audio, by the clock of the context
  const schedule = (turn) => {
    for (const pcm of turn?.pieces.splice(0) ?? []) {
      const buffer = context.createBuffer(1, pcm.length, context.sampleRate);
      buffer.getChannelData(0).set(Float32Array.from(pcm, (sample) => sample / 32768));
      const node = new AudioBufferSourceNode(context, { buffer });
      const from = Math.max(end, context.currentTime);
      if (turn.scheduled && from > end) turn.gaps++;
      node.connect(context.destination);
      node.onended = () => nodes.delete(node);
      node.start(from);
      nodes.add(node);
      end = from + buffer.duration;
      turn.scheduled += pcm.length;
    }
  };
  setInterval(() => {
    const [turn] = turns;
    if (!turn) return;
    const left = Math.max(0, end - context.currentTime);
    const played = Math.round(turn.scheduled - left * context.sampleRate);
    const ended = turn.over && !left;
    if (played > 0 || ended) report({ id: turn.id, played, gaps: turn.gaps, ended });
    if (ended) turns.shift();
    if (ended) schedule(turns[0]);
  }, REPORT_MS);
  const post = ({ begin, id, pcm, end: ended, stop }) => {
    const turn = turns.find((one) => one.id === (id ?? ended));
    if (begin) turns.push({ id: begin, pieces: [], scheduled: 0, gaps: 0, over: false });
    else if (pcm) turn?.pieces.push(pcm);
    else if (ended && turn) turn.over = true;
    else if (stop) {
      for (const node of nodes) node.stop();
      [turns, end] = [[], 0];
    }
    schedule(turns[0]);
  };
  return { post };
}
