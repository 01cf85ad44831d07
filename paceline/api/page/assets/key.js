// The dialog that asks for a key, where the server wants one.

import { request, saveKey } from "./api.js";

export class KeyDialog {
  /** dialog: its element. accepted: is called with each key that the server takes, and waited for. */
  constructor(dialog, accepted) {
    this.dialog = dialog;
    this.accepted = accepted;
    this.field = dialog.querySelector("input[type=password]");
    this.told = dialog.querySelector(".error");
    this.then = () => {};
    dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      this.take();
    };
  }

  /** reason: why the last key was refused, or nothing. then: is called once a key is taken. */
  open(reason = "", then = () => {}) {
    this.then = then;
    this.told.textContent = reason;
    if (!this.dialog.open) this.dialog.showModal();
  }

  async take() {
    const key = this.field.value.trim();
    try {
      await request("v1/models", { key });
    } catch (error) {
      this.told.textContent = error.message;
      return;
    }
    this.field.value = "";
    this.dialog.close();
    if (!saveKey(key, this.dialog.querySelector("input[type=checkbox]").checked)) return;
    await this.accepted();
    this.then();
  }
}
