"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent), $ = id => document.getElementById(id);
  const folds = document.querySelectorAll("details");
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...folds].filter(fold => !fold.open);
    opened.forEach(fold => { fold.open = true; });
  });
  addEventListener("afterprint", () => opened.forEach(fold => { fold.open = false; }));

  const canvas = $("timeline"), strip = $("strip");
  if (!canvas || !data.timelines.length) return;
  const pen = canvas.getContext("2d"), lanes = $("lanes"), tip = $("tip"), axis = 24, stripHeight = 34;
  const kinds = ["forward", "backward", "weights", "load", "receive", "send", "reduce", "step", "compute", "communication", "memory", "host", "other"];
  let step, bars, count, from, to, laneHeight, drag = null, chosen = -1, lane = 0, busy = [], waiting = 0;

  const colours = () => {
    const style = getComputedStyle(document.documentElement), out = {};
    for (const name of [...kinds, "line", "soft", "onbar", "ink", "card", "accent"]) out[name] = style.getPropertyValue("--" + name).trim();
    return out;
  };
  const clock = us => Math.abs(us) >= 1e6 ? (us / 1e6).toFixed(3) + " s" : Math.abs(us) >= 1e3 ? (us / 1e3).toFixed(us < 1e4 ? 2 : 1) + " ms" : us.toFixed(1) + " µs";
  const kindAt = bar => step.names[bars.name[bar]][1];

  function choose(index) {
    step = data.timelines[index];
    bars = step.bars;
    count = bars.lane.length;
    chosen = -1;
    lane = 0;
    document.querySelectorAll("[data-step]").forEach(b => b.setAttribute("aria-pressed", String(Number(b.dataset.step) === index)));
    $("timeline-note").textContent = step.note;
    laneHeight = step.lanes.length <= 16 ? 24 : step.lanes.length <= 64 ? 14 : 9;
    lanes.replaceChildren(...step.lanes.map(([group, text], i) => {
      const row = document.createElement("div"), name = document.createElement("b"), place = document.createElement("span");
      const first = !i || step.lanes[i - 1][0] !== group;
      row.className = "lane" + (laneHeight < 20 ? " tight" : "") + (laneHeight < 12 ? " tiny" : "") + (i && first ? " first" : "");
      row.style.height = laneHeight + "px";
      name.textContent = first || laneHeight >= 20 ? group : "";
      place.textContent = text;
      row.append(name, place);
      return row;
    }));
    canvas.style.height = axis + step.lanes.length * laneHeight + "px";
    busy = share();
    view(0, step.length_us);
  }

  // Share of the lanes that compute, in 480 parts of the step.
  function share() {
    const parts = new Array(480).fill(0), width = step.length_us / parts.length;
    for (let bar = 0; bar < count; bar++) {
      if (!["forward", "backward", "weights", "compute"].includes(kindAt(bar))) continue;
      const start = bars.start[bar], end = start + bars.length[bar];
      for (let part = Math.max(0, Math.floor(start / width)); part < parts.length && part * width < end; part++)
        parts[part] += Math.max(0, Math.min(end, (part + 1) * width) - Math.max(start, part * width)) / width;
    }
    return parts.map(value => Math.min(1, value / step.lanes.length));
  }

  function view(start, end) {
    const least = Math.max(step.length_us / 20000, 0.5), size = Math.min(step.length_us, Math.max(least, end - start));
    from = Math.min(Math.max(0, start), step.length_us - size);
    to = from + size;
    canvas.dataset.from = from.toFixed(1);
    canvas.dataset.to = to.toFixed(1);
    waiting = waiting || requestAnimationFrame(() => { waiting = 0; draw(); });
  }
  const zoom = (factor, at = (from + to) / 2) => view(at - (at - from) * factor, at + (to - at) * factor);
  const pan = part => view(from + part * (to - from), to + part * (to - from));
  const timeAt = event => {
    const box = canvas.getBoundingClientRect();
    return from + (event.clientX - box.left) / box.width * (to - from);
  };

  function sized(target, height) {
    const ratio = window.devicePixelRatio || 1, width = target.clientWidth, of = target.getContext("2d");
    target.width = Math.round(width * ratio);
    target.height = Math.round(height * ratio);
    of.setTransform(ratio, 0, 0, ratio, 0, 0);
    return width;
  }

  function draw() {
    const height = axis + step.lanes.length * laneHeight, width = sized(canvas, height), c = colours(), scale = width / (to - from);
    const rough = (to - from) / Math.max(2, width / 110), power = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].map(m => m * power).find(m => m >= rough);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (let t = Math.ceil(from / tick) * tick; t <= to; t += tick) {
      const x = (t - from) * scale;
      pen.fillStyle = c.line;
      pen.fillRect(x, 0, 1, height);
      pen.fillStyle = c.soft;
      const label = clock(t), wide = pen.measureText(label).width;
      pen.fillText(label, x + 4 + wide > width ? x - 4 - wide : x + 4, axis / 2);
    }
    pen.fillStyle = c.line;
    step.lanes.forEach(([group], i) => { if (i && step.lanes[i - 1][0] !== group) pen.fillRect(0, axis + i * laneHeight, width, 1); });
    const gap = laneHeight > 12 ? 2 : 1;
    for (let bar = 0; bar < count; bar++) {
      const start = bars.start[bar], length = bars.length[bar];
      if (start + length < from || start > to) continue;
      const kind = kindAt(bar), thin = kind === "receive" ? 0.3 : 0;
      const x = Math.max(0, (start - from) * scale), end = Math.min(width, (start + length - from) * scale);
      const size = Math.max(0.6, end - x), y = axis + bars.lane[bar] * laneHeight + gap, tall = laneHeight - 2 * gap;
      pen.fillStyle = c[kind];
      pen.fillRect(x, y + laneHeight * thin, size, tall - 2 * laneHeight * thin);
      if (size > 18 && laneHeight > 12 && bars.slot[bar] >= 0 && (kind === "forward" || kind === "backward")) {
        pen.fillStyle = c.onbar;
        pen.textAlign = "center";
        pen.fillText(String(bars.slot[bar]), x + size / 2, y + tall / 2 + 0.5);
        pen.textAlign = "left";
      }
      if (size > 2) { pen.fillStyle = c.card; pen.fillRect(x + size - 0.7, y, 0.7, tall); }
    }
    if (document.activeElement === canvas || chosen >= 0) {
      pen.strokeStyle = c.accent;
      pen.lineWidth = 1;
      pen.strokeRect(0.5, axis + lane * laneHeight + 0.5, width - 1, laneHeight - 1);
    }
    if (chosen >= 0) {
      pen.strokeStyle = c.ink;
      pen.lineWidth = 2;
      pen.strokeRect((bars.start[chosen] - from) * scale, axis + bars.lane[chosen] * laneHeight + 1, Math.max(3, bars.length[chosen] * scale), laneHeight - 2);
    }
    if (drag && drag.zooms) {
      pen.fillStyle = c.accent;
      pen.globalAlpha = 0.2;
      pen.fillRect((Math.min(drag.at, drag.now) - from) * scale, axis, Math.abs(drag.now - drag.at) * scale, height);
      pen.globalAlpha = 1;
    }
    drawStrip(c);
  }

  function drawStrip(c) {
    const width = sized(strip, stripHeight), of = strip.getContext("2d"), part = width / busy.length;
    of.fillStyle = c.forward;
    busy.forEach((value, i) => of.fillRect(i * part, stripHeight * (1 - value), part + 0.4, stripHeight * value));
    const left = from / step.length_us * width, right = to / step.length_us * width;
    of.fillStyle = c.card;
    of.globalAlpha = 0.72;
    of.fillRect(0, 0, left, stripHeight);
    of.fillRect(right, 0, width - right, stripHeight);
    of.globalAlpha = 1;
    of.strokeStyle = c.accent;
    of.lineWidth = 2;
    of.strokeRect(left + 1, 1, Math.max(2, right - left - 2), stripHeight - 2);
  }

  function words(bar) {
    const [group, text] = step.lanes[bars.lane[bar]], slot = bars.slot[bar], module = step.modules[bars.module[bar]];
    return [step.names[bars.name[bar]][0] + (slot >= 0 ? " · slot " + slot : "") + (module ? " · " + module : ""),
      clock(bars.length[bar]) + " from " + clock(bars.start[bar]), group + " · " + text];
  }
  function barAt(event) {
    const box = canvas.getBoundingClientRect(), row = Math.floor((event.clientY - box.top - axis) / laneHeight);
    const at = timeAt(event), slack = (to - from) / box.width * 2;
    for (let bar = count - 1; bar >= 0; bar--)
      if (bars.lane[bar] === row && bars.start[bar] - slack <= at && at <= bars.start[bar] + bars.length[bar] + slack) return bar;
    return -1;
  }
  function show(bar, x, y) {
    tip.hidden = bar < 0;
    if (bar < 0) return;
    tip.textContent = words(bar).join("\n");
    tip.style.left = Math.max(0, x > canvas.clientWidth / 2 ? x - tip.offsetWidth - 12 : x + 14) + "px";
    tip.style.top = Math.max(0, y + 14) + "px";
  }

  // The next or previous operation of the chosen lane, or the one of another lane at the same time.
  function walk(by, other) {
    const own = [];
    for (let bar = 0; bar < count; bar++) if (bars.lane[bar] === lane) own.push(bar);
    own.sort((a, b) => bars.start[a] - bars.start[b]);
    if (!own.length) { chosen = -1; draw(); return; }
    const time = other === undefined ? null : other;
    let place = chosen < 0 || time !== null ? own.findIndex(bar => bars.start[bar] + bars.length[bar] > (time ?? from)) : own.indexOf(chosen) + by;
    place = Math.min(own.length - 1, Math.max(0, place < 0 ? own.length - 1 : place));
    chosen = own[place];
    const start = bars.start[chosen], end = start + bars.length[chosen], size = to - from;
    if (end > to || start < from) view(start - size / 3, start + size * 2 / 3); else draw();
    $("said").textContent = words(chosen).join(", ");
    show(chosen, (start - from) / (to - from) * canvas.clientWidth, axis + (lane + 1) * laneHeight);
  }
  function change(by) {
    const time = chosen < 0 ? from : bars.start[chosen] + bars.length[chosen] / 2;
    lane = Math.min(step.lanes.length - 1, Math.max(0, lane + by));
    walk(0, time);
  }

  canvas.addEventListener("pointermove", event => {
    if (drag && drag.zooms) { drag.now = timeAt(event); draw(); return; }
    if (drag) {
      const moved = (drag.x - event.clientX) / canvas.clientWidth * (drag.to - drag.from);
      view(drag.from + moved, drag.to + moved);
    }
    const box = canvas.getBoundingClientRect();
    show(drag ? -1 : barAt(event), event.clientX - box.left, event.clientY - box.top);
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("pointerdown", event => {
    drag = {x: event.clientX, from, to, zooms: event.shiftKey, at: timeAt(event), now: timeAt(event)};
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => {
    const done = drag;
    drag = null;
    if (done && done.zooms && done.now !== done.at) view(Math.min(done.at, done.now), Math.max(done.at, done.now));
  });
  canvas.addEventListener("pointercancel", () => { drag = null; draw(); });
  canvas.addEventListener("dblclick", event => zoom(0.4, timeAt(event)));
  canvas.addEventListener("wheel", event => {
    if (!event.ctrlKey && document.activeElement !== canvas) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / canvas.clientWidth);
    else zoom(Math.exp(event.deltaY * 0.002), timeAt(event));
  }, {passive: false});
  canvas.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {"+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), "0": () => view(0, step.length_us),
      ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), ArrowUp: () => change(-1), ArrowDown: () => change(1),
      n: () => walk(1), p: () => walk(-1), Home: () => view(0, to - from), End: () => view(step.length_us - (to - from), step.length_us),
      Escape: () => { chosen = -1; tip.hidden = true; draw(); }}[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (act) { event.preventDefault(); act(); }
  });
  canvas.addEventListener("focus", () => draw());
  canvas.addEventListener("blur", () => { chosen = -1; tip.hidden = true; draw(); });
  const centre = event => {
    const box = strip.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * step.length_us, half = (to - from) / 2;
    view(at - half, at + half);
  };
  strip.addEventListener("pointerdown", event => { strip.setPointerCapture(event.pointerId); centre(event); });
  strip.addEventListener("pointermove", event => { if (event.buttons) centre(event); });
  document.querySelectorAll("[data-step]").forEach(b => b.addEventListener("click", () => choose(Number(b.dataset.step))));
  $("zoom-in").addEventListener("click", () => zoom(0.6));
  $("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
  $("zoom-all").addEventListener("click", () => view(0, step.length_us));
  new ResizeObserver(() => draw()).observe($("canvas-box"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", () => { document.documentElement.classList.add("printing"); draw(); });
  addEventListener("afterprint", () => { document.documentElement.classList.remove("printing"); draw(); });
  choose(0);
  draw();
})();
