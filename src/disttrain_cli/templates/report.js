"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("timeline");
  if (!canvas || !data.timelines.length) return;
  const pen = canvas.getContext("2d"), lanes = document.getElementById("lanes"), tip = document.getElementById("tip");
  const kindOf = name => name.startsWith("receive") ? "receive" : name.startsWith("send") || name === "wait" ? "send"
    : ["forward", "backward", "load", "reduce", "step"].includes(name) ? name : "other";
  const axis = 24;
  let step, from, to, laneHeight, drag = null;

  const colours = () => {
    const style = getComputedStyle(document.documentElement), out = {};
    for (const name of ["forward", "backward", "load", "receive", "send", "reduce", "step", "other", "line", "soft", "onbar", "ink", "card"])
      out[name] = style.getPropertyValue("--" + name).trim();
    return out;
  };
  const clock = us => us >= 1e6 ? (us / 1e6).toFixed(2) + " s" : us >= 1e3 ? (us / 1e3).toFixed(us < 1e4 ? 1 : 0) + " ms" : us.toFixed(0) + " µs";

  function choose(index) {
    step = data.timelines[index];
    document.querySelectorAll("[data-step]").forEach(b => b.setAttribute("aria-pressed", String(Number(b.dataset.step) === index)));
    laneHeight = step.lanes.length <= 16 ? 24 : step.lanes.length <= 64 ? 14 : 9;
    lanes.replaceChildren(...step.lanes.map(([rank, unit, stage, replica], i) => {
      const row = document.createElement("div"), name = document.createElement("b"), place = document.createElement("span");
      row.className = "lane" + (laneHeight < 20 ? " tight" : "") + (i && step.lanes[i - 1][1] !== unit ? " first" : "");
      row.style.height = laneHeight + "px";
      name.textContent = unit;
      place.textContent = "stage " + stage + " · replica " + replica + " · rank " + rank;
      row.append(name, place);
      return row;
    }));
    canvas.style.height = axis + step.lanes.length * laneHeight + "px";
    view(0, step.length_us);
  }

  function view(start, end) {
    const least = Math.max(step.length_us / 2000, 1), size = Math.min(step.length_us, Math.max(least, end - start));
    from = Math.min(Math.max(0, start), step.length_us - size);
    to = from + size;
    canvas.dataset.from = from.toFixed(1);
    canvas.dataset.to = to.toFixed(1);
    draw();
  }
  const zoom = (factor, at = (from + to) / 2) => view(at - (at - from) * factor, at + (to - at) * factor);
  const pan = share => view(from + share * (to - from), to + share * (to - from));

  function draw() {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = axis + step.lanes.length * laneHeight;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const c = colours(), scale = width / (to - from);
    const rough = (to - from) / Math.max(2, width / 110), power = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].map(m => m * power).find(m => m >= rough);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (let t = Math.ceil(from / tick) * tick; t <= to; t += tick) {
      const x = (t - from) * scale;
      pen.fillStyle = c.line;
      pen.fillRect(x, 0, 1, height);
      pen.fillStyle = c.soft;
      pen.fillText(clock(t), x + 4, axis / 2);
    }
    step.lanes.forEach((lane, i) => {
      pen.fillStyle = c.line;
      if (i && step.lanes[i - 1][1] !== lane[1]) pen.fillRect(0, axis + i * laneHeight, width, 1);
    });
    const gap = laneHeight > 12 ? 2 : 1;
    for (const [lane, operation, , slot, start, length] of step.bars) {
      if (start + length < from || start > to) continue;
      const kind = kindOf(step.operations[operation]), waits = kind === "receive";
      const x = Math.max(0, (start - from) * scale), end = Math.min(width, (start + length - from) * scale);
      const size = Math.max(0.6, end - x), y = axis + lane * laneHeight + gap;
      pen.fillStyle = c[kind];
      pen.fillRect(x, y + (waits ? laneHeight * 0.3 : 0), size, laneHeight - 2 * gap - (waits ? laneHeight * 0.6 : 0));
      if (size > 18 && laneHeight > 12 && slot >= 0 && (kind === "forward" || kind === "backward")) {
        pen.fillStyle = c.onbar;
        pen.fillText(String(slot), x + size / 2 - 3, y + laneHeight / 2 - gap);
        pen.fillStyle = c.card;
      }
      if (size > 2) { pen.fillStyle = c.card; pen.fillRect(x + size - 0.7, y, 0.7, laneHeight - 2 * gap); }
    }
  }

  function barAt(event) {
    const box = canvas.getBoundingClientRect(), lane = Math.floor((event.clientY - box.top - axis) / laneHeight);
    const at = from + (event.clientX - box.left) / box.width * (to - from), slack = (to - from) / box.width * 2;
    return step.bars.findLast(b => b[0] === lane && b[4] - slack <= at && at <= b[4] + b[5] + slack);
  }
  canvas.addEventListener("pointermove", event => {
    if (drag) {
      const moved = (drag.x - event.clientX) / canvas.clientWidth * (drag.to - drag.from);
      view(drag.from + moved, drag.to + moved);
    }
    const bar = drag ? null : barAt(event);
    tip.hidden = !bar;
    if (!bar) return;
    const [lane, operation, module, slot, start, length] = bar, [rank, unit, stage, replica] = step.lanes[lane];
    tip.textContent = step.operations[operation].replace("_", " ") + (slot >= 0 ? " · slot " + slot : "")
      + (step.modules[module] ? " · " + step.modules[module] : "") + "\n" + clock(length) + " from " + clock(start)
      + "\n" + unit + " · stage " + stage + " · replica " + replica + " · rank " + rank;
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left;
    tip.style.left = (x > box.width / 2 ? x - tip.offsetWidth - 12 : x + 14) + "px";
    tip.style.top = Math.max(0, event.clientY - box.top + 14) + "px";
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("pointerdown", event => { drag = {x: event.clientX, from, to}; canvas.setPointerCapture(event.pointerId); });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { drag = null; });
  canvas.addEventListener("dblclick", event => {
    const box = canvas.getBoundingClientRect();
    zoom(0.4, from + (event.clientX - box.left) / box.width * (to - from));
  });
  canvas.addEventListener("wheel", event => {
    if (!event.ctrlKey && document.activeElement !== canvas) return;
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / box.width);
    else zoom(Math.exp(event.deltaY * 0.002), from + (event.clientX - box.left) / box.width * (to - from));
  }, {passive: false});
  canvas.addEventListener("keydown", event => {
    const act = {"+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), "0": () => view(0, step.length_us),
      ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), Home: () => view(0, to - from),
      End: () => view(step.length_us - (to - from), step.length_us)}[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  document.querySelectorAll("[data-step]").forEach(b => b.addEventListener("click", () => choose(Number(b.dataset.step))));
  document.getElementById("zoom-in").addEventListener("click", () => zoom(0.6));
  document.getElementById("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
  document.getElementById("zoom-all").addEventListener("click", () => view(0, step.length_us));
  new ResizeObserver(() => draw()).observe(document.getElementById("canvas-box"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", () => { document.documentElement.classList.add("printing"); draw(); });
  addEventListener("afterprint", () => { document.documentElement.classList.remove("printing"); draw(); });
  choose(0);
})();
