// Pipeline schedules, as in pipeline.py and zero_bubble.py, and the page that steps through them.
"use strict";

const repeat = (n, f) => [...Array(n).keys()].map(f);

function zbH1(reach, { add, r, p, m }) {
  const ahead = Math.min(reach * (p - 1 - r), m), deferred = Math.min(reach * r, m);
  add("F", ahead, r);
  repeat(m, (i) => add((i < m - ahead ? "FI" : "I") + (i >= deferred ? "W" : ""), 1, r));
  add("W", deferred, r);
}

// {name: what fills the row of rank r of p}. add("FB", n, stage, ...) appends n times the stage's
// next forward and its next backward.
const SCHEDULES = {
  gpipe: ({ add, r, m }) => ["F", "B"].forEach((kind) => add(kind, m, r)),
  "1f1b": ({ add, r, p, m }) => {
    const ahead = Math.min(p - 1 - r, m);
    add("F", ahead, r), add("FB", m - ahead, r), add("B", ahead, r);
  },
  interleaved: ({ add, r, p, m, chunks }) => {
    if (m % p) throw Error(`interleaved needs a multiple of ${p} micro-batches, the number of ranks`);
    const stages = repeat(m * chunks, (i) => r + (Math.floor(i / p) % chunks) * p);
    const backwards = stages.map((stage) => 2 * r + (chunks - 1) * p - stage);
    const ahead = Math.min((chunks - 1) * p + 2 * (p - 1 - r), stages.length);
    add("F", 1, ...stages.slice(0, ahead));
    stages.slice(ahead).forEach((stage, i) => (add("F", 1, stage), add("B", 1, backwards[i])));
    add("B", 1, ...backwards.slice(stages.length - ahead));
  },
  "zb-h1": (options) => zbH1(1, options),
  "zb-h2": (options) => zbH1(2, options),
  "zb-v": ({ add, count, r, p, m }) => {
    const near = r, far = 2 * p - 1 - r, padded = Math.max(m, 2 * p - 1);
    add("F", 2 * (p - r) - 1, near);
    repeat(r, () => add("F", 1, far, near));
    add("FIW", p - r, far);
    while (count("F", far) < padded) {
      if (count("F", near) < padded) add("F", 1, near);
      add("IW", 1, near), add("FIW", 1, far);
    }
    repeat(r, () => add("I", 1, near, far));
    add("IW", p - r, near);
    for (const stage of [far, near]) add("W", padded - count("W", stage), stage);
  },
  dualpipev: ({ add, r, p, m }) => {
    const enough = `at least ${2 * p} micro-batches, twice as many as ranks`;
    if (m < 2 * p) throw Error(`dualpipev needs ${enough}`);
    const near = r, far = 2 * p - 1 - r, later = p - 1 - r;
    add("F", 2 * later, near);
    repeat(r + 1, () => add("F", 1, near, far));
    add("IWF", later, far);
    repeat(m - 2 * p + r + 1, () => (add("F", 1, near), add("BF", 1, far), add("B", 1, near)));
    repeat(later, () => (add("BF", 1, far), add("B", 1, near)));
    const sides = repeat(2 * r + 2, (i) => (i % 2 ? near : far)), split = sides.splice(r + 1);
    const waiting = [...split, ...repeat(later, () => near)];
    add("B", 1, ...sides), add("I", 1, ...split);
    waiting.splice(0, later).forEach((stage) => (add("W", 1, stage), add("I", 1, near)));
    add("W", 1, ...waiting);
  },
};

// For each rank its actions, each {kind, m, stage}. Throws an Error where the schedule does not
// exist for these numbers. chunks: stages of a rank, for interleaved.
function schedule(name, p, m, chunks = 2) {
  return repeat(p, (r) => {
    const row = [], counts = {}, count = (kind, stage) => counts[kind + stage] || 0;
    const add = (kinds, n, ...stages) => {
      for (const stage of stages)
        for (const kind of kinds.repeat(n)) {
          const parts = kind === "B" ? "IW" : kind; // a B counts as one of each
          row.push({ kind, m: count(parts[0], stage), stage });
          for (const part of parts) counts[part + stage] = count(part, stage) + 1;
        }
    };
    SCHEDULES[name]({ add, count, r, p, m, chunks });
    return row.filter((action) => action.m < m); // zb-v plans more
  });
}

