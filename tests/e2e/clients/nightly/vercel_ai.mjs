// Vercel's AI SDK: chat completions, responses and Anthropic's messages; text, streams, a forced tool, objects, embeddings.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateObject, generateText, streamText, tool } from "ai";
import { readFileSync } from "node:fs";
import { z } from "zod";

const [url, apiKey] = process.argv.slice(2);
const prompt = "When does the harbour library of Tarnwick open?";
const compatible = createOpenAICompatible({ name: "paceline", baseURL: `${url}/v1`, apiKey, supportsStructuredOutputs: true });
const models = {
  chat: compatible("demo"),
  responses: createOpenAI({ baseURL: `${url}/v1`, apiKey })("demo"),
  anthropic: createAnthropic({ baseURL: `${url}/v1`, apiKey })("demo"),
};
const place = z.object({ place: z.enum(["harbour", "library"]) });
const hours = tool({ description: "When a place opens.", inputSchema: place });

function opens(text) {
  if (!text.includes("8:30")) throw new Error(text);
}

const ways = {
  text: async (model) => opens((await generateText({ model, prompt })).text),
  stream: async (model) => {
    let text = "";
    for await (const piece of streamText({ model, prompt }).textStream) text += piece;
    opens(text);
  },
  tool: async (model) => {
    const forced = { type: "tool", toolName: "hours" };
    const { toolCalls } = await generateText({ model, prompt, tools: { hours }, toolChoice: forced });
    place.parse(toolCalls[0].input);
  },
  object: async (model) => place.parse((await generateObject({ model, prompt, schema: place })).object),
};

const checks = {};
async function tried(name, run) {
  try {
    await run();
    checks[name] = null;
  } catch (error) {
    checks[name] = String(error).slice(0, 300).replaceAll("\n", " ");
  }
}
for (const [name, model] of Object.entries(models))
  for (const [way, run] of Object.entries(ways)) await tried(`${name} ${way}`, () => run(model));
await tried("embed", () => embed({ model: compatible.textEmbeddingModel("all-MiniLM-L6-v2"), value: "a" }));
const version = JSON.parse(readFileSync(new URL("node_modules/ai/package.json", import.meta.url))).version;
console.log(JSON.stringify({ version, checks }));
