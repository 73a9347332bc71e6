"""The pictures of docs/pictures: who holds what, the mesh, two rings, the choice, estimates.

    python -m docs.pictures                        all of them
    python -m docs.pictures --only mesh,choose     some of them

What they show is asked from the code that does it: groups from train.py's mesh, chunks and tiles
from context_parallel.py, stages from the schedule, sums from collectives.py. The choices and the
estimates are those of their pages. SVG is written by hand: text stays text, and the same code
writes the same file.
"""

import functools
import html
import math
import pathlib
import re
import textwrap
import threading
from types import SimpleNamespace
from unittest import mock

import collectives
import context_parallel
import harness
import train
import zero_bubble

FOLDER = pathlib.Path(__file__).with_suffix("")
# Okabe and Ito's colors, which the colour-blind tell apart
ORANGE, SKY, GREEN, BLUE = "#E69F00", "#56B4E9", "#009E73", "#0072B2"
VERMILION, PURPLE, DARK, GREY, PALE = "#D55E00", "#CC79A7", "#222222", "#777777", "#E8E8E8"
RANK_COLORS = (BLUE, ORANGE, GREEN, PURPLE)


class Picture:
    """An SVG of 640 x `height` units on white. Text of 15 units can be read on a phone."""

    def __init__(self, height, title, width=640):
        self.width, self.height, self.title, self.parts = width, height, title, []
        self.box(0, 0, width, height, "white")

    def add(self, tag, content=None, **attributes):
        words = [f'{name.replace("_", "-")}="{short(v)}"' for name, v in attributes.items()]
        end = "/>" if content is None else f">{content}</{tag}>"
        self.parts.append(f"<{tag} {' '.join(words)}{end}")

    def box(self, x, y, width, height, fill, stroke="none", rounded=0):
        self.add("rect", x=x, y=y, width=width, height=height, fill=fill, stroke=stroke, rx=rounded)

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

    def svg(self):
        size = f'width="800" viewBox="0 0 {self.width} {self.height}" font-family="sans-serif"'
        head = '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" '
        head += f'markerHeight="5" orient="auto"><path d="M0 0L8 4L0 8z" fill="{DARK}"/></marker>'
        for color in KINDS.values():  # stripes: held for a moment
            head += f'<pattern id="{color[1:]}" width="5" height="5" patternUnits="userSpaceOnUse" '
            head += (
                f'patternTransform="rotate(45)"><path d="M0 0h2.5v5H0z" fill="{color}"/></pattern>'
            )
        title = f"<title>{html.escape(self.title)}</title>\n<defs>{head}</defs>"
        body = "\n".join(self.parts)
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{title}\n{body}\n</svg>\n'


def short(value):
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


# --- who holds what: 4 ranks, 4 layers, 8 runs of tokens

