// The window explorer. All verdicts were computed when the book was built; this file looks them up and draws.
"use strict";

(() => {
  const data = window.EXPLORER;
  const root = document.getElementById("explorer");
  if (!data) {
    root.hidden = false;
    root.textContent = "The explorer's data did not load: explorer-data.js is missing beside this page. Build the book again.";
    return;
  }
  const part = (name) => document.getElementById(`explorer-${name}`);
  const COLOURS = {
    damaged: "var(--damaged)", strengthened: "var(--strengthened)", unchanged: "var(--unchanged)",
    inconclusive: "var(--inconclusive)", "not testable": "var(--untestable)",
  };
  const READS = {
    hex: "the whole secret", preamble: "the words before it", suffix: "what follows it",
    hit_full: "the whole answer, decoded freely", hit_secret: "the secret anywhere in the answer",
    hit_forced: "the secret behind the true preamble",
  };
  const SPAN_NAMES = { preamble: "preamble", hex: "secret", suffix: "suffix" };
  const state = { group: data.groups[0].id, modality: "text", k: data.window };

  function element(name, attributes = {}, text = "") {
    const svg = ["svg", "g", "rect", "line", "circle", "text", "title"].includes(name);
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return made;
  }

  function fillMenu() {
    for (const kind of new Set(data.groups.map((group) => group.kind))) {
      const part_of = element("optgroup", { label: kind });
      for (const group of data.groups.filter((one) => one.kind === kind)) {
        part_of.append(element("option", { value: group.id }, group.label));
      }
      part("group").append(part_of);
    }
  }

  const chosen = () => data.groups.find((group) => group.id === state.group);
  const view = () => chosen()?.modalities[state.modality];
  const nats = (value) => (Math.abs(value) < 0.00005 ? "0" : value.toFixed(Math.abs(value) < 0.1 ? 4 : 2));

  function say(record) {
    const patterns = record.shown.map((name) => name.replaceAll("_", " "));
    part("said").textContent = `K = ${state.k}: the window says ${record.verdict}, the whole secret `
      + `${view().probes.hex.verdict}, the protocol “${view().protocol}”. `
      + (patterns.length ? `The paper's pattern shows: ${patterns.join(", ")}.` : "None of the paper's patterns shows.");
    part("patterns").textContent = `Window of ${state.k}: ${record.up} canaries lost more than the margin of `
      + `${nats(record.margin)} nats over it, ${record.down} gained more.`;
  }

  function tableRow(name, reads, record, unit, moves) {
    const row = element("tr", moves ? { class: "moves", "data-probe": "window" } : { "data-probe": name });
    const badge = element("span", { class: "verdict", "data-verdict": record.verdict }, record.verdict);
    const measured = record.estimate === null ? "–"
      : `${nats(record.estimate)} (${nats(record.low)} to ${nats(record.high)}) ${unit}`;
    const verdict = element("td");
    verdict.append(badge);
    row.append(element("th", { scope: "row" }, name), element("td", {}, reads), verdict,
      element("td", {}, measured), element("td", {}, record.by));
    return row;
  }

  function fillTable(record) {
    const body = part("verdicts").querySelector("tbody");
    const fixed = Object.entries(view().probes).map(([name, one]) => tableRow(
      name, READS[name] ?? "", one, name.startsWith("hit") ? "of canaries" : "nats a token", false));
    const moving = tableRow(`window of ${state.k}`, `the first ${state.k} tokens`, record, "nats in all", true);
    body.replaceChildren(moving, ...fixed);
  }

  const LEFT = 56, RIGHT = 10, TOP = 30, BOTTOM = 260;

  function draw() {
    const { spans, changes, windows } = view();
    const chart = part("chart"), count = spans.length;
    const width = Math.max(300, Math.min(760, chart.parentElement.clientWidth || 760)); // letters keep their size
    const column = (width - LEFT - RIGHT) / count;
    const all = changes.flat();
    const high = Math.max(...all, 0.01) * 1.08, low = Math.min(...all, -0.01) * 1.08;
    const x = (position) => LEFT + position * column;
    const y = (value) => TOP + ((high - value) / (high - low)) * (BOTTOM - TOP);
    chart.setAttribute("viewBox", `0 0 ${width} ${BOTTOM + 46}`);
    const drawn = [element("rect", { class: "window", x: x(0), y: TOP, width: state.k * column, height: BOTTOM - TOP,
      fill: "var(--color-brand-primary)", opacity: 0.12 })];
    spans.forEach((span, position) => {
      if (position && spans[position - 1] === span) return;
      const length = spans.filter((other) => other === span).length;
      drawn.push(element("rect", { x: x(position), y: TOP - 8, width: length * column - 1, height: 6,
        fill: `var(--${span})` }));
      drawn.push(element("text", { x: x(position) + 2, y: TOP - 12 }, SPAN_NAMES[span] ?? span));
    });
    for (const value of [high / 1.08, 0, low / 1.08]) {
      if (value !== 0 && Math.abs(y(value) - y(0)) < 14) continue; // its label would lie on that of zero
      drawn.push(element("line", { class: "axis", x1: LEFT - 4, x2: value === 0 ? width - RIGHT : LEFT,
        y1: y(value), y2: y(value) }));
      drawn.push(element("text", { x: LEFT - 7, y: y(value) + 4, "text-anchor": "end" },
        value === 0 ? "0" : value.toPrecision(3)));
    }
    for (let position = 0; position < count; position += 1) {
      const column_values = changes.map((canary) => canary[position]);
      const mean = column_values.reduce((sum, value) => sum + value, 0) / column_values.length;
      drawn.push(element("rect", { x: x(position) + column * 0.15, width: column * 0.7, y: Math.min(y(mean), y(0)),
        height: Math.abs(y(mean) - y(0)), fill: mean > 0 ? "var(--damaged)" : "var(--strengthened)", opacity: 0.55 }));
      column_values.forEach((value, canary) => drawn.push(element("circle", { // side by side, so that equal ones can be told
        cx: x(position) + column * (0.15 + (0.7 * (canary + 0.5)) / column_values.length), cy: y(value), r: 2,
        fill: "var(--color-foreground-primary)", opacity: 0.5 })));
      const verdict = windows[position].verdict;
      const square = element("rect", { x: x(position) + 1, y: BOTTOM + 24, width: column - 2, height: 16, fill: COLOURS[verdict] });
      square.append(element("title", {}, `K = ${position + 1}: ${verdict}`));
      drawn.push(square);
      if (column > 14) { // the verdict's first letter, for whom colours do not tell it
        drawn.push(element("text", { class: "letter", x: x(position) + column / 2, y: BOTTOM + 36, "text-anchor": "middle" },
          verdict[0].toUpperCase()));
      }
      if (position % 5 === 0) {
        drawn.push(element("text", { x: x(position) + column / 2, y: BOTTOM + 16, "text-anchor": "middle" },
          String(position)));
      }
    }
    drawn.push(element("line", { x1: x(state.k), x2: x(state.k), y1: TOP - 8, y2: BOTTOM + 42,
      stroke: "var(--color-brand-content)", "stroke-width": 2 }));
    drawn.push(element("text", { x: LEFT - 7, y: BOTTOM + 36, "text-anchor": "end" }, "verdict"));
    drawn.push(element("text", { x: 4, y: 12 }, "nats"));
    chart.replaceChildren(...drawn);
    const first = windows.findIndex((one) => one.verdict === "damaged") + 1;
    part("caption").textContent = `${chosen().label}, ${state.modality} canaries: change of every token's NLL, `
      + "by its position in the answer, and the verdict of the window that ends there; "
      + (first ? `the window first says damaged at K = ${first}.` : "no window says damaged.");
  }

  function show() {
    const found = view();
    for (const radio of document.getElementsByName("explorer-modality")) radio.checked = radio.value === state.modality;
    part("group").value = chosen() ? state.group : "";
    part("found").hidden = !found;
    part("k").disabled = !found;
    if (!found) {
      part("k-shown").textContent = "–";
      part("said").textContent = `No data for this cell: ${chosen()?.label ?? state.group}, ${state.modality} canaries. Choose another one.`;
      return;
    }
    part("k").max = found.windows.length;
    state.k = Math.min(Math.max(1, Math.round(state.k) || data.window), found.windows.length);
    part("k").value = state.k;
    part("k-shown").textContent = state.k;
    const record = found.windows[state.k - 1];
    part("k").setAttribute("aria-valuetext", `${state.k} tokens: ${record.verdict}`);
    say(record);
    fillTable(record);
    draw();
  }

  function fromAddress() {
    const asked = new URLSearchParams(location.hash.slice(1));
    state.group = asked.get("cell") ?? state.group;
    state.modality = asked.get("canaries") ?? state.modality;
    state.k = Number(asked.get("k") ?? state.k);
    show();
  }

  function change(update) {
    Object.assign(state, update);
    show();
    clearTimeout(change.later); // browsers refuse an address that changes too often
    change.later = setTimeout(() => history.replaceState(null, "",
      `#${new URLSearchParams({ cell: state.group, canaries: state.modality, k: state.k })}`), 200);
  }

  fillMenu();
  part("group").addEventListener("change", (event) => change({ group: event.target.value }));
  part("k").addEventListener("input", (event) => change({ k: Number(event.target.value) }));
  for (const radio of document.getElementsByName("explorer-modality")) {
    radio.addEventListener("change", (event) => change({ modality: event.target.value }));
  }
  window.addEventListener("hashchange", fromAddress);
  window.addEventListener("resize", () => view() && draw());
  root.hidden = false;
  fromAddress();
})();
