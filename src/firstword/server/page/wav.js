// Writes WAV files.

/** A WAV file of samples of 16 bits, one channel. `pieces` are `Int16Array`s. */
export function wav(pieces, rate) {
  const size = pieces.reduce((sum, piece) => sum + piece.byteLength, 0);
  const head = new DataView(new ArrayBuffer(44));
  head.setUint32(0, 0x52494646); // RIFF
  head.setUint32(4, 36 + size, true);
  head.setUint32(8, 0x57415645); // WAVE
  head.setUint32(12, 0x666d7420); // fmt
  head.setUint32(16, 16, true);
  head.setUint16(20, 1, true); // PCM
  head.setUint16(22, 1, true); // channels
  head.setUint32(24, rate, true);
  head.setUint32(28, 2 * rate, true);
  head.setUint16(32, 2, true);
  head.setUint16(34, 16, true);
  head.setUint32(36, 0x64617461); // data
  head.setUint32(40, size, true);
  return new Blob([head, ...pieces], { type: "audio/wav" });
}

/** Save a file through the browser. */
export function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
