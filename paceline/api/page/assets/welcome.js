// What is shown before anything is asked: what this side can read, by name, and questions that its documents answer.

import { icon, make } from "./elements.js";
import { t } from "./text.js";

const QUESTIONS = 3;
const NAMES = 8;

/** server: what /readyz says. documents: what /v1/documents says, or null. ask: is called with a question. */
export function welcome({ server, documents, ask }) {
  const side = t(server.side);
  const other = t(server.side === "cloud" ? "device" : "cloud");
  const total = documents?.total ?? 0;
  const parts = [make("h2", { textContent: t("welcome") })];
  if (documents) {
    const count = total === 1 ? t("readsOne", { side }) : t(total ? "readsHere" : "readsNone", { side, count: total });
    const link = t(server.linked ? "otherLinked" : "otherAlone", { side: other });
    parts.push(make("p", { className: "dim" }, total ? `${count}${server.linked ? ", " : "; "}${link}.` : count));
    const names = documents.data.slice(0, NAMES).map(({ name, topic }) => make("li", { title: topic }, icon("file"), make("span", { textContent: name })));
    if (total > NAMES) names.push(make("li", { textContent: t("andMore", { count: total - NAMES }) }));
    parts.push(make("ul", { className: "names" }, ...names));
  }
  const cards = questionsOf(documents?.data ?? []).map(({ question, name }) => {
    const card = make("button", { type: "button", onclick: () => ask(question) });
    card.append(make("span", { textContent: question }), make("small", { textContent: name }));
    return card;
  });
  parts.push(make("div", { className: "suggestions" }, ...cards));
  const legend = make("p", { className: "legend" },
    make("span", { className: "lane-cloud", textContent: t("fromCloud") }), make("span", { className: "lane-device", textContent: t("fromDevice") }));
  return make("div", { className: "welcome" }, ...parts, legend);
}

/** One question each of different documents, those first that are made from a sentence. */
function questionsOf(data) {
  const made = data.filter(({ question }) => question);
  const others = data.filter(({ question }) => !question).map(({ name, topic }) => ({
    name, question: topic === name ? t("askWhat", { name }) : t("askAbout", { name, topic }),
  }));
  return [...made, ...others].slice(0, QUESTIONS);
}
