// promptfoo: evaluations through its providers of OpenAI's chat, responses and completions, and of Anthropic's messages.
import { mkdtempSync, readFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const [url, key] = process.argv.slice(2);
process.env.PROMPTFOO_DISABLE_TELEMETRY = "1";
process.env.PROMPTFOO_DISABLE_UPDATE = "1";
process.env.PROMPTFOO_CONFIG_DIR = mkdtempSync(join(tmpdir(), "promptfoo-")); // not the user's
const { default: promptfoo } = await import("promptfoo"); // reads those variables
const QUESTION = "When does the harbour library of Tarnwick open?";
const config = { apiBaseUrl: `${url}/v1`, apiKey: key, temperature: 0, max_tokens: 64 };

async function opened(provider, more = {}) {
  const suite = {
    prompts: [QUESTION],
    providers: [{ id: provider, config: { ...config, ...more } }],
    tests: [{ assert: [{ type: "contains", value: "8:30" }] }],
    writeLatestResults: false,
  };
  const evaluation = await promptfoo.evaluate(suite, { cache: false, showProgressBar: false });
  const { results } = await evaluation.toEvaluateSummary();
  if (!results[0].success) throw new Error(results[0].error ?? JSON.stringify(results[0].response));
}

const checks = {};
for (const [name, check] of Object.entries({
  chat: () => opened("openai:chat:demo"),
  responses: () => opened("openai:responses:demo"),
  "anthropic messages": () => opened("anthropic:messages:demo", { apiBaseUrl: url }),
})) {
  try {
    await check();
    checks[name] = null;
  } catch (error) {
    checks[name] = String(error).slice(0, 300);
  }
}
const { version } = JSON.parse(readFileSync(new URL("node_modules/promptfoo/package.json", import.meta.url)));
console.log(`\n${JSON.stringify({ version, checks })}`);
process.exit(0);
