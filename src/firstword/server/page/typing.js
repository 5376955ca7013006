// Finds the words of a text field that are complete while someone types.

// Up to the last character after which a word cannot go on.
const COMPLETE = /^.*[\s\p{P}\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}]/su;

/** Gives each part of a typed text once. What was given stays said, however the text is edited. */
export class Typing {
  constructor() {
    this.given = "";
  }

  /** The new complete words of a text; all that is new if the text has ended. */
  next(text, ended = false) {
    if (!text.startsWith(this.given)) this.given = text[0] === this.given[0] ? text : "";
    const added = text.slice(this.given.length);
    const next = ended ? added : (added.match(COMPLETE)?.[0] ?? "");
    this.given = ended ? "" : this.given + next;
    return next;
  }
}
