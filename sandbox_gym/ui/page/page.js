// Asks once a second, and tells the two halves what is new.

const token = new URLSearchParams(location.search).get("token");
let state = { version: null, nodes: [] };
let skew = 0; // seconds that the server's clock is ahead
let version = null; // of the story that is shown
let busy = false, again = false;
const now = () => Date.now() / 1000 + skew;

async function ask(path, body, form = "json") {
  const options = { headers: { "X-Token": token } };
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  const answer = await fetch(path, options);
  if (!answer.ok) throw new Error(await answer.text());
  return answer[form]();
}

const tree = new Tree(choose);
const chosen = new Chosen(ask, choose);

function choose(id) {
  version = null;
  chosen.begin(id);
  history.replaceState(null, "", `#${encodeURIComponent(id)}`);
  tree.select(id);
  look();
}

async function look() {
  if (busy) { again = true; return; }
  busy = true;
  try {
    const news = await ask(`/state?version=${state.version}`);
    skew = news.now - Date.now() / 1000;
    if (news.nodes) {
      const another = state.version !== null && news.opened !== state.opened; // log, whose events have the old one's numbers
      state = news;
      if (another && tree.selected !== null) choose(tree.selected);
      tree.show(state.nodes);
      count();
    } else tree.tick();
    await lookAtChosen();
    lamp("live", "yes");
  } catch (error) {
    lamp(error instanceof TypeError ? "sandbox-gym ui has ended, or can't be reached" : error.message, "no");
  } finally {
    busy = false;
  }
  if (again) { again = false; look(); }
}

async function lookAtChosen() {
  const id = tree.selected;
  if (id === null) return;
  const node = tree.nodes.get(id);
  if (node) chosen.show(node, tree.nodes, state);
  else if (chosen.node && chosen.node.id === id) chosen.show({ ...chosen.node, state: "gone", can_end: false, ended: chosen.node.ended || now() }, tree.nodes, state);
  else return;
  if (!state.logging) return;
  const story = await ask(`/story?sandbox=${encodeURIComponent(id)}&version=${version}`);
  if (story.events && tree.selected === id) {
    version = story.version;
    await chosen.tell(story);
  }
}

function count() {
  const live = state.nodes.filter(node => tree.isLive(node));
  const frozen = live.filter(node => node.state === "snapshot").length;
  const bytes = live.reduce((sum, node) => sum + node.memory_bytes, 0);
  const more = state.left_out ? `, and ${state.left_out} more` : "";
  put(at("counts"), `${live.length - frozen} running \u00b7 ${frozen} snapshots \u00b7 ${size(bytes)}${more}`);
}

function lamp(text, on) {
  put(at("lamp"), text);
  mark(at("lamp"), "data-on", on);
}

at("end").addEventListener("click", () => {
  put(at("sure-name"), chosen.node.name);
  put(at("sure-problem"), "");
  at("sure").dataset.id = chosen.node.id;
  at("sure").showModal();
});
at("sure-no").addEventListener("click", () => at("sure").close());
at("sure-yes").addEventListener("click", async () => {
  try {
    await ask("/terminate", { id: at("sure").dataset.id });
    at("sure").close();
  } catch (error) {
    put(at("sure-problem"), error.message);
  }
  look();
});

const wanted = decodeURIComponent(location.hash.slice(1));
if (wanted) choose(wanted);
look();
setInterval(() => document.hidden || look(), 1000);
document.addEventListener("visibilitychange", () => document.hidden || look());
