// Claude Code, the Codex CLI, opencode, Qwen Code and Continue's CLI: each asked once through its command. Their prompts are far longer than the
// demonstration's context, so that they ask the model `agents`, which has a long one and writes what it likes.
import { execFileSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const [url, key] = process.argv.slice(2);
const home = mkdtempSync(join(tmpdir(), "agents-")); // not the user's
const modules = new URL("node_modules/", import.meta.url).pathname;

function asked(command, args, environment) {
  const env = { PATH: process.env.PATH, HOME: home, TERM: "xterm", ...environment };
  const options = { cwd: home, env, timeout: 400_000, stdio: ["ignore", "pipe", "pipe"] };
  const said = execFileSync(join(modules, ".bin", command), args, options).toString().trim();
  if (!said) throw new Error("it said nothing");
}

function claudeCode() {
  asked("claude", ["-p", "Say hello.", "--model", "agents"], {
    ANTHROPIC_BASE_URL: url,
    ANTHROPIC_API_KEY: key,
    CLAUDE_CODE_MAX_OUTPUT_TOKENS: "32",
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    DISABLE_AUTOUPDATER: "1",
  });
}

function codex() {
  const provider = `name = "here"\nbase_url = "${url}/v1"\nwire_api = "responses"\nenv_key = "KEY"\n`;
  const config = `model = "agents"\nmodel_provider = "here"\n[model_providers.here]\n${provider}`;
  writeFileSync(join(home, "config.toml"), config);
  asked("codex", ["exec", "--skip-git-repo-check", "-s", "read-only", "Say hello."], { CODEX_HOME: home, KEY: key });
}

function opencode() {
  const models = { agents: { limit: { context: 65536, output: 32 } } };
  const here = { npm: "@ai-sdk/openai-compatible", options: { baseURL: `${url}/v1`, apiKey: key }, models };
  const config = { autoupdate: false, share: "disabled", model: "here/agents", provider: { here } };
  mkdirSync(join(home, ".config/opencode"), { recursive: true });
  writeFileSync(join(home, ".config/opencode/opencode.json"), JSON.stringify(config));
  asked("opencode", ["run", "Say hello."], { OPENCODE_DISABLE_MODELS_FETCH: "1", OPENCODE_DISABLE_LSP_DOWNLOAD: "1" });
}

function qwenCode() {
  const environment = { OPENAI_BASE_URL: `${url}/v1`, OPENAI_API_KEY: key, OPENAI_MODEL: "agents", NO_UPDATE_NOTIFIER: "1" };
  asked("qwen", ["--auth-type", "openai", "-p", "Say hello."], environment);
}

function continueCli() {
  const model = { name: "here", provider: "openai", model: "agents", apiBase: `${url}/v1`, apiKey: key, roles: ["chat"] };
  const options = { defaultCompletionOptions: { maxTokens: 32 } };
  const config = { name: "here", version: "1.0.0", schema: "v1", models: [{ ...model, ...options }] };
  writeFileSync(join(home, "continue.yaml"), JSON.stringify(config)); // JSON is YAML
  asked("cn", ["--config", join(home, "continue.yaml"), "-p", "Say hello."], { CONTINUE_TELEMETRY_ENABLED: "0" });
}

const all = { "Claude Code": claudeCode, Codex: codex, opencode, "Qwen Code": qwenCode, Continue: continueCli };
const checks = {};
for (const [name, check] of Object.entries(all)) {
  try {
    check();
    checks[name] = null;
  } catch (error) {
    checks[name] = String(error.stderr || error.stdout || error).slice(-300);
  }
}
const named = ["@anthropic-ai/claude-code", "@openai/codex", "opencode-ai", "@qwen-code/qwen-code", "@continuedev/cli"];
const versions = named.map(
  (name) => JSON.parse(readFileSync(join(modules, name, "package.json"))).version,
);
console.log(`\n${JSON.stringify({ version: versions.join(", "), checks })}`);
process.exit(0);
