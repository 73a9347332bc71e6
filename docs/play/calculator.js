// What a layout holds, sends and takes: the formulas of receipts/, times from table.js, and the
// page that shows them. In bf16, with gradients, moments and a copy of the weights in float32.
"use strict";
const E = 2, REDUCED = 4, STATES = 12; // bytes: of an element, its gradient, what AdamW keeps
const BUCKET = (25 * 2 ** 20) / 4; // elements: of --bucket-mb
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const total = (kinds) => sum(Object.values(kinds));

// Settings, and what follows from them: the model, the schedule, the ranks that share the weights,
// a rank's tokens of a micro-batch. ends: the first layer of each stage, and the last one's end.
function sized(c) {
  const x = TABLE.models[c.model], all = schedule(c.schedule, c.pp, c.m, c.chunks), owner = [];
  all.forEach((row, rank) => row.forEach(({ stage }) => (owner[stage] = rank)));
  const ends = [0], others = owner.length - 1, last = x.last[others], left = x.layers - last;
  for (let i = 0; i < others; i++) // of these the later ones have one more
    ends.push(ends[i] + Math.floor(left / others) + (i >= others - (left % others)));
  ends.push(x.layers);
  const n = (c.rows * x.context) / c.cp, again = c.recompute === "half" || c.recompute === "block";
  return { ...c, x, all, owner, ends, n, data: c.dp * c.cp, forwards: again ? 2 : 1 };
}

// A rank's parameters, each with the units (blocks, ends) and the stages that use it.
function parametersOf(c, own) {
  const found = [], of = (part) => c.x.parameters.filter((parameter) => parameter[0] === part);
  const add = ([part, shape, cut, expert], users) => {
    const sizes = [...shape], twoRanks = part === "tied" && own.embedding !== own.head;
    if (expert) sizes[0] /= c.ep;
    if (cut !== null) sizes[cut] = Math.ceil(sizes[cut] / c.tp);
    found.push({
      elements: sizes.reduce((a, b) => a * b),
      units: users.map((user) => user.unit),
      stages: [...new Set(users.map((user) => user.at))],
      partial: twoRanks ? "tied" : c.sp && cut === null ? "tp" : "",
      apart: expert && c.ep > 1,
    });
  };
  const ends = own.units.filter((user) => user.part !== "block");
  if (ends.length) of("tied").forEach((parameter) => add(parameter, ends));
  own.units.forEach((user) => of(user.part).forEach((parameter) => add(parameter, [user])));
  return found;
}

// What ZeRO splits: parameters of one kind, from the last to the first.
function bucketsOf(c, own) {
  const buckets = [], latest = {};
  for (const p of parametersOf(c, own).reverse()) {
    const key = [p.apart, p.stages, c.zero === 3 ? p.units : "", p.partial].join("|");
    if (!latest[key] || p.elements > latest[key].room) {
      latest[key] = { ...p, elements: 0, room: c.zero === 3 ? Infinity : BUCKET };
      buckets.push(latest[key]);
    }
    latest[key].elements += p.elements;
    latest[key].room -= p.elements;
  }
  for (const bucket of buckets) {
    bucket.ranks = c.zero ? c.data / (bucket.apart ? c.ep : 1) : 1;
    bucket.length = Math.ceil(bucket.elements / bucket.ranks);
    bucket.size = bucket.length * bucket.ranks;
    bucket.gathers = c.zero === 3 ? 0 : 1;
  }
  return buckets;
}

// Count how often stage 3 gathers each bucket: for each pass of each unit that uses it, but the
// last unit of a forward stays for a backward that follows. Returns the most elements at one time.
function gather(c, buckets, own, row) {
  let peak = 0;
  own.ids.forEach((stage, at) => {
    const units = own.units.filter((user) => user.at === at).map((user) => user.unit);
    const last = units.length - 1, follows = last ? "BI" : "FBI";
    const ofStage = (action, kinds) => action?.stage === stage && kinds.includes(action.kind);
    const stays = row.filter((a, i) => ofStage(a, "F") && ofStage(row[i + 1], follows)).length;
    units.forEach((unit, i) => {
      const pair = units.slice(i, i + 2); // the next one is gathered before this one is freed
      const there = buckets.filter((bucket) => bucket.units.some((used) => pair.includes(used)));
      peak = Math.max(peak, sum(there.map((bucket) => bucket.size)));
      for (const bucket of there)
        if (bucket.units.includes(unit)) bucket.gathers += 2 * c.m - (i === last ? stays : 0);
    });
  });
  return peak;
}

