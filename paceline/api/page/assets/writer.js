// Writing an answer from the events of /v1/responses. A kept answer is written by the server whether anybody reads or not:
// after a cut connection, a reload or in another browser the events are read from where this copy of it ends.

import { ApiError, begin, passing, request, resume } from "./api.js";
import { newAnswer } from "./conversation.js";
import { LANES, NONE } from "./run.js";

const TRIES = 6; // to read on
const FIRST_MS = 300;

/** Ask, or with no body read on, and bring what comes into `answer`; `changed` is called after each event. Never raises:
 * `answer.state` tells. kept: the server goes on by itself. most: how often reading on is tried again. */
export async function writeAnswer(answer, body, { kept, signal, changed, most = TRIES }) {
  Object.assign(answer, { state: "writing", error: "", status: 0 });
  let events = body ? begin(body, signal) : resume(answer.response, answer.sequence, signal);
  for (let tries = 0; ; tries += 1) {
    try {
      for await (const event of events) {
        take(answer, event);
        tries = 0;
        changed();
      }
      if (answer.state !== "writing") break;
      throw new ApiError("The connection was cut in mid-answer.");
    } catch (error) {
      if (signal.aborted) answer.state = "stopped";
      if (answer.state !== "writing") break;
      if (error.status === 404 && answer.response) answer.state = "cut";
      else if (!answer.response || !kept) Object.assign(answer, { state: "failed", error: error.message, status: error.status ?? 0 });
      else if (!passing(error) || tries >= most) Object.assign(answer, { state: "unread", error: error.message, status: error.status ?? 0 });
      if (answer.state !== "writing") break;
    }
    await new Promise((resolve) => setTimeout(resolve, FIRST_MS * 2 ** tries));
    events = resume(answer.response, answer.sequence, signal);
  }
  delete answer.began;
  changed();
}

/** Bring what the server has of an ended answer beside its text into it. False where that cannot be read now. */
export async function readRest(answer) {
  const whole = { ...newAnswer(), response: answer.response };
  await writeAnswer(whole, null, { kept: true, signal: new AbortController().signal, changed: () => {}, most: 0 });
  if (whole.state === "unread") return false;
  answer.bare = false;
  if (whole.state !== "cut" && answer.text.endsWith(whole.text)) { // otherwise it has expired: its text is here
    const { lanes, thought, steps, calls, finish, error, report, usage, model } = whole;
    Object.assign(answer, { lanes: lanes.padStart(answer.text.length, NONE), thought, steps, calls, finish, error, report, usage, model });
  }
  return true;
}

/** End an answer that the server goes on with. */
export function cancelAnswer(answer) {
  return request(`v1/responses/${answer.response}/cancel`, { method: "POST" });
}

function take(answer, event) {
  answer.sequence = event.sequence_number ?? answer.sequence;
  switch (event.type) {
    case "response.created":
      answer.response = event.response.id;
      break;
    case "response.output_text.delta":
      answer.began ??= performance.now();
      answer.text += event.delta;
      answer.lanes += (LANES[event.paceline?.lane] ?? NONE).repeat(event.delta.length);
      break;
    case "response.reasoning_text.delta":
      answer.thought += event.delta;
      break;
    case "response.reasoning_summary_text.delta":
      answer.steps.push(event.delta.trim());
      break;
    case "response.output_item.done":
      if (event.item.type === "function_call") answer.calls.push({ name: event.item.name, arguments: event.item.arguments });
      break;
    case "response.completed":
    case "response.incomplete":
    case "response.failed":
      end(answer, event.response);
  }
}

function end(answer, { model = "", status, usage, error, incomplete_details: why, paceline }) {
  answer.model ||= model;
  answer.report = paceline ?? null;
  answer.usage = usage ?? null;
  if (why?.reason === "max_output_tokens") answer.finish = "length";
  if (answer.began) answer.seconds = (performance.now() - answer.began) / 1000;
  answer.state = { cancelled: "stopped", failed: "failed" }[status] ?? "done";
  answer.error = error?.message ?? "";
}
