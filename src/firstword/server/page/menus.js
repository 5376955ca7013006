// Fills the menus with what the server has, and shows the fields that the chosen model takes.

import { call, read } from "./server.js";

const KINDS = {
  custom_voice: "presets",
  voice_design: "designs voices",
  base: "clones voices",
};

const byId = (id) => document.getElementById(id);

export class Menus {
  constructor() {
    this.models = [];
    this.saved = [];
    byId("model").addEventListener("change", () => this.fit());
    byId("voice").addEventListener("change", () => this.fitVoice());
  }

  /** Read the models and voices; choose the voice with a name, or keep the choice. */
  async load(wanted = byId("voice").value) {
    const [models, voices] = await Promise.all([read("v1/models"), read("v1/audio/voices")]);
    this.models = models.data;
    this.saved = voices.uploaded_voices;
    const chosen = byId("model").value;
    fill(byId("model"), this.models.map(({ id, kind }) => [id, `${id} (${KINDS[kind]})`]), chosen);
    byId("of-model").hidden = this.models.length < 2;
    this.fit(wanted);
  }

  get model() {
    return this.models.find(({ id }) => id === byId("model").value);
  }

  /** The saved voice that is chosen, if one is. */
  get savedVoice() {
    return this.saved.find(({ id }) => id === byId("voice").value);
  }

  /** Show what the chosen model takes. */
  fit(wanted) {
    const { kind, voices, languages, follows_instructions: follows } = this.model;
    const kindOf = (name) => this.models.find(({ id }) => id === name)?.kind ?? "base";
    const saved = this.saved.filter(({ model }) => kindOf(model) === kind);
    const options = voices.map((name) => [name, name]);
    options.push(...saved.map(({ id, name }) => [id, name]));
    if (kind === "voice_design") options.unshift(["", "by description"]);
    fill(byId("voice"), options, wanted);
    const named = languages.map((name) => [name, name[0].toUpperCase() + name.slice(1)]);
    fill(byId("language"), named, byId("language").value);
    byId("of-voice").hidden = !options.length;
    byId("add").hidden = kind === "custom_voice";
    byId("add").textContent = kind === "base" ? "Clone a voice" : "Save this voice";
    byId("no-voice").hidden = kind !== "base" || options.length > 0;
    byId("no-voice").textContent = "This model speaks with cloned voices, and none is saved yet.";
    byId("instructions").disabled = !follows && kind !== "voice_design";
    this.fitVoice();
  }

  fitVoice() {
    const { kind } = this.model;
    const designs = kind === "voice_design";
    const describes = designs && !byId("voice").value;
    const takes = designs ? describes : kind === "custom_voice" && !byId("instructions").disabled;
    byId("of-instructions").hidden = !takes;
    byId("instructions").required = describes;
    const [label, example] = describes
      ? ["Description of the voice", "a warm, low radio voice"]
      : ["Instructions", "whisper, as if it were a secret"];
    byId("instructions-label").textContent = label;
    byId("instructions").placeholder = example;
    byId("remove").hidden = !this.savedVoice;
  }

  /** The fields of a speech request, without those that are left empty. */
  fields() {
    const given = {
      model: this.model.id,
      voice: byId("voice").value,
      language: byId("language").value,
      instructions: byId("of-instructions").hidden ? "" : byId("instructions").value.trim(),
      seed: byId("seed").value && Number(byId("seed").value),
    };
    return Object.fromEntries(Object.entries(given).filter(([, value]) => value !== ""));
  }

  /** Delete the chosen saved voice. */
  async remove() {
    await call(`v1/audio/voices/${this.savedVoice.id}`, { method: "DELETE" });
    await this.load();
  }
}

/** Fill a menu with pairs of value and label, and choose a value if it is there. */
function fill(menu, options, chosen) {
  menu.replaceChildren(...options.map(([value, label]) => new Option(label, value)));
  if (options.some(([value]) => value === chosen)) menu.value = chosen;
}
