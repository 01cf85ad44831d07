// What the server says of itself without a key: its side, and whether the other one is linked.

import { request } from "./api.js";

const $ = (id) => document.getElementById(id);

/** Show who is linked, as far as the server tells everybody. */
export async function refreshStatus() {
  try {
    const state = await request("readyz");
    const other = state.side === "cloud" ? "device" : "cloud";
    $("status").textContent = state.linked ? `${state.side}, ${other} linked` : `${state.side}, alone`;
    $("status").dataset.linked = String(state.linked);
    $("status").dataset.side = state.side;
    $("status").title = `${state.model}, ${state.documents} documents`;
    $("where").textContent = state.side === "device" ? ": on your device" : ": on the server";
  } catch (error) {
    $("status").textContent = error.status ? "not ready" : "no answer";
    $("status").dataset.linked = "false";
  }
}
