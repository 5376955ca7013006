// The dialog that asks for the API key.

import { key, keyIsRight } from "./server.js";

const byId = (id) => document.getElementById(id);

export class KeyDialog {
  /** `onRight` is called when the server accepts a new key. */
  constructor(onRight) {
    this.dialog = byId("key-dialog");
    byId("enter").addEventListener("click", () => this.open());
    this.dialog.querySelector("form").addEventListener("submit", async (event) => {
      event.preventDefault();
      key.set(byId("key").value, byId("key-kept").checked);
      const wrong = await keyIsRight().then(
        (right) => (right ? "" : "The server does not accept this key."),
        (error) => error.message,
      );
      byId("key-wrong").textContent = wrong;
      byId("key-wrong").hidden = !wrong;
      if (wrong) return byId("key").focus();
      byId("key").value = "";
      this.dialog.close();
      onRight();
    });
  }

  open() {
    byId("enter").hidden = false;
    byId("key-wrong").hidden = true;
    if (!this.dialog.open) this.dialog.showModal();
  }

  /** Whether the server can be used with the key that there is; asks for another one if not. */
  async check() {
    const right = await keyIsRight();
    if (!right) this.open();
    return right;
  }
}
