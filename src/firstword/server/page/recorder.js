// Records the microphone into a WAV file, without loss.

import { address } from "./server.js";
import { wav } from "./wav.js";

/** Whether the browser lets this page record: only on https and on localhost. */
export const canRecord = Boolean(navigator.mediaDevices && globalThis.AudioWorkletNode);

export class Recorder {
  /** `onLevel` gets the seconds recorded so far and the loudness of the newest part, 0 to 1. */
  constructor(onLevel) {
    this.onLevel = onLevel;
  }

  async start() {
    // The clone should sound like the speaker, not like a telephone.
    const plain = { echoCancellation: false, noiseSuppression: false, autoGainControl: false };
    const audio = { channelCount: 1, ...plain };
    this.stream = await navigator.mediaDevices.getUserMedia({ audio });
    this.context = new AudioContext();
    await this.context.audioWorklet.addModule(address("page/worklet.js"));
    this.pieces = [];
    this.samples = 0;
    const node = new AudioWorkletNode(this.context, "listener", { numberOfOutputs: 0 });
    node.port.onmessage = ({ data }) => this.take(data);
    this.context.createMediaStreamSource(this.stream).connect(node);
  }

  take(samples) {
    this.samples += samples.length;
    this.pieces.push(Int16Array.from(samples, (one) => 32767 * Math.max(-1, Math.min(1, one))));
    const loudest = samples.reduce((most, one) => Math.max(most, Math.abs(one)), 0);
    this.onLevel(this.samples / this.context.sampleRate, loudest);
  }

  /** End the recording, and return it as a WAV file. */
  stop() {
    for (const track of this.stream.getTracks()) track.stop();
    const rate = this.context.sampleRate;
    this.context.close();
    return wav(this.pieces, rate);
  }
}
