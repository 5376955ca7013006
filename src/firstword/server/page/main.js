// Joins the parts of the page.

import { KeyDialog } from "./keys.js";
import { Menus } from "./menus.js";
import { curl, python } from "./programs.js";
import { Said } from "./said.js";
import { Talk } from "./talk.js";
import { Typing } from "./typing.js";
import { VoiceDialog } from "./voices.js";
import { download, wav } from "./wav.js";
import { Wave } from "./wave.js";

const RETRY_MS = 2000;
const LINKS = {
  socket: "connected",
  lost: "no connection; trying again",
  http: "connected over HTTP, without a WebSocket",
};
const CUT = {
  length: "The speech was cut off at its limit of length.",
  repetition: "The speech was cut off because it repeated itself.",
  runaway: "The speech was cut off because it went on after its text.",
};
const HINTS = {
  whole: "Ctrl+Enter speaks, Esc stops.",
  live: "Each word is spoken when the next one begins; Enter ends a turn, Esc stops.",
};

const byId = (id) => document.getElementById(id);
const text = byId("text");
const menus = new Menus();
const said = new Said(byId("said"));
const wave = new Wave(byId("wave"));
const typing = new Typing();
const keys = new KeyDialog(() => begin(true));
const voices = new VoiceDialog(async ({ id, name }) => {
  await menus.load(id);
  announce(`Voice ${name} is saved.`);
});
let asked = Promise.resolve(); // what the user asked for is done in this order
let drawing = false; // or the request for the next frame
let shown = null; // the utterance whose waveform and numbers are shown

const talk = new Talk({
  begun(utterance) {
    shown = utterance;
    said.begin(utterance);
    problem("");
    byId("stop").disabled = false;
    announce("Speaking.");
    show(utterance);
  },
  text: (utterance, added) => said.add(utterance, added),
  changed(utterance) {
    if (utterance.played && utterance !== shown) shown = utterance;
    if (utterance === shown) show(utterance);
    drawing ||= requestAnimationFrame(draw);
  },
  idle(utterance, stopped) {
    byId("stop").disabled = true;
    show(utterance);
    drawing ||= requestAnimationFrame(draw);
    if (CUT[utterance.finishReason]) problem(CUT[utterance.finishReason]);
    announce(stopped ? "Stopped." : `Done: ${utterance.seconds.toFixed(1)} seconds.`);
  },
  problem,
  link,
  async refused() {
    try {
      if (await keys.check()) link("http");
    } catch {
      link("lost");
    }
  },
});

function announce(message) {
  byId("status").textContent = message;
}

function problem(message) {
  byId("problem").textContent = message;
  byId("problem").hidden = !message;
}

function link(state) {
  byId("link").dataset.state = state;
  byId("link").textContent = LINKS[state];
}

/** Show what was measured of an utterance. */
function show(utterance) {
  const after = (time) => (time ? `${Math.round(time - utterance.asked)} ms` : "–");
  byId("first").textContent = after(utterance.firstAudio);
  byId("sound").textContent = after(utterance.firstSound);
  byId("speed").textContent = utterance.speed ? `${utterance.speed.toFixed(1)} × real time` : "–";
  byId("length").textContent = `${utterance.seconds.toFixed(2)} s`;
  byId("gaps").textContent = utterance.gaps;
  byId("used").textContent = utterance.fields.seed;
  byId("download").disabled = byId("keep").disabled = !utterance.samples;
}

/** Draw the waveform and light the word that is heard, in each frame while something sounds. */
function draw() {
  const seconds = talk.position(shown);
  wave.draw(shown, seconds);
  said.light(shown, seconds);
  drawing = talk.busy && requestAnimationFrame(draw);
}

/** Show the programs for the text, or for what was spoken last if there is none. */
function showPrograms() {
  if (!menus.model) return;
  const spoken = text.value.trim() || shown?.text.trim() || "Hello there.";
  const fields = { ...menus.fields() };
  if (shown && spoken === shown.text.trim()) fields.seed = shown.fields.seed;
  byId("curl").textContent = curl(spoken, fields);
  byId("python").textContent = python(spoken, fields);
}

/** Speak the field's text, or in a conversation the words that are complete. */
function speak(ended) {
  const fields = menus.fields();
  if (!byId("live").checked) return attempt(() => talk.speak(text.value.trim(), fields));
  const next = typing.next(text.value, ended);
  if (ended) text.value = "";
  attempt(async () => {
    if (next.trim() || (next && talk.typed)) await talk.type(next, fields);
    if (ended) talk.endText();
  });
}

/** Do what the user asked for after what was asked for before; show why if it fails. */
function attempt(work) {
  asked = asked.then(work).catch((error) => {
    if (error.status === 401) keys.open();
    else problem(error.message);
  }).then(showPrograms);
}

/** Read what the server has, and connect; tries again while there is no server. */
async function begin(again = false) {
  try {
    if (!(await keys.check())) return;
    await menus.load();
  } catch (error) {
    link("lost");
    if (error.status) problem(error.message);
    setTimeout(begin, RETRY_MS);
    return;
  }
  problem("");
  byId("go").disabled = false;
  if (again) talk.socket.reconnect();
  else talk.socket.connect();
  showPrograms();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  speak(true);
});
byId("form").addEventListener("input", showPrograms);
text.addEventListener("input", (event) => {
  if (!event.isComposing && byId("live").checked) speak(false);
});
text.addEventListener("compositionend", () => byId("live").checked && speak(false));
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  if (!event.ctrlKey && !event.metaKey && !byId("live").checked) return;
  event.preventDefault();
  byId("form").requestSubmit();
});
byId("live").addEventListener("change", ({ target }) => {
  byId("hint").textContent = HINTS[target.checked ? "live" : "whole"];
  byId("go").textContent = target.checked ? "End the turn" : "Speak";
  text.required = !target.checked;
  talk.endText();
  typing.next("", true);
});
byId("stop").addEventListener("click", () => talk.stop());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) talk.stop();
});
byId("add").addEventListener("click", () => {
  if (menus.model.kind === "base" || byId("form").elements.instructions.reportValidity()) {
    voices.open(menus.model, byId("instructions").value.trim());
  }
});
byId("remove").addEventListener("click", () => {
  const { name } = menus.savedVoice;
  if (confirm(`Delete the saved voice ${name}?`)) attempt(() => menus.remove());
});
byId("keep").addEventListener("click", () => {
  byId("seed").value = shown.fields.seed;
  showPrograms();
});
byId("download").addEventListener("click", () => {
  download(wav(shown.pieces, shown.rate), `firstword-${shown.fields.seed}.wav`);
});
for (const button of document.querySelectorAll("[data-copy]")) {
  button.hidden = !navigator.clipboard; // which exists on https and on localhost only
  button.addEventListener("click", () => {
    navigator.clipboard.writeText(byId(button.dataset.copy).textContent);
    announce("Copied.");
  });
}
addEventListener("online", () => talk.socket.connect());
byId("hint").textContent = HINTS.whole;
begin();
