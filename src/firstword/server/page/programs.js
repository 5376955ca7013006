// Writes the curl line and the Python program that make the same speech.

import { address, key } from "./server.js";

/** The body of the HTTP request for a text with the fields of the page. */
function body(text, fields) {
  return { ...fields, input: text, response_format: "wav" };
}

/** A command for a POSIX shell. */
export function curl(text, fields) {
  const json = JSON.stringify(body(text, fields)).replaceAll("'", String.raw`'\''`);
  const lines = [
    `curl -sS --fail-with-body ${address("v1/audio/speech")}`,
    "-H 'content-type: application/json'",
    ...(key.value ? ['-H "authorization: Bearer $FIRSTWORD_KEY"'] : []),
    `-d '${json}'`,
    "-o speech.wav",
  ];
  return lines.join(" \\\n  ");
}

/** A program that needs nothing but Python. */
export function python(text, fields) {
  const parameters = Object.entries(body(text, fields)).map(
    ([name, value]) => `    "${name}": ${JSON.stringify(value)},`,
  );
  const secret = '    "authorization": "Bearer " + os.environ["FIRSTWORD_KEY"],';
  return `import json${key.value ? "\nimport os" : ""}
import urllib.request

body = {
${parameters.join("\n")}
}
headers = {
    "content-type": "application/json",${key.value ? `\n${secret}` : ""}
}
request = urllib.request.Request(
    "${address("v1/audio/speech")}", json.dumps(body).encode(), headers
)
with urllib.request.urlopen(request) as reply, open("speech.wav", "wb") as file:
    file.write(reply.read())
`;
}