// --- bytes of one rank

// What a block keeps of a micro-batch for backward. x.kept: elements a token.
function blockBytes(c, recompute) {
  const [whole, split, gathered] = c.x.kept[recompute];
  const between = c.sp ? (whole + gathered * c.x.width * (c.tp - 1)) / c.tp : whole;
  return c.n * (between + split / c.tp) * E;
}

// {kind: bytes} that a rank sends in a step.
function sentBy(c, own, buckets) {
  const { x, forwards } = c, n = c.m * c.n, wide = n * x.width * E;
  const norm = 8, lossAndNorm = 16; // each is summed as one number in float64
  const twice = (size, ranks) => (2 * (ranks - 1) * size) / ranks; // an all-reduce
  const shared = x.experts && x.shared ? 1 : 0, repeated = forwards > 1 ? 1 + shared : 0;
  const routed = x.experts ? n * x.top_k * own.blocks : 0, loss = own.head ? 12 * n : 0;
  const r = (c.tp - 1) / c.tp, ends = own.embedding + own.head, sent = { gradients: 0, weights: 0 };
  if (c.sp) {
    const norms = c.recompute === "selective" ? (x.mlp === "gelu" && !x.experts ? 2 : 1) : 0;
    const times = 8 + 4 * shared + repeated + (repeated ? 1 + repeated : norms);
    const small = routed * ((E + 8) * forwards + E);
    sent.tensor = r * ((times * own.blocks + 2 * ends) * wide + small) + twice(loss + norm, c.tp);
  } else {
    const times = (4 + repeated + 2 * shared) * own.blocks + ends;
    sent.tensor = twice(times * wide + routed * E + loss + norm, c.tp);
  }
  const keys = (2 * n * (x.kv_heads / c.tp) * x.width) / x.heads;
  sent.ring = c.cp > 1 ? own.blocks * keys * ((forwards + 1) * (c.cp - 1) * E + c.cp * 4) : 0;
  const away = own.blocks * (1 - 1 / c.ep), counts = forwards * away * c.m * x.experts * 8;
  const rows = (forwards + 1) * away * 2 * x.top_k * wide;
  sent.experts = c.ep > 1 ? rows + counts : 0;
  sent.pipeline = twice(lossAndNorm, c.pp) + (own.messages * wide) / (c.sp ? c.tp : 1);
  for (const bucket of buckets) {
    const ranks = c.data / (bucket.apart ? c.ep : 1), part = (ranks - 1) / ranks;
    const sums = bucket.size * REDUCED * (c.zero >= 2 ? c.m * bucket.stages.length : 1);
    sent.gradients += part * sums * (c.zero ? 1 : 2);
    sent.weights += c.zero ? part * bucket.size * bucket.gathers * E : 0;
    if (bucket.partial === "tp") sent.tensor += twice(bucket.length * REDUCED, c.tp);
    if (bucket.partial === "tied") sent.gradients += twice(bucket.length * REDUCED, 2);
  }
  sent.gradients += twice(lossAndNorm, c.data);
  return sent;
}

