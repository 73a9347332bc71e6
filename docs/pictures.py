"""The pictures of docs/pictures: who holds what, the mesh, two rings, overlap, scores, schedules,
choices, estimates.

    python -m docs.pictures                        all of them
    python -m docs.pictures --only mesh,choose     some of them

What they show is asked from the code that does it: groups from train.py's mesh, chunks and tiles
from context_parallel.py, stages from the schedule, sums from collectives.py. The questions of the
choice are those of its page. SVG is written by hand: text stays text, and the same code writes the
same file.
"""

import functools
import html
import itertools
import math
import pathlib
import re
import textwrap
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import torch

import advanced  # noqa: F401  (its lessons have plain names)
import collectives
import context_parallel
import harness
import packed_documents
import train
from dualpipe import PairedSchedule
from receipts import dualpipe, pipeline
from receipts.context_parallel import LENGTHS
from receipts.pipeline import SCHEDULES, find_schedule

FOLDER = pathlib.Path(__file__).with_suffix("")
# Okabe and Ito's colors, which the colour-blind tell apart
ORANGE, SKY, GREEN, BLUE = "#E69F00", "#56B4E9", "#009E73", "#0072B2"
VERMILION, PURPLE, DARK, GREY, PALE = "#D55E00", "#CC79A7", "#222222", "#777777", "#E8E8E8"


HEAD = """<svg xmlns="http://www.w3.org/2000/svg" width="800" viewBox="0 0 640 {height}" \
font-family="sans-serif">
"""
ARROW = f"""<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" \
markerHeight="5" orient="auto"><path d="M0 0L8 4L0 8z" fill="{DARK}"/></marker>
"""
STRIPES = """<pattern id="{name}" width="5" height="5" patternUnits="userSpaceOnUse" \
patternTransform="rotate(45)"><path d="M0 0h2.5v5H0z" fill="{color}"/></pattern>
"""


class Picture:
    """An SVG of 640 x `height` units on white. Text of 15 units can be read on a phone."""

    def __init__(self, height, title):
        self.height, self.title, self.parts = height, title, []
        self.box(0, 0, 640, height, "white")

    def add(self, tag, content=None, **attributes):
        words = [f'{name.replace("_", "-")}="{short(v)}"' for name, v in attributes.items()]
        end = "/>" if content is None else f">{content}</{tag}>"
        self.parts.append(f"<{tag} {' '.join(words)}{end}")

    def box(self, x, y, width, height, fill, frame="none", rounded=0, thick=1):
        shape = dict(x=x, y=y, width=width, height=height, rx=rounded)
        self.add("rect", **shape, fill=fill, stroke=frame, stroke_width=thick)

    def text(self, x, y, words, size=17, anchor="middle", fill=DARK, weight="normal"):
        options = dict(text_anchor=anchor, fill=fill, font_size=size, font_weight=weight)
        self.add("text", html.escape(words), x=x, y=y, **options)

    def line(self, *points, color=DARK, width=2, arrow=False, dashes="none"):
        path = "M" + "L".join(f"{short(x)} {short(y)}" for x, y in points)
        options = dict(stroke=color, stroke_width=width, stroke_dasharray=dashes, fill="none")
        self.add("path", d=path, **options | ({"marker_end": "url(#arrow)"} if arrow else {}))

    def boxes(self, rows, fill):
        """Many boxes (x, y, width, height) of one color."""
        if rows:
            corners = "M{} {}h{}v{}h-{}z"
            paths = [corners.format(*map(short, (x, y, w, h, w))) for x, y, w, h in rows]
            self.add("path", d="".join(paths), fill=fill)

    def written(self):
        body = "\n".join(self.parts)
        for color in KINDS.values():
            if f"url(#{color[1:]})" in body:
                body = STRIPES.format(name=color[1:], color=color) + body
        title = f"<title>{html.escape(self.title)}</title>"
        return f"{HEAD.format(height=self.height)}{title}\n{ARROW}{body}\n</svg>\n"


def draw_lines(svg, x, y, lines, apart=22, **how):
    """Lines of text around the height y."""
    for i, words in enumerate(lines):
        svg.text(x, y + apart * i - apart / 2 * (len(lines) - 1), words, **how)


def short(value):
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


# --- who holds what: 4 ranks, 4 layers, 8 runs of tokens

