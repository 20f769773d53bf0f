"""The page itself: one file, no outside resources; texts go in as text, never as HTML."""

from __future__ import annotations

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Which is better?</title>
<style nonce="NONCE">
  :root { color-scheme: light dark; font: 16px/1.45 system-ui, sans-serif; }
  body { max-width: 70rem; margin: 0 auto; padding: 1rem 1.5rem; }
  h1 { font-size: 1.2rem; display: flex; justify-content: space-between; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; font: inherit; margin: 0; }
  #prefix { border-left: 3px solid #8888; padding-left: .8rem; opacity: .85; }
  #sides { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; margin: 1rem 0; }
  .side { border: 1px solid #8886; border-radius: .5rem; padding: .8rem; }
  button { font: inherit; padding: .5rem 1rem; border-radius: .4rem; border: 1px solid #8888; cursor: pointer; }
  #bar { display: flex; gap: .8rem; }
  #bar button { flex: 1; }
  #bar #quit { flex: 0 0 auto; }
  .side h2 { font-size: 1rem; margin: 0 0 .5rem; }
  @media (max-width: 40rem) { #sides { grid-template-columns: 1fr; } }
</style>
<h1><span id="title">Which is better?</span><span id="count"></span></h1>
<main id="duel" hidden>
  <pre id="prefix"></pre>
  <div id="sides">
    <section class="side"><h2>A</h2><pre id="a"></pre></section>
    <section class="side"><h2>B</h2><pre id="b"></pre></section>
  </div>
  <div id="bar">
    <button id="choose-a">A is better (&larr;)</button>
    <button id="choose-tie">Alike (space)</button>
    <button id="choose-b">B is better (&rarr;)</button>
    <button id="quit">Quit</button>
  </div>
</main>
<p id="status" role="status">Loading</p>
<script nonce="NONCE">
  const token = new URLSearchParams(location.search).get("token");
  const at = id => document.getElementById(id);
  let number = null, busy = false;

  async function ask(path, body) {
    const options = { headers: { "X-Token": token } };
    if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    const answer = await fetch(path, options);
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }

  function show(duel) {
    const done = Boolean(duel.done);
    at("duel").hidden = done;
    number = done ? null : duel.number;
    if (done) {
      at("title").textContent = duel.problem ? "It ended early" : "Thank you";
      at("count").textContent = "";
      at("status").textContent = `${duel.made} choices are stored. ${duel.problem || "You can close this page."}`;
      return;
    }
    for (const id of ["prefix", "a", "b"]) at(id).textContent = duel[id];
    at("count").textContent = `${duel.number + 1} of ${duel.of}`;
    at("status").textContent = "";
  }

  async function go(path, body) {
    if (busy) return;
    busy = true;
    try {
      show(await ask(path, body));
    } catch (error) {
      at("status").textContent = `That did not work: ${error.message}`;
    } finally {
      busy = false;
    }
  }

  const choose = choice => number === null || go("/choice", { number, choice });
  for (const choice of ["a", "b", "tie"]) at(`choose-${choice}`).addEventListener("click", () => choose(choice));
  at("quit").addEventListener("click", () => go("/quit", {}));
  addEventListener("keydown", event => {
    const choice = { ArrowLeft: "a", ArrowRight: "b", " ": "tie" }[event.key];
    if (!choice || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(choice);
  });
  go("/duel");
</script>
</html>
"""


def page(nonce: str) -> str:
    """`nonce`: what allows its own script and style, and no other."""
    return _PAGE.replace("NONCE", nonce)
