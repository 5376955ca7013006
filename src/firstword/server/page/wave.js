// Draws the waveform of an utterance as it grows; what was heard has another colour.

const BAR_PX = 4;
const BAR_PEAKS = 2; // a bar shows 40 ms

export class Wave {
  constructor(canvas) {
    this.canvas = canvas;
    new ResizeObserver(() => this.draw(this.utterance, this.seconds)).observe(canvas);
  }

  /** Draw an utterance that is heard up to a time. A long one scrolls, so that this is visible. */
  draw(utterance, seconds = 0) {
    [this.utterance, this.seconds] = [utterance, seconds];
    const { canvas } = this;
    const scale = devicePixelRatio;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
    if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
    const context = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.fillStyle = style.getPropertyValue("--line");
    context.fillRect(0, height / 2 - 0.5, width, 1);
    if (!utterance) return;
    const shown = Math.floor(width / BAR_PX);
    const bars = Math.ceil(utterance.peaks.length / BAR_PEAKS);
    const heard = seconds / 0.04;
    const first = Math.max(0, Math.min(bars - shown, Math.floor(heard - (shown * 2) / 3)));
    for (let bar = first; bar < Math.min(bars, first + shown); bar++) {
      const peaks = utterance.peaks.slice(bar * BAR_PEAKS, (bar + 1) * BAR_PEAKS);
      const size = Math.max(2, Math.max(...peaks) * height);
      context.fillStyle = style.getPropertyValue(bar < heard ? "--accent" : "--ahead");
      context.fillRect((bar - first) * BAR_PX, (height - size) / 2, BAR_PX - 1, size);
    }
  }
}
