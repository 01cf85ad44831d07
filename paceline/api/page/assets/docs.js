// The page /docs: examples with this server's address, and the list of its routes from openapi.json.

import { request } from "./api.js";
import { make } from "./elements.js";

const base = new URL("v1", document.baseURI).href;
const question = "When does the museum open?";

function examples(model) {
  const body = JSON.stringify({ model, stream: true, messages: [{ role: "user", content: question }] });
  document.getElementById("base").textContent = base;
  document.getElementById("curl").textContent =
    `curl -N ${base}/chat/completions \\\n  -H 'Content-Type: application/json' \\\n  -H 'Authorization: Bearer KEY' \\\n  -d '${body.replaceAll("'", "'\\''")}'`;
  document.getElementById("python").textContent =
    `from openai import OpenAI\n\nclient = OpenAI(base_url="${base}", api_key="KEY")\nanswer = client.chat.completions.create(\n` +
    `    model=${JSON.stringify(model)},\n    messages=[{"role": "user", "content": ${JSON.stringify(question)}}],\n)\nprint(answer.choices[0].message.content)`;
}

function routes(description) {
  const rows = Object.entries(description.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, { summary }]) =>
      make("tr", {}, make("td", { textContent: `${method.toUpperCase()} ${path}` }), make("td", { textContent: summary })),
    ),
  );
  document.getElementById("routes").replaceChildren(...rows);
}

examples("MODEL");
try {
  const { data } = await request("v1/models");
  examples(data[0]?.id ?? "MODEL");
  routes(await request("openapi.json"));
} catch (error) {
  document.getElementById("told").append(make("span", { className: "error", textContent: ` ${error.message}` }));
}
