// The chosen sandbox on the right: facts, picture, verdicts, story. What guests have written is set as text alone.

const clock = time => new Date(time * 1000).toTimeString().slice(0, 8);
const precise = time => `${clock(time)}.${String(Math.floor((time % 1) * 1000)).padStart(3, "0")}`;

class Chosen {
  constructor(ask, choose) {
    this.ask = ask;
    this.choose = choose;
    this.node = null;
    this.story = null;
    this.open = new Map(); // events whose whole is shown
    this.lines = new Map(); // by event
    this.drawn = null;
  }

  // Another sandbox: nothing of the last one stays.
  begin(id) {
    this.id = id;
    this.story = this.drawn = null;
    this.open.clear();
    this.lines.clear();
    at("frame-card").hidden = true;
    for (const list of ["story", "verdicts"]) at(list).replaceChildren();
    put(at("no-verdicts"), "");
    put(at("story-note"), "");
  }

  show(node, nodes, state) {
    this.node = node;
    this.nodes = nodes;
    at("empty").hidden = true;
    at("chosen").hidden = false;
    put(at("name"), node.name);
    put(at("state"), node.state);
    mark(at("state"), "data-state", node.state);
    at("end").hidden = !(state.control && node.can_end);
    if (state.lost) put(at("story-note"), "The audit log was deleted or moved away.");
    else if (!state.logging) put(at("story-note"), state.audit ? "The audit log is not there yet." : "No audit log: start with --audit FILE.");
    this.path();
    this.facts();
  }

  path() {
    const above = [];
    for (let each = this.nodes.get(this.node.above); each && above.length < 6; each = this.nodes.get(each.above)) above.unshift(each);
    const key = above.map(each => each.id).join();
    if (at("path").dataset.key === key) return;
    at("path").dataset.key = key;
    at("path").replaceChildren(...above.flatMap(each => {
      const link = make("button", "", each.name);
      link.addEventListener("click", () => this.choose(each.id));
      return [link, " \u203a "];
    }));
  }

  facts() {
    const node = this.node, living = !node.ended;
    const below = [...this.nodes.values()].filter(each => each.above === node.id).length;
    const rows = [
      ["id", node.id],
      [living ? "age" : "lived", span((node.ended || now()) - node.made)],
      ["made", new Date(node.made * 1000).toLocaleString("sv")], // as 2026-11-30 03:53:15
      ["memory", size(node.memory_bytes)],
      ["from", node.parent || (node.branched_from ? "" : "nothing: made new")],
      [node.state === "snapshot" ? "taken of" : "branched from", this.called(node.branched_from)],
      ["below it", below ? String(below) : ""],
      ["steps", node.steps === null ? "" : node.steps.toLocaleString("en")],
      ["client", `process ${node.client}`],
    ].filter(([, value]) => value);
    const list = at("facts");
    while (list.children.length > 2 * rows.length) list.lastElementChild.remove();
    while (list.children.length < 2 * rows.length) list.append(make(list.children.length % 2 ? "dd" : "dt"));
    rows.flat().forEach((text, i) => put(list.children[i], text));
    if (this.drawn) put(at("frame-caption"), this.caption());
  }

  called(id) {
    const node = this.nodes.get(id);
    return !id ? "" : node && node.name !== id ? `${node.name} (${id})` : id;
  }

  async tell(story) {
    this.story = story;
    const verdicts = story.verdicts.slice().reverse();
    at("verdicts").replaceChildren(...verdicts.map(event => this.verdict(event)));
    put(at("no-verdicts"), verdicts.length ? "" : "It has tried to reach nothing.");
    put(at("story-note"), story.events.length >= 400 ? "the last 400 events" : "");
    const pane = at("chosen");
    const follows = pane.scrollHeight - pane.scrollTop - pane.clientHeight < 60 && pane.scrollTop > 0;
    const elements = [];
    let from = null;
    for (const event of story.events) {
      if (from !== null && from !== event.sandbox) elements.push(make("li", "branch", `branched from ${this.called(from)}`));
      from = event.sandbox;
      elements.push(this.line(event));
    }
    if (!elements.length) elements.push(make("li", "quiet", "Nothing is recorded of it."));
    at("story").replaceChildren(...elements);
    if (follows) pane.scrollTop = pane.scrollHeight; // the reader is at the end, where news comes
    await this.picture(story.frame);
  }

  verdict(event) {
    const [said, ...target] = event.text.split(" ");
    const row = make("li");
    row.append(make("span", "pill", said), make("span", "target", target.join(" ")), make("span", "quiet", clock(event.time)));
    row.firstElementChild.dataset.state = said === "allowed" ? "allowed" : "denied";
    if (event.outcome) row.append(make("span", "why", event.outcome));
    return row;
  }

  line(event) {
    let item = this.lines.get(event.id);
    if (!item) {
      item = make("li", event.sandbox === this.story.own ? "" : "inherited");
      const line = make("button", "line");
      line.append(make("span", "when", precise(event.time)), make("span", "kind", event.kind), make("span", "text", event.text), make("span", "outcome"), make("span", "took"));
      line.children[1].dataset.kind = event.kind;
      line.addEventListener("click", () => this.unfold(event.id));
      item.append(line);
      this.lines.set(event.id, item);
    }
    const [, , , outcome, took] = item.firstElementChild.children;
    const unended = event.outcome === null;
    put(outcome, unended ? (this.node.ended || this.node.state === "gone" ? "never ended" : "running") : event.outcome);
    mark(outcome, "data-running", unended ? "yes" : "no");
    mark(outcome, "data-failed", event.failed ? "yes" : "no");
    put(took, event.duration === null ? "" : event.duration < 1 ? `${(event.duration * 1000).toFixed(1)} ms` : `${event.duration.toFixed(2)} s`);
    return item;
  }

  async unfold(id) {
    const item = this.lines.get(id);
    if (this.open.delete(id)) return void item.lastElementChild.remove();
    const event = await this.ask(`/event?id=${id}`);
    const whole = make("dl");
    for (const [name, value] of [[event.kind, event.text], ["sandbox", event.sandbox], ["client", event.client], ...Object.entries(event.result || {})]) {
      if (value === null || value === "") continue;
      whole.append(make("dt", "", name));
      whole.append(make("dd"));
      whole.lastElementChild.append(make("pre", "", typeof value === "string" ? value : JSON.stringify(value)));
    }
    if (item.children.length > 1) item.lastElementChild.remove(); // clicked twice meanwhile
    item.append(whole);
    this.open.set(id, true);
  }

  async picture(frame) {
    if (!frame || (this.drawn && this.drawn.time === frame.time && this.drawn.sandbox === frame.sandbox)) return;
    const id = this.id;
    const blob = await this.ask(`/frame?sandbox=${encodeURIComponent(frame.sandbox)}`, undefined, "blob");
    if (id !== this.id) return;
    const before = at("frame").src;
    at("frame").src = URL.createObjectURL(blob);
    if (before) URL.revokeObjectURL(before);
    this.drawn = frame;
    at("frame-card").hidden = false;
    put(at("frame-caption"), this.caption());
  }

  caption() {
    const whose = this.drawn.sandbox === this.id ? "" : ` by ${this.called(this.drawn.sandbox)}, before it branched`;
    return `drawn ${span(now() - this.drawn.time)} ago${whose}`;
  }
}