// What a rank of the pipeline has, holds and sends.
function rankOf(c, rank) {
  const ids = c.owner.flatMap((owner, stage) => (owner === rank ? [stage] : []));
  const own = { ids, units: [], embedding: ids[0] === 0, head: ids.includes(c.owner.length - 1) };
  const layers = (stage) => c.ends[stage + 1] - c.ends[stage], row = c.all[rank];
  const add = (unit, part, at) => own.units.push({ unit, part, at });
  if (own.embedding) add("embed", "embed", 0);
  ids.forEach((stage, at) => repeat(layers(stage), (i) => add(c.ends[stage] + i, "block", at)));
  if (own.head) add("head", "head", ids.length - 1);
  own.blocks = sum(ids.map(layers));
  const others = ids.flatMap((stage) => [c.owner[stage - 1] ?? rank, c.owner[stage + 1] ?? rank]);
  own.messages = others.filter((other) => other !== rank).length;
  const buckets = bucketsOf(c, own), peak = c.zero === 3 ? gather(c, buckets, own, row) : 0;
  own.parameters = sum(buckets.map((bucket) => bucket.elements));
  own.sent = sentBy(c, own, buckets);
  // Blocks x micro-batches that wait for backward; those of which only weights' gradients wait
  let flying = 0, later = 0, most = 0, bytes = 0;
  const kept = blockBytes(c, c.recompute), without = blockBytes(c, "none") - kept;
  // Played, without recomputation. What is not kept is made again, for one block at a time
  const [keeps, makes, put, loss] = c.x.bytes[c.tp][+c.sp].map((each) => each * c.n);
  const again = c.forwards > 1 ? without : 0, made = makes + without - again;
  const beside = c.recompute === "block" ? 0 : keeps - kept - without;
  for (const { kind, stage } of row) {
    flying += { F: 1, I: -1, W: 0, B: -1 }[kind] * layers(stage);
    later += { F: 0, I: 1, W: -1, B: 0 }[kind] * layers(stage);
    most = Math.max(most, flying + later);
    bytes = Math.max(bytes, flying * (kept + beside) + later * put);
  }
  const split = (stage) => sum(buckets.map((b) => (c.zero >= stage ? b.length : b.size)));
  // Whole gradients: of two buckets, in stage 3 of two blocks
  const whole = [0, 0, 2 * BUCKET, (2 * own.parameters) / own.blocks][c.zero] * REDUCED;
  own.held = {
    weights: split(3) * E,
    gathered: peak * E,
    gradients: split(2) * REDUCED,
    optimizer: split(1) * STATES,
    activations: most * kept + again,
    working: Math.max(0, bytes - most * kept) + Math.max(made + whole, own.head ? loss : 0),
  };
  const { gathered, activations, working } = own.held, { communicator, reserved } = TABLE;
  const groups = [c.tp, c.data, c.cp, c.pp, c.tp * c.data * c.pp, ...repeat(5, () => c.pp)];
  if (c.ep > 1) groups.push(c.ep, c.data / c.ep);
  const fixed = TABLE.context + communicator * groups.filter((n) => n > 1).length;
  own.held.reserved = fixed + reserved * (gathered + activations + working);
  return own;
}

// --- the whole step

