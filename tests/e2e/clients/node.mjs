// Perform the tasks of tasks.json with OpenAI's client for Node and print the results, by task, as one JSON object.
// Arguments: the server's URL and a key.
import { readFileSync } from "node:fs";
import OpenAI, { toFile } from "openai";

const [url, key] = process.argv.slice(2);
const tasks = JSON.parse(readFileSync(new URL("tasks.json", import.meta.url)));
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0, timeout: 60_000 });
const base = { model: tasks.model, messages: [{ role: "user", content: tasks.question }], ...tasks.sampling };
const long = { ...base, max_tokens: tasks.schema_tokens };
const tools = [{ type: "function", function: tasks.tool }];
const named = { type: "function", function: { name: tasks.tool.name } };

const done = {
  async models() {
    const ids = [];
    for await (const model of client.models.list()) ids.push(model.id);
    return ids;
  },
  async whole() {
    const answer = await client.chat.completions.create(base);
    const [choice] = answer.choices;
    return { text: choice.message.content, reason: choice.finish_reason, usage: answer.usage.completion_tokens };
  },
  async streamed() {
    let text = "", reason = null, usage = null;
    const stream = await client.chat.completions.create({ ...base, stream: true, stream_options: { include_usage: true } });
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      reason = chunk.choices[0]?.finish_reason ?? reason;
      usage = chunk.usage?.completion_tokens ?? usage;
    }
    return { text, reason, usage };
  },
  async schema() {
    const format = { type: "json_schema", json_schema: { name: "place", strict: true, schema: tasks.schema } };
    const answer = await client.chat.completions.create({ ...long, response_format: format });
    return answer.choices[0].message.content;
  },
  async tool() {
    const answer = await client.chat.completions.create({ ...long, tools, tool_choice: named });
    const call = answer.choices[0].message.tool_calls[0];
    return { name: call.function.name, arguments: call.function.arguments };
  },
  async tool_streamed() {
    const stream = client.chat.completions.stream({ ...long, tools, tool_choice: named });
    const answer = await stream.finalChatCompletion();
    const call = answer.choices[0].message.tool_calls[0];
    return { name: call.function.name, arguments: call.function.arguments };
  },
  async logprobs() {
    const answer = await client.chat.completions.create({ ...base, logprobs: true, top_logprobs: 3 });
    return answer.choices[0].logprobs.content.map((each) => [each.logprob, each.bytes, each.top_logprobs.length]);
  },
  async completions() {
    const { messages, ...sampling } = base;
    const answer = await client.completions.create({ ...sampling, prompt: tasks.question });
    return answer.choices[0].text;
  },
  async embeddings() {
    const answer = await client.embeddings.create({ model: tasks.embedder, input: tasks.texts });
    return answer.data.map((each) => each.embedding);
  },
  async responses() {
    const body = { model: tasks.model, input: tasks.question, ...tasks.response };
    const whole = await client.responses.create(body);
    const again = await client.responses.retrieve(whole.id);
    let text = "", numbers = [], id = null;
    for await (const event of await client.responses.create({ ...body, stream: true })) {
      numbers.push(event.sequence_number);
      if (event.type === "response.created") id = event.response.id;
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    const kept = await client.responses.retrieve(id);
    await client.responses.delete(id);
    const gone = await client.responses.retrieve(id).then(() => false, (error) => error.status === 404);
    return { text: whole.output_text, again: again.output_text, streamed: text, kept: kept.output_text, numbers, gone };
  },
  async files() {
    const file = await client.files.create({ file: await toFile(Buffer.from(tasks.file), "omber.md"), purpose: "assistants" });
    const store = await client.vectorStores.create({ name: "lights" });
    const added = await client.vectorStores.files.createAndPoll(store.id, { file_id: file.id }, { pollIntervalMs: 50 });
    const found = [];
    for await (const each of client.vectorStores.search(store.id, { query: tasks.search })) found.push(each);
    const content = await (await client.files.content(file.id)).text();
    const listed = [];
    for await (const each of client.files.list()) listed.push(each.id);
    await client.vectorStores.delete(store.id);
    await client.files.delete(file.id);
    return { status: added.status, text: found[0].content[0].text, name: found[0].filename, content, listed: listed.includes(file.id) };
  },
  async refusal() {
    try {
      await client.chat.completions.create({ ...base, model: "nobody" });
    } catch (error) {
      return { kind: error.constructor.name, status: error.status, code: error.code, named: !!error.requestID };
    }
  },
};

const said = {};
for (const [name, task] of Object.entries(done)) said[name] = await task();
console.log(JSON.stringify(said));