KINDS = {"weights": BLUE, "gradients": VERMILION, "optimizer": GREEN, "tokens": PURPLE}
KINDS |= {"between": ORANGE, "inside": SKY}
LABELS = [["weights"], ["gradients"], ["optimizer", "states"], ["tokens"]]
LABELS += [["activations", "between layers"], ["activations", "inside layers"]]
TECHNIQUES = {
    "one": ("One process", "Nothing is sent"),
    "ddp": ("Data parallelism", "Sent: gradients, summed over the ranks"),
    "zero1": ("ZeRO-1", "Sent: gradients to their owner, new weights to all"),
    "zero2": ("ZeRO-2", "Sent: as in ZeRO-1, gradients as soon as they are there"),
    "fsdp": ("ZeRO-3, FSDP", "Sent: weights before a layer runs, gradients after it"),
    "tensor": ("Tensor parallelism", "Sent: partial sums of activations, in each layer"),
    "sequence": ("Tensor and sequence", "Sent: activations, gathered and scattered in each layer"),
    "pipeline": ("Pipeline", "Sent: activations to the next stage, gradients back"),
    "context": ("Context parallelism", "Sent: keys and values, around a ring; gradients, summed"),
    "experts": ("Expert parallelism", "Sent: tokens to their experts and back; gradients"),
}
WHOLE, MOMENT = (0, 4, 0, 8), (1, 2, 0, 8)  # first and last layer, first and last column


