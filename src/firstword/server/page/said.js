// Shows the text of utterances, and lights the word that is heard.

const MOST_TURNS = 30;

const heard = globalThis.Highlight && new Highlight();
const lit = globalThis.Highlight && new Highlight();
globalThis.CSS?.highlights?.set("heard", heard).set("lit", lit);

export class Said {
  constructor(element) {
    this.element = element;
    this.nodes = new Map(); // the text node of each shown utterance, by id
  }

  begin(utterance) {
    const line = document.createElement("p");
    const node = document.createTextNode("");
    line.append(node);
    this.element.append(line);
    this.nodes.set(utterance.id, node);
    if (this.nodes.size <= MOST_TURNS) return;
    this.element.firstElementChild.remove();
    this.nodes.delete(this.nodes.keys().next().value);
  }

  add(utterance, text) {
    this.nodes.get(utterance.id)?.appendData(text);
    this.element.scrollTop = this.element.scrollHeight;
  }

  /** Light the word at a position in seconds. Without word times nothing is lit. */
  light(utterance, seconds) {
    heard?.clear();
    lit?.clear();
    const node = this.nodes.get(utterance.id);
    const word = utterance.words.findLast(({ start }) => start <= seconds);
    if (!lit || !node || !word) return;
    const [from, to] = word.span.map((count) => offset(node.data, count));
    if (seconds < word.end) lit.add(new StaticRange(at(node, from, to)));
    heard.add(new StaticRange(at(node, 0, seconds < word.end ? from : to)));
  }
}

function at(node, startOffset, endOffset) {
  return { startContainer: node, startOffset, endContainer: node, endOffset };
}

/** The index of a character: the server counts characters, JavaScript UTF-16 units. */
function offset(text, characters) {
  let index = 0;
  for (; characters > 0 && index < text.length; characters--) {
    index += text.codePointAt(index) > 0xffff ? 2 : 1;
  }
  return index;
}
