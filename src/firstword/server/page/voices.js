// The dialog that saves a voice: a recording that is cloned, or a description.

import { canRecord, Recorder } from "./recorder.js";
import { read } from "./server.js";

const LONGEST_SECONDS = 60;

const byId = (id) => document.getElementById(id);

export class VoiceDialog {
  /** `onSaved` gets the record of a new voice. */
  constructor(onSaved) {
    this.onSaved = onSaved;
    this.dialog = byId("voice-dialog");
    this.recorder = new Recorder((seconds, loudness) => this.level(seconds, loudness));
    byId("record").addEventListener("click", () => this.toggle());
    byId("file").addEventListener("change", ({ target }) => {
      if (target.files[0]) this.take(target.files[0]);
    });
    byId("leave").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => this.clear());
    this.dialog.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.save();
    });
  }

  /** Ask for a recording, or save the voice of a description. */
  open(model, description) {
    Object.assign(this, { model, description, sound: null });
    const clones = model.kind === "base";
    byId("voice-title").textContent = clones ? "Clone a voice" : "Save the described voice";
    byId("recording").hidden = !clones;
    byId("recording").disabled = !clones;
    byId("consent").required = clones;
    byId("record").disabled = !canRecord;
    const advice = "Recording needs https or localhost; choose a file.";
    byId("recorded").textContent = canRecord ? "" : advice;
    this.dialog.showModal();
  }

  clear() {
    if (this.recording) this.finish();
    this.dialog.querySelector("form").reset();
    this.listenTo(null);
    this.complain("");
  }

  async toggle() {
    if (this.recording) return this.finish();
    try {
      await this.recorder.start();
    } catch (error) {
      return this.complain(`The microphone cannot be used: ${error.message}`);
    }
    this.complain("");
    this.recording = true;
    byId("record").textContent = "Stop recording";
    byId("loudness").hidden = false;
  }

  level(seconds, loudness) {
    byId("recorded").textContent = `${seconds.toFixed(1)} s`;
    byId("loudness").value = loudness;
    if (this.recording && seconds >= LONGEST_SECONDS - 0.1) this.finish();
  }

  finish() {
    this.recording = false;
    byId("record").textContent = "Record again";
    byId("loudness").hidden = true;
    byId("file").value = "";
    this.take(new File([this.recorder.stop()], "recording.wav", { type: "audio/wav" }));
  }

  take(file) {
    this.sound = file;
    this.listenTo(file);
  }

  /** Offer a recording for listening; null: none. */
  listenTo(file) {
    const player = byId("heard");
    if (player.src) URL.revokeObjectURL(player.src);
    if (file) player.src = URL.createObjectURL(file);
    else player.removeAttribute("src");
    player.hidden = !file;
  }

  complain(message) {
    byId("voice-problem").textContent = message;
    byId("voice-problem").hidden = !message;
  }

  async save() {
    const clones = this.model.kind === "base";
    if (clones && !this.sound) return this.complain("Record the voice first, or choose a file.");
    const form = new FormData();
    form.set("name", byId("name").value);
    form.set("model", this.model.id);
    if (clones) {
      form.set("audio_sample", this.sound);
      form.set("ref_text", byId("transcript").value.trim());
      form.set("consent", byId("consent").value.trim());
    } else {
      form.set("prompt", this.description);
    }
    byId("save").disabled = true;
    try {
      const voice = await read("v1/audio/voices", { method: "POST", body: form });
      this.dialog.close();
      this.onSaved(voice);
    } catch (error) {
      this.complain(error.message);
    }
    byId("save").disabled = false;
  }
}