function step(settings) {
  const c = sized(settings), { x } = c, device = TABLE.devices[c.device];
  const ranks = c.all.map((_, rank) => rankOf(c, rank)), { blocks, sent } = ranks[0];
  // Seconds of a message of which each rank sends `size` bytes. stride: from one rank to the next
  const message = (operation, ranks, stride, size) => {
    if (ranks === 1 || !size) return 0;
    const inNode = Math.min(ranks, Math.max(1, 8 / stride));
    const row = device.messages[operation][inNode][Math.log2(ranks) - 1];
    const at = Math.max(Math.log2(size / TABLE.sizes[0]) / 2, 0);
    const i = Math.min(Math.floor(at), row.length - 2);
    return row[i] * (row[i + 1] / row[i]) ** (at - i); // each of these sizes is 4 of the last
  };
  // Of a block and a micro-batch: computing, and messages that it waits for
  const played = x.seconds[c.tp][+c.sp].map((each, i) => each * device.slower[c.model][i]);
  const [forward, inputs, weights, head] = played.map((each) => each * c.n);
  const each = blocks * c.m, again = { block: forward, half: forward / 2 }[c.recompute] || 0;
  const ring = message("send", c.cp, c.tp, sent.ring / each);
  const tensor = 8 * message("all_gather", c.tp, 1, sent.tensor / each / 8);
  // Beside the weights' gradients, unless these come later: backward's half of the bytes, or of --sp's
  const later = c.all.flat().some(({ kind }) => kind === "W");
  const hidden = later || x.experts ? 0 : tensor / (c.sp ? 4 : 2);
  const waits = {
    tensor: tensor - hidden + Math.max(hidden - weights / 2, (1 - 1 / TABLE.beside) * hidden),
    ring: Math.max(0, ring - (forward + inputs + weights) / 2), // the rest hides behind tiles
    experts: 4 * message("all_gather", c.ep, c.tp, sent.experts / each / 4),
  };
  const time = ({ kind, stage }) => {
    const layers = c.ends[stage + 1] - c.ends[stage], wait = total(waits) / 2;
    const top = stage === c.owner.length - 1 ? head / 3 : 0, w = layers * weights + top;
    const f = layers * (forward + wait) + top, i = layers * (inputs + again + wait) + top;
    return { F: f, I: i, W: w, B: i + w }[kind];
  };
  const transfer = message("send", 2, c.data * c.tp, (c.n * x.width * E) / (c.sp ? c.tp : 1));
  const spans = simulate(c.all, time, transfer);
  const works = spans.map((row) => sum(row.map(({ start, end }) => end - start)));
  const busy = Math.max(...works), own = ranks[works.indexOf(busy)], passes = own.blocks * c.m;
  // Gradients are summed, and ZeRO-3's weights gathered, beside computing; other weights after it
  const pieces = c.zero === 3 ? own.blocks : Math.ceil(own.parameters / BUCKET);
  const takes = (operation, size, times) =>
    times * pieces * message(operation, c.data, c.tp, size / times / pieces);
  const times = c.zero > 1 ? c.m : 1; // that gradients are summed
  const sums = takes(c.zero ? "all_gather" : "all_reduce", own.sent.gradients, times);
  const gathers = takes("all_gather", own.sent.weights, c.zero === 3 ? 2 * c.m : 1);
  const [beside, meanwhile] =
    c.zero === 3 ? [sums + gathers, busy] : [sums, ((2 / 3) * busy * times) / c.m];
  const slowed = Math.max(beside, meanwhile + (1 - 1 / TABLE.beside) * beside) - meanwhile;
  const seconds = {
    computing: busy - total(waits) * passes,
    ...Object.fromEntries(Object.entries(waits).map(([kind, wait]) => [kind, wait * passes])),
    bubble: Math.max(...spans.map((row) => row[row.length - 1].end)) - busy,
    data: slowed + (c.zero === 3 ? 0 : gathers),
    optimizer: (played[4] * own.parameters) / (c.zero ? c.data : 1),
  };
  const devices = c.data * c.tp * c.pp;
  const speed = (c.dp * c.m * c.rows * x.context) / total(seconds); // tokens/s
  return { ranks, seconds, devices, speed, mfu: (x.flops * speed) / devices / device.flops };
}

// --- the page

const powers = (most) => repeat(Math.log2(most) + 1, (i) => 2 ** i);
const modelOf = (c) => TABLE.models[c.model];
const stagesOf = (c) => (c.schedule === "interleaved" ? c.chunks : /v$/.test(c.schedule) ? 2 : 1);
const least = (c) => ({ interleaved: c.pp, dualpipev: 2 * c.pp })[c.schedule] ?? 1;
// {setting: what it may be, given those above it}
const LAYOUT = {
  model: () => Object.keys(TABLE.models),
  device: () => Object.keys(TABLE.devices),
  schedule: () => Object.keys(SCHEDULES),
  chunks: (c) => (c.schedule === "interleaved" ? [2, 3, 4] : [2]),
  tp: (c) => Object.keys(modelOf(c).bytes).map(Number),
  sp: (c) => (c.tp > 1 ? [false, true] : [false]),
  cp: (c) => powers(16).filter((n) => modelOf(c).context % (2 * n * c.tp) === 0),
  pp: (c) => powers(64).filter((n) => n * stagesOf(c) <= modelOf(c).layers),
  dp: () => powers(4096),
  ep: (c) => powers(Math.min(modelOf(c).experts || 1, c.dp * c.cp)),
  zero: () => [0, 1, 2, 3],
  m: (c) => powers(128).filter((m) => m >= least(c)),
  rows: () => [1, 2, 4, 8],
  recompute: (c) => Object.keys(modelOf(c).kept),
};
const START = { model: "llama3-8b", device: "h200", schedule: "1f1b", dp: 8, zero: 3, m: 2 };
const DEFAULTS = { dp: 1, tp: 1, sp: false, pp: 1, cp: 1, ep: 1, zero: 0, chunks: 2 };
Object.assign(DEFAULTS, { recompute: "none", schedule: "1f1b" });
function commandOf(c, devices) {
  const nodes = Math.ceil(devices / 8), meet = "--rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29500";
  const several = nodes > 1 ? `--nnodes=${nodes} ${meet} ` : "";
  const changed = Object.keys(DEFAULTS).filter((name) => c[name] !== DEFAULTS[name]);
  const said = changed.map((name) => `--${name}${c[name] === true ? "" : ` ${c[name]}`}`);
  said.push(`--batch ${c.dp * c.m * c.rows} --microbatches ${c.m} --param-dtype bfloat16`);
  const start = `torchrun ${several}--nproc_per_node=${devices / nodes} train.py --preset`;
  return `${start} ${c.model} ${said.join(" ")} --reduce-dtype float32`;
}

