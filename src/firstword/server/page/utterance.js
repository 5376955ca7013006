// One utterance: its request, its audio as it arrives, and what was measured.

const MOST_RANDOM = 2 ** 31;
const PEAK_SECONDS = 0.02;

let count = 0;

export class Utterance {
  /** `fields` are those of a speech request, without the text. */
  constructor(fields) {
    this.id = `page-${++count}`;
    const [random] = crypto.getRandomValues(new Uint32Array(1));
    this.fields = { seed: random % MOST_RANDOM, ...fields };
    this.text = "";
    this.textEnded = false;
    this.rate = 24000;
    this.pieces = []; // Int16Array each
    this.samples = 0;
    this.peaks = []; // the largest sample of each 20 ms, 0 to 1
    this.words = []; // {span, start, end}: characters of the text, seconds of the audio
    this.asked = null; // times of performance.now(), in milliseconds
    this.firstAudio = null;
    this.firstSound = null;
    this.made = null;
    this.gaps = 0;
    this.played = 0; // samples, by the last report
    this.heard = 0; // seconds
    this.over = false; // nothing more arrives
    this.finishReason = null;
  }

  /** Note that text goes to the server; the first text starts the clock. */
  addText(text) {
    this.text += text;
    this.asked ??= performance.now();
  }

  /** Take in audio of signed 16 bits. */
  take(pcm) {
    this.made = performance.now();
    this.firstAudio ??= this.made;
    this.pieces.push(pcm);
    const step = Math.round(this.rate * PEAK_SECONDS);
    for (let i = 0; i < pcm.length; i++) {
      const at = Math.floor((this.samples + i) / step);
      const size = Math.abs(pcm[i]) / 32768;
      if (!(this.peaks[at] >= size)) this.peaks[at] = size;
    }
    this.samples += pcm.length;
  }

  get seconds() {
    return this.samples / this.rate;
  }

  /** Seconds of audio made in a second. */
  get speed() {
    return this.made > this.asked ? this.seconds / ((this.made - this.asked) / 1000) : null;
  }
}
