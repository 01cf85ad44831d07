// One conversation and the answer that is being written in it. Knows requests and events, nothing of the screen.

import { chat } from "./api.js";
import { LANES, NONE } from "./run.js";

const TITLE = 60; // characters

export function newConversation() {
  return { id: crypto.randomUUID?.() ?? randomId(), title: "", updated: Date.now(), messages: [] };
}

/** Where the page came over plain http from another machine, `randomUUID` is missing. */
function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > TITLE ? `${line.slice(0, TITLE)}…` : line;
}

/** An answer before its first token. `state`: writing, done, stopped, failed, cut (by a reload). */
export function newAnswer() {
  return { role: "assistant", text: "", lanes: "", state: "writing", error: "", finish: "", steps: [], report: null, usage: null };
}

/** The body of a request for an answer to these messages. */
export function requestBody(messages, settings, store) {
  const own = { report: true };
  if (settings.strategy) own.strategy = settings.strategy;
  if (settings.privacy) own.privacy = settings.privacy;
  if (!settings.documents) own.documents = 0;
  else if (store) own.vector_stores = ["default", store];
  if (settings.model.includes(":")) own.steps = true; // a workflow, which tells of its stages
  const body = {
    model: settings.model,
    messages: messages.filter(({ text }) => text).map(({ role, text }) => ({ role, content: text })),
    stream: true,
    stream_options: { include_usage: true },
    paceline: own,
  };
  if (settings.temperature !== "") body.temperature = Number(settings.temperature);
  return body;
}

/** Ask, and write what arrives into `answer`; `changed` is called after each event. Never raises: `answer.state` tells. */
export async function writeAnswer(answer, body, signal, changed) {
  try {
    for await (const event of chat(body, signal)) {
      take(answer, event);
      changed();
    }
    answer.state = "done";
  } catch (error) {
    const stopped = error.name === "AbortError";
    answer.state = stopped ? "stopped" : "failed";
    answer.error = stopped ? "" : error.message;
    answer.status = error.status ?? 0;
  }
  changed();
}

function take(answer, event) {
  const { lane, step, ...report } = event.paceline ?? {};
  if (Object.keys(report).length) answer.report = { ...answer.report, ...report };
  if (event.usage) answer.usage = event.usage;
  const choice = event.choices?.[0];
  if (choice?.finish_reason) answer.finish = choice.finish_reason;
  const { content, reasoning_content: reasoning } = choice?.delta ?? {};
  if (step) answer.steps.push(reasoning.trim());
  else if (reasoning) answer.thought = (answer.thought ?? "") + reasoning;
  if (content) {
    answer.text += content;
    answer.lanes += (LANES[lane] ?? NONE).repeat(content.length);
  }
}
