// What OpenAI's client for Node makes at one server of a fleet, used at another; and the rest of a streamed response.
// Arguments: the servers' URLs, a key, a response, the last event seen of it.
import OpenAI, { toFile } from "openai";

const [here, there, key, response, after] = process.argv.slice(2);
const [one, other] = [here, there].map((url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0, timeout: 60_000 }));

const rest = { numbers: [], text: "", last: null };
for await (const event of await one.responses.retrieve(response, { stream: true, starting_after: Number(after) })) {
  rest.numbers.push(event.sequence_number);
  if (event.type === "response.output_text.delta") rest.text += event.delta;
  rest.last = event.type;
}
const file = await one.files.create({ file: await toFile(Buffer.from("The lighthouse of Omber is green."), "omber.md"), purpose: "assistants" });
const store = await other.vectorStores.create({ name: "lights", file_ids: [file.id] });
while ((await one.vectorStores.retrieve(store.id)).status !== "completed");
const found = async () => (await other.vectorStores.search(store.id, { query: "lighthouse" })).data.map((each) => each.filename);
const before = await found();
await one.files.delete(file.id);
console.log(JSON.stringify({ rest, before, gone: await found() }));