// For each rank its actions with {start, end}: an action starts when its rank is free and what it
// waits for is there. time(action); transfer: how long a message between two ranks takes.
function simulate(rows, time, transfer = 0) {
  const last = rows.flat().reduce((most, action) => Math.max(most, action.stage), 0);
  const ended = new Map(), spans = rows.map(() => []);
  const awaited = ({ kind, m, stage }) => {
    if (kind === "F") return stage > 0 && `F${m},${stage - 1}`;
    return kind !== "W" && stage < last && `B${m},${stage + 1}`;
  };
  for (let left = rows.flat().length; left; )
    rows.forEach((row, rank) => {
      for (const done = spans[rank]; done.length < row.length; left--) {
        const action = row[done.length], message = awaited(action), before = ended.get(message);
        if (message && !before) break;
        const free = done.length ? done[done.length - 1].end : 0;
        const there = message ? before.end + (before.rank === rank ? 0 : transfer) : 0;
        const start = Math.max(free, there), end = start + time(action);
        done.push({ start, end, ...action });
        const sent = action.kind === "F" ? "F" : "B"; // I sends what a whole backward would
        if (action.kind !== "W") ended.set(`${sent}${action.m},${action.stage}`, { end, rank });
      }
    });
  return spans;
}

// --- the page

const WORDS = { F: "forward", B: "backward", I: "inputs' gradient", W: "weights' gradient" };
const count = (n) => repeat(n, (i) => i), unit = ({ kind }) => (kind === "B" ? 2 : 1);
const spansOf = (s) => simulate(schedule(s.schedule, s.p, s.m, s.chunks), unit);
const endOf = (spans) => Math.max(...spans.map((row) => row[row.length - 1].end));
const STEPS = {
  schedule: () => Object.keys(SCHEDULES),
  p: () => count(9).slice(1),
  chunks: (s) => (s.schedule === "interleaved" ? [2, 3, 4] : [2]),
  m: (s) => {
    const least = { interleaved: s.p, dualpipev: 2 * s.p }[s.schedule] ?? 1;
    return count(25).filter((m) => m >= least && (s.schedule !== "interleaved" || m % s.p === 0));
  },
  batch: (s) => ["all", ...count(s.m)],
  time: (s) => [...count(endOf(spansOf(s))), "end"],
};

function showSteps(s) {
  const spans = spansOf(s), end = endOf(spans), time = s.time === "end" ? end : s.time;
  const chart = document.getElementById("chart"), table = document.getElementById("ranks");
  const bars = (row) => row.map(({ start, end: until, kind, m, stage }) => {
    const far = stage >= s.p && "far", other = s.batch !== "all" && s.batch !== m && "other";
    const when = start >= time ? "todo" : until >= time && time < end && "now";
    const place = `left: ${(100 * start) / end}%; width: ${(100 * (until - start)) / end}%`;
    return `<i class="${kind} ${far} ${other} ${when}" style="${place}">${m}</i>`;
  });
  chart.style.setProperty("--units", end);
  chart.style.setProperty("--unit", s.m > 10 ? ".8rem" : ".45rem"); // room for all digits
  chart.innerHTML = spans.map((row, r) => `<b>rank ${r}</b><p>${bars(row).join("")}</p>`).join("");
  table.innerHTML = spans.map((row, rank) => {
    const begun = row.filter((action) => action.start < time), now = begun[begun.length - 1];
    const done = begun.filter(({ kind, end }) => end <= time && "BW".includes(kind)).length;
    const held = begun.filter(({ kind }) => kind === "F").length - done;
    const works = now && now.end >= time;
    const does = works ? `${WORDS[now.kind]} of ${now.m}, stage ${now.stage}` : "waits";
    return `<tr><th>${rank}</th><td>${does}</td><td>${held}</td></tr>`;
  }).join("");
  const work = spans.flat().reduce((all, action) => all + unit(action), 0) / end / s.p;
  const title = `${end} units of time; ranks work ${Math.round(100 * work)}% of it`;
  document.getElementById("summary").value = title;
}

if (document.getElementById("steps"))
  play("steps", STEPS, { schedule: "1f1b", p: 4, m: 8, batch: "all", time: "end" }, showSteps);