const number = (n, digits, more) =>
  n.toLocaleString("en", { maximumSignificantDigits: digits, ...more });
function bytes(n) {
  const unit = n < 1e3 ? 0 : Math.min(3, Math.floor(Math.log10(n) / 3));
  return `${number(n / 1000 ** unit, 3)} ${["bytes", "KB", "MB", "GB"][unit]}`;
}
// Show {kind: amount} as parts of a bar, of which `whole` is the length, and in its list.
function bar(id, parts, whole, text, title) {
  const box = document.getElementById(id);
  box.querySelector("output").textContent = title;
  for (const [kind, amount] of Object.entries(parts)) {
    box.querySelector(`.bar .${kind}`).style.width = `${(100 * amount) / whole}%`;
    box.querySelector(`li.${kind}`).hidden = !amount;
    box.querySelector(`li.${kind} data`).textContent = text(amount);
  }
}

function showStep(c) {
  const s = step(c), { memory } = TABLE.devices[c.device], all = total(s.seconds);
  const more = (a, b) => (total(b) > total(a) ? b : a);
  const [held, sent] = ["held", "sent"].map((kind) => s.ranks.map((own) => own[kind]).reduce(more));
  const whole = Math.max(1.25 * memory, total(held)), left = memory - total(held);
  const fits = left < 0 ? `too much by ${bytes(-left)}` : `fits, ${bytes(left)} free`;
  const limit = document.querySelector(".limit");
  limit.style.left = `${(100 * memory) / whole}%`;
  limit.textContent = bytes(memory);
  document.getElementById("memory").classList.toggle("over", left < 0);
  bar("memory", held, whole, bytes, `${bytes(total(held))} of ${bytes(memory)}: ${fits}`);
  const power = 10 ** Math.floor(Math.log10(total(sent) || 1));
  const scale = [1, 2, 5, 10].find((times) => times * power >= total(sent)) * power;
  document.querySelector("#sent .bar").dataset.whole = total(sent) ? bytes(scale) : "";
  bar("sent", sent, scale, bytes, total(sent) ? `${bytes(total(sent))} a step` : "nothing");
  const percent = (part) => `${number(100 * part, 2)}%`, share = (part) => percent(part / all);
  bar("time", s.seconds, all, share, `${number(all, 3)} s, bubble ${share(s.seconds.bubble)}`);
  const daily = number(86400 * s.speed, 3, { notation: "compact", compactDisplay: "long" });
  bar("tokens", { computing: s.mfu }, 1, percent, `${daily} tokens a day`);
  const words = commandOf(c, s.devices).split(" ").map((word) => `<span>${word}</span>`);
  document.getElementById("command").innerHTML = words.join(" ");
  const several = s.devices === 1 ? "device" : "devices";
  document.getElementById("devices").textContent = `${number(s.devices, 6)} ${several}`;
}

play("layout", LAYOUT, START, showStep);