def holdings(technique, rank):
    """{kind: (what a rank holds, what it holds for a moment)}, each of them a list of (layer, to
    layer, column, to column). Columns are parts of a layer, or tokens."""
    part, columns = (0, 4, 2 * rank, 2 * rank + 2), [2 * rank, 2 * rank + 1]
    layers, strips = [0, 1, 2, 3], [(0, 1)]
    states, moments, tokens = [[WHOLE], [WHOLE], [WHOLE]], {}, columns
    if technique == "one":
        return {kind: ([WHOLE] if rank == 0 else [], []) for kind in KINDS}
    if technique.startswith("zero"):
        states[2] = [part]
    if technique == "zero2":
        states[1], moments["gradients"] = [part], [MOMENT]
    if technique in ("fsdp", "tensor", "sequence"):
        states = [[part]] * 3
    if technique == "fsdp":
        moments["weights"] = moments["gradients"] = [MOMENT]
    if technique in ("tensor", "sequence", "pipeline"):
        tokens = range(8)
    if technique in ("tensor", "sequence"):
        strips = [(rank / 4, rank / 4 + 1 / 4)]  # its heads and hidden units
    if technique == "pipeline":
        layers = find_schedule("1f1b", 4, 8).stages(rank)
        states = [[(layer, layer + 1, 0, 8) for layer in layers]] * 3
    if technique == "context":
        held = context_parallel.held_positions
        tokens, arriving = (held(8, r % 4, 4).tolist() for r in (rank, rank - 1))
        moments["inside"] = [(1, 2, column, column + 1) for column in arriving]
    if technique == "experts":
        strips = [(0, 0.5)]
        states = [[(0, 4, 0, 4), (0, 4, 4 + rank, 5 + rank)]] * 3
    between = columns if technique == "sequence" else tokens
    inside = [(n + a, n + b, c, c + 1) for n in layers for a, b in strips for c in tokens]
    if technique == "sequence":
        moments["between"] = [MOMENT]
    if technique == "experts":  # its expert's tokens, from all ranks: a draw
        chosen = [(n, c) for n in layers for c in range(8) if (c + c // 4 + n) % 4 == rank]
        inside += [(n + 0.5, n + 1, c, c + 1) for n, c in chosen]
    held = [*states, [(0, 4, c, c + 1) for c in tokens]]
    held += [[(n, n + 1, c, c + 1) for n in layers for c in between], inside]
    return {kind: (boxes, moments.get(kind, [])) for kind, boxes in zip(KINDS, held)}


def draw_cell(svg, x, y, width, height, kind, held):
    across, down, color = width / 8, height / 4, KINDS[kind]
    svg.box(x, y, width, height, PALE)
    whole, moment = held
    for rows, fill in ((moment, f"url(#{color[1:]})"), (whole, color)):
        shapes = []
        for top, below, left, right in rows:
            size = (right - left) * across, (below - top) * down
            shapes.append((x + left * across, y + top * down, *size))
        svg.boxes(shapes, fill)


def draw_grid(svg, x, y, width, height):
    svg.boxes([(x + width / 8 * n, y, 0.8, height) for n in range(1, 8)], "white")
    if height > 30:
        svg.boxes([(x, y + height / 4 * n, width, 0.8) for n in range(1, 4)], "white")


def draw_legend(svg, x, y):
    fills = ((0, GREY, "held"), (80, f"url(#{BLUE[1:]})", "for a moment"), (225, PALE, "not here"))
    for shift, fill, words in fills:
        svg.box(x + shift, y - 13, 22, 15, fill)
        svg.text(x + shift + 28, y, words, 15, "start")


def holds(technique):
    """One technique: a column per rank, a row per kind."""
    title, sent = TECHNIQUES[technique]
    svg, y = Picture(528, f"{title}: who holds what"), 40
    for kind, label in zip(KINDS, LABELS):
        height = 22 if kind == "tokens" else 68
        draw_lines(svg, 122, y + height / 2 + 6, label, apart=18, size=16, anchor="end")
        for rank in range(4):
            place = 132 + 120 * rank, y, 108, height
            draw_cell(svg, *place, kind, holdings(technique, rank)[kind])
            draw_grid(svg, *place)
        y += height + 8
    for rank in range(4):
        svg.text(185 + 120 * rank, 26, f"rank {rank}", weight="bold")
    svg.text(8, y + 22, sent, 17, "start", weight="bold")
    across = "attention and norms, then 4 experts" if technique == "experts" else "parts of a layer"
    svg.text(8, y + 46, f"Down: 4 layers. Across: {across}; or 8 runs of tokens", 15, "start")
    draw_legend(svg, 8, y + 72)
    return svg


def holds_all():
    """All techniques, small."""
    svg = Picture(914, "Who holds what: all techniques on 4 ranks")
    for i, (technique, (title, _)) in enumerate(TECHNIQUES.items()):
        x, y = 8 + 212 * (i % 3), 26 + 222 * (i // 3)
        svg.text(x, y, title, 17, "start", weight="bold")
        for rank in range(4):
            top = y + 10
            for kind, held in holdings(technique, rank).items():
                height = 12 if kind == "tokens" else 32
                draw_cell(svg, x + 50 * rank, top, 46, height, kind, held)
                top += height + 3
    svg.text(232, 692, "Rows, from the top; a column is a rank", 16, "start")
    for i, (label, color) in enumerate(zip(LABELS, KINDS.values())):
        svg.box(232, 704 + 27 * i, 22, 15, color)
        svg.text(262, 717 + 27 * i, " ".join(label), 16, "start")
    draw_legend(svg, 232, 890)
    return svg


# --- the mesh of two nodes of 4 ranks

# Color, and how far from the ranks the lines inside a node are
LINES = {"tp": (BLUE, 34), "dp": (ORANGE, -32), "pp": (GREEN, 34)}


def mesh_groups(flags):
    """{name: the groups} that train.py makes of 8 ranks."""
    args, found = train.flags().parse_args(flags.split()), {}
    schedule = find_schedule("1f1b", args.pp, 8)
    for rank in range(8):
        stub = SimpleNamespace(new_group=tuple, get_rank=lambda rank=rank: rank)
        with mock.patch.object(train, "dist", stub):
            groups = train.mesh(args, schedule)
        for name in LINES:
            found.setdefault(name, set()).add(groups[name])
    return {name: sorted(groups) for name, groups in found.items() if len(min(groups)) > 1}


def mesh():
    svg = Picture(735, "Groups of ranks on two nodes, and the links that they use")
    for top, flags in ((0, "--dp 2 --tp 4"), (362, "--dp 2 --tp 2 --pp 2")):
        svg.text(10, top + 28, flags, 19, "start", weight="bold")
        for node in range(2):
            svg.box(10, top + 44 + 130 * node, 620, 92, "#F4F4F4", GREY, rounded=8)
            svg.text(22, top + 70 + 130 * node, f"node {node}", 16, "start", GREY)
        places = [(170 + 125 * (rank % 4), top + 90 + 130 * (rank // 4)) for rank in range(8)]
        for i, (name, groups) in enumerate(mesh_groups(flags).items()):
            crosses = groups[0][0] // 4 != groups[0][-1] // 4
            for group in groups:
                draw_group(svg, [places[rank] for rank in group], *LINES[name], group[0] % 2)
            y = top + 296 + 25 * i
            svg.box(10, y - 12, 22, 12, LINES[name][0])
            said = " | ".join(" ".join(map(str, group)) for group in groups)
            svg.text(40, y, f"{name}: {said}", 17, "start")
            svg.text(630, y, "between nodes" if crosses else "inside a node", 17, "end")
        for rank, (x, y) in enumerate(places):
            svg.box(x - 24, y - 18, 48, 36, "white", DARK, rounded=6)
            svg.text(x, y + 6, str(rank), 18, weight="bold")
    return svg


def draw_group(svg, places, color, away, odd):
    """A line from node to node, or a bracket: above the ranks at two heights, as groups overlap."""
    (x, y), (end, below) = places[0], places[-1]
    if y != below:
        svg.line((x, y), (end, below), color=color, width=5)
        return
    level, shift = (y + away, 8) if away > 0 else (y + away + 10 * odd, -8)
    for x, y in places:
        svg.line((x + shift, y), (x + shift, level), (end + shift, level), color=color, width=5)


# --- the rings


def ring_sums(n=4):
    """plain_ring_all_reduce's rounds, each [(a rank's chunks, the chunk that it sends next)]. A
    chunk is an int whose bits say which ranks' parts are in it."""
    rounds, box, here = [], {}, threading.local()
    meet = threading.Barrier(n, timeout=60)
    tensors = [torch.full((n,), 1 << rank) for rank in range(n)]

    def send_recv(sent, to, received, source, group):
        if meet.wait() == 0:
            rounds.append([None] * n)
        meet.wait()
        rounds[-1][here.rank] = tensors[here.rank].tolist(), sent.storage_offset()
        box[to] = sent.clone()
        meet.wait()
        received.copy_(box[here.rank])

    def work(rank):
        here.rank = rank
        collectives.plain_ring_all_reduce(tensors[rank])

    stub = dict(get_world_size=lambda _: n, get_rank=lambda _: here.rank)
    with mock.patch.multiple(collectives, send_recv=send_recv, dist=SimpleNamespace(**stub)):
        with ThreadPoolExecutor(n) as pool:
            list(pool.map(work, range(n)))
    return [*rounds, [(chunks.tolist(), None) for chunks in tensors]]


def ring_all_reduce():
    svg = Picture(470, "A ring all-reduce of 4 ranks: 3 rounds of sums, 3 of copies")
    before, unneeded = None, set()
    for i, ranks in enumerate(ring_sums()):
        left, top = (12 + 157 * i, 44) if i < 4 else (12 + 157 * (i - 3), 264)
        svg.text(left, top - 12, f"round {i}" if i else "start", 17, "start", weight="bold")
        for rank, (chunks, sent) in enumerate(ranks):
            for chunk, bits in enumerate(chunks):
                x, y = left + 36 * chunk, top + 38 * rank
                words = "".join(str(other) for other in range(4) if bits >> other & 1)
                fill = {1: "#DDF0FB", 4: BLUE}.get(len(words), SKY)
                if (rank, chunk) in unneeded and len(words) < 4:
                    fill, words = PALE, ""
                arrived = before and bits != before[rank][0][chunk]
                svg.box(x + 1, y + 1, 33, 32, fill, VERMILION if arrived else "none", thick=3)
                svg.text(x + 17.5, y + 22, words, 14, fill="white" if fill == BLUE else DARK)
            unneeded.add((rank, sent))
        before = ranks
    svg.text(12, 214, "Rounds 1 to 3, reduce-scatter: sums go to the rank above", 17, "start")
    lines = ("A row is a rank,", "a column a chunk.", "012: the sum of", "ranks 0, 1 and 2")
    draw_lines(svg, 12, 333, lines, size=16, anchor="start")
    svg.text(12, 440, "Rounds 4 to 6, all-gather: whole sums go the same way", 17, "start")
    svg.text(12, 462, "Framed in red: has just arrived. Grey: no longer needed", 15, "start")
    return svg


def ring_attention():
    svg = Picture(672, "Which tiles a rank of context parallelism's ring computes in which step")
    colors = BLUE, ORANGE, GREEN, PURPLE
    chunks = [context_parallel.held_positions(8, rank, 4).tolist() for rank in range(4)]
    for step in range(4):
        svg.text(164 + 135 * step, 24, f"step {step}", 17, weight="bold")
    for rank in range(4):
        y = 40 + 150 * rank
        svg.text(8, y + 50, f"rank {rank}", 17, "start", weight="bold")
        svg.text(8, y + 70, f"chunks {chunks[rank][0]}, {chunks[rank][1]}", 15, "start")
        tiles = context_parallel.ring_tiles(rank, 4, 2)
        for step in range(4):
            source, x = (rank - step) % 4, 108 + 135 * step
            svg.boxes([(x, y + 14 * query, 14 * query + 14, 14) for query in range(8)], PALE)
            squares = []
            for tile in tiles[source]:
                for query in chunks[rank][tile.queries]:
                    keys = [key for key in chunks[source][tile.keys] if key <= query]
                    squares += [(x + 14 * key, y + 14 * query, 13, 13) for key in keys]
            svg.boxes(squares, colors[source])
            svg.text(x, y + 129, f"keys of rank {source}", 15, "start")
    svg.text(8, 658, "A square is a tile: queries down, keys across, 8 chunks each.", 16, "start")
    return svg


# --- the choice


def choose():
    """The questions on top of docs/use/choose.md, each with the flags of a yes."""
    page = (FOLDER.parent / "use" / "choose.md").read_text()
    questions = re.findall(r"^    (?:no: *)?(.*?) {2,}(--.*)$", page, re.M)
    besides = re.search(r"^    Besides: (.*)$", page, re.M)[1].split("; ")
    svg = Picture(80 + 84 * (len(questions) + len(besides)), "Choosing a layout")
    for i, (question, flags) in enumerate(questions):
        y = 10 + 98 * i
        if question:
            draw_box(svg, 10, y, 300, question, "#FFF4DC", ORANGE)
            draw_box(svg, 400, y, 230, flags, "#DDF0FB", BLUE)
            svg.line((310, y + 34), (398, y + 34), arrow=True)
            svg.text(354, y + 26, "yes", 16)
            svg.line((160, y + 68), (160, y + 96), arrow=True)
            svg.text(172, y + 87, "no", 16, "start")
        else:
            draw_box(svg, 10, y, 300, flags, "#DDF0FB", BLUE)
    y += 106
    svg.text(10, y, "Besides, with any of these:", 17, "start", weight="bold")
    for i, reason in enumerate(besides):
        condition, flags = reason.split(": ")
        draw_box(svg, 10, y + 14 + 80 * i, 300, condition, "#FFF4DC", ORANGE)
        draw_box(svg, 400, y + 14 + 80 * i, 230, flags, "#DDF0FB", BLUE)
        svg.line((310, y + 48 + 80 * i), (398, y + 48 + 80 * i), arrow=True)
    return svg


def draw_box(svg, x, y, width, words, fill, frame):
    svg.box(x, y, width, 68, fill, frame, rounded=8)
    lines = textwrap.wrap(words[0].upper() + words[1:], width // 9)
    draw_lines(svg, x + width / 2, y + 40, lines, weight="bold" if frame == BLUE else "normal")


# --- one step of a data-parallel rank: what computes, what is sent

FORWARD, GRADIENT, COUNT = 6, 0.5, 24  # units of time: forward, backward of one of 24 gradients
LATENCY, SENT = 0.25, 0.25  # of a message, and of one gradient in it


def messages(bucket, overlapped):
    """(start, end) of each all-reduce of `bucket` gradients. They share one link."""
    end, spans = 0, []
    for last in range(bucket, COUNT + 1, bucket):
        ready = FORWARD + GRADIENT * (last if overlapped else COUNT)
        start = max(ready, end)
        end = start + LATENCY + SENT * bucket
        spans.append((start, end))
    return spans


def overlap():
    svg = Picture(296, "One step of a rank: what computes, what is sent")
    backward = FORWARD + GRADIENT * COUNT
    ways = ("naive", 1, False), ("bucketed", 4, False), ("overlapped", 4, True)
    unit = 520 / messages(1, False)[-1][1]
    for y, (words, bucket, overlapped) in zip(range(0, 270, 90), ways):
        spans = messages(bucket, overlapped)
        svg.text(100, y + 20, f"{words}: {spans[-1][1]:.1f} units", 16, "start", weight="bold")
        svg.text(92, y + 44, "computes", 15, "end")
        svg.boxes([(100, y + 30, FORWARD * unit - 1, 20)], SKY)
        svg.boxes([(100 + FORWARD * unit, y + 30, (backward - FORWARD) * unit, 20)], ORANGE)
        svg.text(92, y + 68, "sends", 15, "end")
        boxes = [(100 + a * unit, y + 54, (b - a) * unit - 1, 20) for a, b in spans]
        svg.boxes(boxes, GREEN)
    kinds = (100, SKY, "forward"), (220, ORANGE, "backward"), (350, GREEN, "all-reduces")
    for x, color, words in kinds:
        svg.box(x, 276, 16, 14, color)
        svg.text(x + 24, 289, words, 15, "start")
    return svg


# --- who computes which scores


def scores(title, *panels):
    """Scores of causal attention on 4 ranks, a color a rank. panels: (words, lengths of documents,
    the positions that each rank holds)."""
    svg = Picture(330, title)
    for x, (words, lengths, held) in zip((30, 354), panels):
        starts, work = [], [0] * 4
        for length in lengths:
            starts += length * [len(starts)]
        for rank, color in enumerate((BLUE, ORANGE, GREEN, PURPLE)):
            rows = []
            for query in held[rank].tolist():
                if query < len(starts):  # else it is padding
                    rows.append((x + starts[query], 30 + query, query + 1 - starts[query], 1))
                    work[rank] += query + 1 - starts[query]
            svg.boxes(rows, color)
        svg.text(x, 20, words, 16, "start", weight="bold")
        shares = ", ".join(f"{4 * pairs / sum(work):.2f}" for pairs in work)
        svg.text(x, 304, f"{shares} of an even share", 14, "start")
    svg.text(30, 324, "Queries down, keys across; work of ranks 0, 1, 2 and 3.", 14, "start")
    return svg


def held_by_four(zigzag=True):
    return [context_parallel.held_positions(256, rank, 4, zigzag) for rank in range(4)]


def zigzag():
    panels = ("one run a rank", (256,), held_by_four(False)), ("zigzag", (256,), held_by_four())
    return scores("One run of tokens a rank, and the zigzag", *panels)


def by_pairs():
    starts = torch.tensor([0, *itertools.accumulate(LENGTHS[:-1])])
    dealt = starts.repeat_interleave(torch.tensor(LENGTHS)).unsqueeze(0)
    dealt = packed_documents.deal_tokens(256, 4, dealt)
    panels = ("zigzag", LENGTHS, held_by_four()), ("dealt out by pairs", LENGTHS, dealt)
    return scores("Documents in a zigzag, and dealt out by their pairs", *panels)


# --- schedules

# Of a rank's first stage, and of its later ones: fill, and color of the number
SPANS = {"F": ((SKY, DARK), (BLUE, "white")), "B": ((ORANGE, DARK), (VERMILION, "white"))}
SPANS |= {"I": SPANS["B"], "W": (("#8FD3BC", DARK), (GREEN, "white"))}


def timelines(title, rows):
    """Spans of schedules, one below the other: a row a rank, a box an action with its micro-batch's
    number. rows: [(words, spans)]."""
    unit = 590 / max(row[-1][1] for _, spans in rows for row in spans)
    svg = Picture(34 + sum(30 + 18 * len(spans) for _, spans in rows), title)
    y, boxes = 0, {}
    for words, spans in rows:
        svg.text(
            44, y + 20, f"{words}: works {pipeline.utilisation(spans):.1%} of the step", 14, "start"
        )
        y += 26
        for rank, row in enumerate(spans):
            svg.text(8, y + 13, f"rank {rank}", 12, "start")
            first = min(action.stage for *_, action in row)
            lanes = Counter(start for start, *_ in row)
            for start, end, (kind, stage, m) in row:
                top, height = y, 17.0
                if lanes[start] == 2:  # a pair: the forward above, the backward below
                    top, height = (y if kind == "F" else y + 8.5), 8.5
                color, ink = SPANS[kind][stage > first]
                x, width = 44 + unit * start, unit * (end - start)
                boxes.setdefault(color, []).append((x, top, width - 0.7, height - 0.7))
                size = min(11.0, 0.75 * width, height)
                middle = top + (height + 0.7 * size) / 2
                svg.text(x + width / 2, middle, str(m), size, fill=ink)
            y += 18
        y += 4
    texts, svg.parts = svg.parts[1:], svg.parts[:1]
    for color, places in boxes.items():
        svg.boxes(places, color)
    svg.parts += texts
    legend = {SKY: "forward", ORANGE: "backward, or its inputs' gradient"}
    legend |= {SPANS["W"][0][0]: "weights' gradient", GREY: "dark: a rank's later stages"}
    for x, (color, words) in zip((44, 120, 320, 440), legend.items()):
        svg.box(x, svg.height - 22, 10, 10, color)
        svg.text(x + 14, svg.height - 13, words, 11, "start")
    return svg


def schedules():
    """All schedules on 4 ranks with 8 micro-batches, simulated."""
    rows = []
    for name in SCHEDULES:
        schedule = find_schedule(name, 4, 8)
        stages = len(schedule.stages(0))
        time = lambda action, stages=stages: pipeline.unit(action) / stages  # noqa: E731
        rows.append((name, pipeline.simulate(schedule, time)))
    return timelines("Every schedule on 4 ranks with 8 micro-batches", rows)


def pairs():
    """dualpipe.py's schedule, if messages take as long as a forward computes."""
    schedule, rows = find_schedule("dualpipev", 4, 8), []
    for words, each in (("in turns", schedule), ("overlapped", PairedSchedule(schedule.rows))):
        spans = pipeline.simulate(each, dualpipe.alone, together=dualpipe.hide)
        rows.append((f"{words}, {max(row[-1][1] for row in spans):g} units", spans))
    return timelines("dualpipe.py on 4 pipeline ranks with 8 micro-batches", rows)


# --- estimates


def estimates():
    """The table that benchmarks.published prints, kept in published.txt."""
    page = (FOLDER / "published.txt").read_text()
    rows = re.findall(r"^\| (.+) \| (.+) \| ([\d,.]+) \| ([\d,.e+]+) \| .*% \|$", page, re.M)
    svg = Picture(620, "Estimates beside published runs")
    colors = {"tokens/s a GPU": BLUE, "TFLOP/s a GPU": VERMILION, "seconds a step": GREEN}
    colors |= {"MFU, %": ORANGE, "GiB": PURPLE}

    def place(x, y):
        return 68 + 110 * math.log10(x), 572 - 110 * math.log10(y)

    for power in range(6):
        x, y = place(10.0**power, 10.0**power)
        svg.line((x, 22), (x, 572), color=PALE, width=1)
        svg.line((68, y), (618, y), color=PALE, width=1)
        svg.text(x, 590, f"{10**power:,}", 15, "end" if power == 5 else "middle")
        svg.text(62, y + 5, f"{10**power:,}", 15, "end")
    svg.line(place(1, 1), place(1e5, 1e5), color=GREY)
    for off in (0.8, 1.2):
        ends = place(1.25, 1.25 * off), place(8e4, 8e4 * off)
        svg.line(*ends, color=GREY, width=1, dashes="5 4")
    for run, unit, *figures in rows:
        published, found = (float(figure.replace(",", "")) for figure in figures)
        x, y = place(published, found)
        svg.add("circle", cx=x, cy=y, r=4, fill=colors.get(unit, DARK), fill_opacity=0.75)
        error = found / published - 1
        if abs(error) > 0.2:
            x, anchor = (x - 8, "end") if error > 0 else (x + 8, "start")
            svg.text(x, y + (-4 if error > 0 else 14), f"{run}: {error:+.0%}", 15, anchor)
    for i, (unit, color) in enumerate({**colors, "GB, years": DARK}.items()):
        svg.add("circle", cx=86, cy=40 + 24 * i, r=6, fill=color)
        svg.text(100, 46 + 24 * i, unit, 16, "start")
    svg.text(616, 612, "published; up: estimate. Line: equal, dashes: 20% off", 16, "end")
    return svg


def main():
    p = harness.Parser(__doc__)
    p.add_argument("--only", metavar="NAME,NAME", help=f"of {', '.join(PICTURES)}")
    only = p.parse_args().only
    names = only.split(",") if only else PICTURES
    for name in names:
        if name not in PICTURES:
            raise harness.Refused(f"there is no picture {name}: {', '.join(PICTURES)}")
    FOLDER.mkdir(exist_ok=True)
    for name in names:
        (FOLDER / f"{name}.svg").write_text(PICTURES[name]().written())


PICTURES = {f"holds-{name}": functools.partial(holds, name) for name in TECHNIQUES}
for draw in (
    holds_all,
    mesh,
    ring_all_reduce,
    ring_attention,
    zigzag,
    by_pairs,
    schedules,
    pairs,
    overlap,
    choose,
    estimates,
):
    PICTURES[draw.__name__.replace("_", "-")] = draw

if __name__ == "__main__":
    harness.script(main)
