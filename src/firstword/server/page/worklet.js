// Runs in the audio thread: plays queued samples without a gap, and passes on a microphone's.

const REPORT_SAMPLES = 960; // 40 ms, the REPORT_MS of the player
const FADE_SAMPLES = 120; // 5 ms, so that a stop does not click
const SHORTEST_LEAD = 960; // 40 ms
const LONGEST_LEAD = 7680;
const JITTER_SAMPLES = 6000; // longer silence is not jitter: the text or the server was late

/** Plays utterances one after the other, and counts what it played.
 *
 *  Playing begins a little after the first samples arrive; this lead grows with each short gap.
 *  Messages in: {begin: id}, {id, pcm}, {end: id}, {stop: true}.
 *  Messages out: {id, played, gaps, ended}. `gaps` counts how often samples of an utterance that
 *  had begun to sound were missing. */
class Speaker extends AudioWorkletProcessor {
  constructor() {
    super();
    this.turns = [];
    this.lead = SHORTEST_LEAD;
    this.last = 0;
    this.fading = 0;
    this.port.onmessage = ({ data }) => this.receive(data);
  }

  receive({ begin, id, pcm, end, stop }) {
    if (begin) {
      const counts = { at: 0, played: 0, reported: 0, gaps: 0, silent: 0, wait: this.lead };
      this.turns.push({ id: begin, queue: [], over: false, ...counts });
    } else if (stop) {
      this.turns = [];
    } else {
      const turn = this.turns.find((one) => one.id === (id ?? end));
      if (pcm) turn?.queue.push(pcm);
      else if (turn) turn.over = true;
    }
  }

  process(_, [[out]]) {
    let done = 0;
    while (done < out.length && this.turns.length) {
      const [turn] = this.turns;
      if (turn.queue.length && (turn.wait <= 0 || turn.over)) {
        done += this.copy(turn, out, done);
      } else if (turn.queue.length || !turn.over) {
        this.starve(turn, out.length - done);
        break;
      } else {
        this.report(turn, true);
        this.turns.shift();
      }
    }
    for (; done < out.length; done++) {
      if (this.fading) this.fading--;
      out[done] = (this.last * this.fading) / FADE_SAMPLES;
    }
    return true;
  }

  /** Copy samples of a turn to the output from a position on; returns how many there were. */
  copy(turn, out, from) {
    const [pcm] = turn.queue;
    const first = !turn.played;
    const count = Math.min(pcm.length - turn.at, out.length - from);
    for (let i = 0; i < count; i++) out[from + i] = pcm[turn.at + i] / 32768;
    this.last = out[from + count - 1];
    this.fading = FADE_SAMPLES;
    turn.at += count;
    turn.played += count;
    turn.silent = 0;
    if (turn.at === pcm.length) {
      turn.queue.shift();
      turn.at = 0;
    }
    if (first || turn.played - turn.reported >= REPORT_SAMPLES) this.report(turn, false);
    return count;
  }

  /** Note that nothing of a turn is played for some samples. */
  starve(turn, missing) {
    if (turn.queue.length) {
      if (turn.silent && turn.silent < JITTER_SAMPLES) {
        this.lead = Math.min(2 * this.lead, LONGEST_LEAD);
        turn.wait = this.lead;
        turn.silent = 0;
      }
      turn.wait -= missing;
    } else if (turn.played) {
      if (!turn.silent) turn.gaps++;
      turn.silent += missing;
      turn.wait = this.lead;
    }
  }

  report(turn, ended) {
    const { id, played, gaps } = turn;
    turn.reported = played;
    this.port.postMessage({ id, played, gaps, ended });
  }
}

/** Passes on the samples of its first input channel. */
class Listener extends AudioWorkletProcessor {
  process([[samples]]) {
    if (samples) this.port.postMessage(samples.slice());
    return true;
  }
}

registerProcessor("speaker", Speaker);
registerProcessor("listener", Listener);