KINDS = {"weights": BLUE, "gradients": VERMILION, "optimizer": GREEN, "tokens": PURPLE}
KINDS |= {"between": ORANGE, "inside": SKY}
LABELS = [["weights"], ["gradients"], ["optimizer", "states"], ["tokens"]]
LABELS += [["activations", "between layers"], ["activations", "inside layers"]]
TECHNIQUES = {
    "one": ("One process", "nothing is sent"),
    "ddp": ("Data parallelism", "sent: gradients, summed over the ranks"),
    "zero1": ("ZeRO-1", "sent: gradients to their owner, new weights to all"),
    "zero2": ("ZeRO-2", "sent: as in ZeRO-1, gradients as soon as they are there"),
    "fsdp": ("ZeRO-3, FSDP", "sent: weights before a layer runs, gradients after it"),
    "tensor": ("Tensor parallelism", "sent: partial sums of activations, in each layer"),
    "sequence": (
        "Tensor and sequence",
        "sent: activations gathered before a layer, scattered after it",
    ),
    "pipeline": ("Pipeline", "sent: activations to the next stage, gradients back"),
    "context": ("Context parallelism", "sent: keys and values, around a ring; gradients, summed"),
    "experts": ("Expert parallelism", "sent: tokens to their experts and back; gradients"),
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
        layers = zero_bubble.find_schedule("1f1b", 4, 8).stages(rank)
        states = [[(layer, layer + 1, 0, 8) for layer in layers]] * 3
    if technique == "context":
        _, dealt = context_parallel.deal_chunks(8, 4)
        tokens, arriving = dealt[rank], dealt[rank - 1]
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


def draw_cell(picture, x, y, width, height, held, color, lines=True):
    picture.box(x, y, width, height, PALE)
    across, down = width / 8, height / 4
    for rows, fill in zip(held[::-1], (f"url(#{color[1:]})", color)):
        boxes = [
            (x + c * across, y + a * down, (d - c) * across, (b - a) * down) for a, b, c, d in rows
        ]
        picture.boxes(boxes, fill)
    if lines:
        cuts = [(x + n * across, y, 0.8, float(height)) for n in range(1, 8)]
        layers = [(float(x), y + n * down, float(width), 0.8) for n in range(1, 4) if height > 30]
        picture.boxes([*cuts, *layers], "white")


def draw_legend(picture, x, y):
    for at, fill, words in ((0, GREY, "held"), (80, "", "for a moment"), (225, PALE, "not here")):
        picture.box(x + at, y - 13, 22, 15, fill or f"url(#{BLUE[1:]})")
        picture.text(x + at + 28, y, words, 15, "start")


def holds(technique):
    """One technique: a column a rank, a row a kind."""
    title, sent = TECHNIQUES[technique]
    picture = Picture(528, f"{title}: who holds what")
    for rank in range(4):
        picture.text(185 + 120 * rank, 26, f"rank {rank}", weight="bold")
    y = 40
    for kind, label in zip(KINDS, LABELS):
        height = 22 if kind == "tokens" else 68
        for i, word in enumerate(label):
            picture.text(122, y + height / 2 + 6 + 18 * i - 9 * (len(label) - 1), word, 16, "end")
        for rank in range(4):
            draw_cell(
                picture,
                132 + 120 * rank,
                y,
                108,
                height,
                holdings(technique, rank)[kind],
                KINDS[kind],
            )
        y += height + 8
    picture.text(8, y + 22, sent[0].upper() + sent[1:], 17, "start", weight="bold")
    across = "attention and norms, then 4 experts" if technique == "experts" else "parts of a layer"
    picture.text(8, y + 46, f"Down: 4 layers. Across: {across}; or 8 runs of tokens", 15, "start")
    draw_legend(picture, 8, y + 72)
    return picture


def holds_all():
    """All techniques, small."""
    picture = Picture(948, "Who holds what: all techniques on 4 ranks")
    for i, (technique, (title, _)) in enumerate(TECHNIQUES.items()):
        x, y = 8 + 212 * (i % 3), 26 + 222 * (i // 3)
        picture.text(x, y, title, 17, "start", weight="bold")
        for rank in range(4):
            top = y + 10
            for kind, held in holdings(technique, rank).items():
                height = 12 if kind == "tokens" else 32
                draw_cell(picture, x + 50 * rank, top, 46, height, held, KINDS[kind], lines=False)
                top += height + 3
    for i, (label, color) in enumerate(zip(LABELS, KINDS.values())):
        picture.box(232, 704 + 27 * i, 22, 15, color)
        picture.text(262, 717 + 27 * i, " ".join(label), 16, "start")
    picture.text(232, 692, "Rows, from the top; a column is a rank", 16, "start")
    draw_legend(picture, 232, 890)
    return picture


# --- the mesh of two nodes


def mesh_groups(flags):
    """{name: the groups} that train.py makes of 8 ranks."""
    args, found = train.flags().parse_args(flags.split()), {}
    schedule = zero_bubble.find_schedule("1f1b", args.pp, 8)
    for rank in range(8):
        stub = SimpleNamespace(new_group=tuple, get_rank=lambda rank=rank: rank)
        with mock.patch.object(train, "dist", stub):
            groups = train.mesh(args, schedule)
        for name in ("tp", "dp", "pp"):
            found.setdefault(name, set()).add(groups[name])
    return {name: sorted(groups) for name, groups in found.items() if len(min(groups)) > 1}


def mesh():
    picture = Picture(735, "Groups of ranks on two nodes, and the links that they use")
    for top, flags in ((0, "--dp 2 --tp 4 --pp 1"), (362, "--dp 2 --tp 2 --pp 2")):
        picture.text(10, top + 28, flags.replace(" --pp 1", ""), 19, "start", weight="bold")
        for node in range(2):
            y = top + 44 + 130 * node
            picture.box(10, y, 620, 92, "#F4F4F4", GREY, 8)
            picture.text(22, y + 26, f"node {node}", 16, "start", GREY)
        y = top + 296
        for name, groups in mesh_groups(flags).items():
            color, level = (
                {"tp": BLUE, "dp": ORANGE, "pp": GREEN}[name],
                {"tp": 80, "dp": 14}.get(name),
            )
            crosses = groups[0][0] // 4 != groups[0][-1] // 4
            for group in groups:
                draw_group(
                    picture, [rank_place(top, rank) for rank in group], crosses, color, level, group
                )
            said = " | ".join(" ".join(map(str, group)) for group in groups)
            where = "between nodes" if crosses else "inside a node"
            picture.box(10, y - 12, 22, 12, color)
            picture.text(40, y, f"{name}   {said}", 17, "start")
            picture.text(630, y, where, 17, "end")
            y += 25
        for rank in range(8):
            x, y = rank_place(top, rank)
            picture.box(x - 24, y - 18, 48, 36, "white", DARK, 6)
            picture.text(x, y + 6, str(rank), 18, weight="bold")
    return picture


def rank_place(top, rank):
    return 170 + 125 * (rank % 4), top + 90 + 130 * (rank // 4)


def draw_group(picture, places, crosses, color, level, group):
    (x, y), (to_x, to_y) = places[0], places[-1]
    if crosses:
        picture.line((x, y), (to_x, to_y), color=color, width=5)
        return
    # A bracket; those that lie across each other at different heights
    level = y - 46 + level + (10 * (group[0] % 2) if level < 40 else 0)
    shift = -8 if level < y else 8
    for px, py in places:
        picture.line((px + shift, py), (px + shift, level), color=color, width=5)
    picture.line((x + shift, level), (to_x + shift, level), color=color, width=5)


# --- the rings


def ring_sums(n=4):
    """plain_ring_all_reduce's rounds, each [(sums of a rank's chunks, the chunk it sends next)]. A
    sum is an int whose bits say which ranks' parts are in it."""
    import torch

    rounds, box, here = [], {}, threading.local()
    meet = threading.Barrier(n)
    values = [torch.full((n,), 1 << rank) for rank in range(n)]

    def swap(sent, to, received, source, group):
        if meet.wait() == 0:
            rounds.append([[None, None]] * n)
        meet.wait()
        rounds[-1][here.rank] = (values[here.rank].tolist(), sent.storage_offset())
        box[to, len(rounds)] = sent.clone()
        meet.wait()
        received.copy_(box[here.rank, len(rounds)])

    def work(rank):
        here.rank = rank
        collectives.plain_ring_all_reduce(values[rank])

    stub = dict(get_world_size=lambda _: n, get_rank=lambda _: here.rank)
    with mock.patch.multiple(collectives, swap=swap, dist=SimpleNamespace(**stub)):
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [*rounds, [(row.tolist(), None) for row in values]]


def ring_all_reduce():
    picture = Picture(470, "A ring all-reduce of 4 ranks: 3 rounds of sums, 3 of copies")
    rounds, stale = ring_sums(), set()
    for i, state in enumerate(rounds):
        place = i if i < 4 else i - 3
        x, y = 12 + 157 * place, 44 + 220 * (i > 3)
        said = "start" if i == 0 else f"round {i}"
        picture.text(x, y - 12, said, 17, "start", weight="bold")
        for rank, (sums, sent) in enumerate(state):
            for chunk, bits in enumerate(sums):
                ranks = "".join(str(r) for r in range(4) if bits >> r & 1)
                fill, ink = (SKY, DARK) if len(ranks) > 1 else ("#DDF0FB", DARK)
                if len(ranks) == 4:
                    fill, ink = BLUE, "white"
                elif (rank, chunk) in stale:
                    fill, ranks = PALE, ""
                picture.box(x + 36 * chunk, y + 38 * rank, 35, 34, fill)
                picture.text(x + 36 * chunk + 17.5, y + 38 * rank + 22, ranks, 14, fill=ink)
                if i and bits != rounds[i - 1][rank][0][chunk]:  # it has just arrived
                    left, top = x + 36 * chunk + 1, y + 38 * rank + 1
                    corners = [
                        (left, top),
                        (left + 33, top),
                        (left + 33, top + 32),
                        (left, top + 32),
                    ]
                    picture.line(*corners, (left, top - 1.5), color=VERMILION, width=3)
            if sent is not None and sums[sent] != 15:
                stale.add((rank, sent))
    for at, words in enumerate(
        ("A row is a rank,", "a column a chunk.", "012: the sum of", "ranks 0, 1 and 2")
    ):
        picture.text(12, 300 + 22 * at, words, 16, "start")
    picture.text(12, 214, "Rounds 1 to 3, reduce-scatter: sums go to the rank above", 17, "start")
    picture.text(12, 440, "Rounds 4 to 6, all-gather: whole sums go the same way", 17, "start")
    picture.text(12, 462, "Framed in red: has just arrived. Grey: no longer needed", 15, "start")
    return picture


def ring_attention():
    picture = Picture(
        672, "The ring of context parallelism: which tiles a rank computes in which step"
    )
    _, chunks = context_parallel.deal_chunks(8, 4)
    for rank in range(4):
        y = 40 + 150 * rank
        picture.text(8, y + 50, f"rank {rank}", 17, "start", RANK_COLORS[rank], "bold")
        picture.text(8, y + 70, f"tokens {chunks[rank][0]}, {chunks[rank][1]}", 15, "start")
        tiles = context_parallel.ring_tiles(rank, 4, 8)
        for step in range(4):
            source, x = (rank - step) % 4, 108 + 135 * step
            if rank == 0:
                picture.text(x + 56, 24, f"step {step}", 17, weight="bold")
            picture.boxes([(x, y + 14 * q, 14 * q + 14, 14) for q in range(8)], PALE)
            computed = []
            for tile in tiles[source]:
                for q in chunks[rank][tile.queries]:
                    computed += [(q, k) for k in chunks[source][tile.keys] if k <= q]
            squares = [(x + 14 * k, y + 14 * q, 13, 13) for q, k in computed]
            picture.boxes(squares, RANK_COLORS[rank])
            picture.text(x, y + 129, f"keys of rank {source}", 15, "start", RANK_COLORS[source])
    picture.text(
        8,
        660,
        "A square: queries down, keys across, 8 chunks. In each step keys move on a rank",
        16,
        "start",
    )
    return picture


# --- the choice


def choices():
    """(condition, flags) of each numbered item of docs/use/choose.md."""
    page = (FOLDER.parent / "use" / "choose.md").read_text()
    found = re.findall(r"^\d+\. \*\*([^*]+): ([^*:]+)\.\*\*", page, re.M)
    return [(when, flags.replace("`", "")) for when, flags in found]


def choose():
    rows = choices()
    picture = Picture(40 + 98 * len(rows), "Choosing a layout: each yes adds its flags")
    picture.text(10, 26, "From the top to the bottom. Each yes adds its flags.", 17, "start")
    for i, (when, flags) in enumerate(rows):
        y = 40 + 98 * i
        picture.box(10, y, 330, 76, "#FFF4DC", ORANGE, 8)
        picture.box(430, y, 200, 76, "#DDF0FB", BLUE, 8)
        picture.line((340, y + 38), (428, y + 38), arrow=True)
        picture.text(382, y + 30, "yes", 16)
        if i < len(rows) - 1:
            picture.line((175, y + 76), (175, y + 96), arrow=True)
        for words, x, width in ((when, 175, 36), (flags, 530, 20)):
            lines = textwrap.wrap(words, width)
            for n, line in enumerate(lines):
                weight = "bold" if x == 530 else "normal"
                picture.text(x, y + 44 + 22 * n - 11 * (len(lines) - 1), line, 17, weight=weight)
    return picture


# --- estimates


def published_rows():
    """(run, unit, published, estimate) of each row that docs/reference/estimates.md shows."""
    page = (FOLDER.parent / "reference" / "estimates.md").read_text()
    rows = re.findall(r"^\| (.+) \| (.+) \| ([\d,.]+) \| ([\d,.e+]+) \| .*% \|$", page, re.M)
    return [(run, unit, *(float(n.replace(",", "")) for n in pair)) for run, unit, *pair in rows]


def estimates():
    picture = Picture(620, "Estimates beside published runs")
    colors = {"tokens/s a GPU": BLUE, "TFLOP/s a GPU": VERMILION, "seconds a step": GREEN}
    colors |= {"MFU, %": ORANGE, "GiB": PURPLE}

    def place(x, y):
        return 68 + 110 * math.log10(x), 572 - 110 * math.log10(y)

    for power in range(6):
        x, y = place(10.0**power, 10.0**power)
        picture.line((x, 22), (x, 572), color=PALE, width=1)
        picture.line((68, y), (618, y), color=PALE, width=1)
        picture.text(x, 590, f"{10**power:,}", 15, "end" if power == 5 else "middle")
        picture.text(62, y + 5, f"{10**power:,}", 15, "end")
    picture.line(place(1, 1), place(1e5, 1e5), color=GREY)
    for off in (0.8, 1.2):
        picture.line(
            place(1.25, 1.25 * off), place(8e4, 8e4 * off), color=GREY, width=1, dashes="5 4"
        )
    for run, unit, published, found in published_rows():
        x, y = place(published, found)
        picture.add("circle", cx=x, cy=y, r=4, fill=colors.get(unit, DARK), fill_opacity=0.75)
        error = found / published - 1
        if abs(error) > 0.2:
            x, anchor = (x - 8, "end") if error > 0 else (x + 8, "start")
            picture.text(x, y + (-4 if error > 0 else 14), f"{run}: {error:+.0%}", 15, anchor)
    for i, (unit, color) in enumerate({**colors, "GB, years": DARK}.items()):
        picture.add("circle", cx=86, cy=40 + 24 * i, r=6, fill=color)
        picture.text(100, 46 + 24 * i, unit, 16, "start")
    picture.text(616, 612, "published; up: estimate. Line: equal, dashes: 20% off", 16, "end")
    return picture


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
        (FOLDER / f"{name}.svg").write_text(PICTURES[name]().svg())


PICTURES = {f"holds-{name}": functools.partial(holds, name) for name in TECHNIQUES}
for draw in (holds_all, mesh, ring_all_reduce, ring_attention, choose, estimates):
    PICTURES[draw.__name__.replace("_", "-")] = draw

if __name__ == "__main__":
    harness.script(main)
