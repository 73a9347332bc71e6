"""The site builds, needs no other host, and its pages to play with equal Python: in chromium."""

import itertools
import json
import operator
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT

import receipts.train
import train
from benchmarks import play
from harness.presets import configure
from receipts import pipeline
from receipts.formulas import Group
from simulator import devices
from trainer import layout


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_pages_load_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text()):
            assert not re.search(r"(src|href)=\"?(https?:)?//", tag), f"{page.name}: {tag}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", style.read_text()), style.name


class Browser:
    """Chromium without a window, told what to do over two pipes."""

    def __init__(self, program, profile):
        down, self.writer = os.pipe()
        self.reader, up = os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --disable-quic"
        flags += " --no-first-run --disable-background-networking --disable-component-update"
        flags += f" --disable-sync --user-data-dir={profile}"
        command = f"exec {program} {flags} 3<&{down} 4>&{up}"
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen(["bash", "-c", command], pass_fds=(down, up), **quiet)
        os.close(down)
        os.close(up)
        self.said, self.asked, self.page, self.errors = b"", 0, {}, []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self.page = {"sessionId": session["sessionId"]}
        self.ask("Runtime.enable")

    def ask(self, method, **params):
        self.asked += 1
        message = {"id": self.asked, "method": method, "params": params} | self.page
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.said:
                data = os.read(self.reader, 2**20)
                assert data, "the browser has ended"
                self.said += data
            answer, _, self.said = self.said.partition(b"\0")
            answer = json.loads(answer)
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(answer["params"]["exceptionDetails"])
            if answer.get("id") == self.asked:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, code):
        """The value of a JavaScript expression."""
        options = dict(awaitPromise=True, returnByValue=True, userGesture=True)
        done = self.ask("Runtime.evaluate", expression=code, **options)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def open(self, address, width=1300):
        size = dict(width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.ask("Page.navigate", url="about:blank")
        self.ask("Page.navigate", url=address)
        while not self.run("document.readyState === 'complete' && location.href !== 'about:blank'"):
            pass

    def press(self, key, times=1):
        code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        code |= {"text": "\r"} if key == "Enter" else {}
        for _ in range(times):
            self.ask("Input.dispatchKeyEvent", type="keyDown", **code)
            self.ask("Input.dispatchKeyEvent", type="keyUp", **code)


BROWSERS = ["chromium", "chromium-browser", "google-chrome"]  # as in .ci/run
KEYS = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = [name for name in BROWSERS if shutil.which(name)]
    if not found or os.environ.get("NO_BROWSER"):
        pytest.skip("no browser: apt-get install chromium")
    browser = Browser(found[0], tmp_path_factory.mktemp("profile"))
    yield browser
    browser.process.kill()
    browser.process.wait()


FLAGS = train.flags()


def by_receipts(monkeypatch, command, rank, rows):
    """Bytes that a rank of a train.py command holds and sends, by kind. rows: a sequence's tokens
    that leave for other ranks' experts or come from there, of all blocks, in one forward."""
    flags = shlex.split(command.partition(" train.py ")[2])
    args, config = layout.prepare(FLAGS.parse_args(flags))
    schedule = pipeline.find_schedule(args.schedule, args.pp, args.microbatches, args.chunks)
    data, own = args.dp * args.cp, pipeline.of_rank(config, schedule, rank)
    sizes = {"dp": data, "tp": args.tp, "cp": args.cp, "ep": args.ep}
    if args.ep > 1:
        sizes["copies"] = data // args.ep
    if own["embedding"] or own["head"]:
        sizes["tied"] = 1 if own["embedding"] and own["head"] else 2
    groups = {name: Group(name, size) for name, size in sizes.items()}
    groups["pp"] = Group("pp", args.pp, rank)
    # of_run takes process groups: here Groups are such
    ranks_of, rank_in = operator.attrgetter("ranks"), operator.attrgetter("rank")
    stub = dict(ProcessGroup=Group, get_world_size=ranks_of, get_rank=rank_in)
    monkeypatch.setattr(receipts.train, "dist", SimpleNamespace(**stub))
    monkeypatch.setattr(receipts.train, "scatter_operation", lambda group: "reduce_scatter")
    forwards = 2 if args.recompute in ("half", "block") else 1
    blocks = sum(map(len, own["layers"]))
    rows = SimpleNamespace(
        waits=0, switches=0, measured=forwards * blocks * args.batch // args.dp * rows / args.cp
    )
    run = SimpleNamespace(args=args, config=config, ledger=SimpleNamespace(gathered_peak=0))
    options = dict(schedule=schedule, groups=groups, expert_rows=rows)
    runner = SimpleNamespace(run=run, tokens=config.context // args.cp, **options)
    peaks, gathered = [], receipts.train.zero.gathered
    with monkeypatch.context() as patch:
        keep = lambda *words: peaks.append(gathered(*words)) or peaks[-1]  # noqa: E731
        patch.setattr(receipts.train.zero, "gathered", keep)
        _, sent, held, _ = receipts.train.of_run(runner)
    kinds = {kind: size for kind, (size, _) in held.items()}
    kinds["gathered"] = sum(2 * peak for _, peak in peaks)
    for (_, group), (size, _) in sent.items():
        kind = KINDS.get(group, "data")
        kinds[kind] = kinds.get(kind, 0) + size
    return kinds


KINDS = dict(tp="tensor", cp="ring", ep="experts", pp="pipeline", up="pipeline", down="pipeline")
# Chosen by random numbers from what the page offers, but not the longest schedules
DRAW = """numbers.map((random) => {
  const c = {};
  for (const [name, values] of Object.entries(LAYOUT)) {
    const few = values(c).filter((value) => !(value > (name === "pp" ? 8 : 16)));
    c[name] = few[Math.floor(random[Object.keys(c).length] * few.length)];
  }
  const { ranks, devices } = step(c), rank = Math.floor(random[14] * c.pp);
  const { held, sent } = ranks[rank], data = sent.gradients + sent.weights;
  return [commandOf(c, devices), rank, c, { ...sent, ...held, data }];
})"""


def test_bytes_are_those_of_receipts(site, browser, monkeypatch):
    draw = random.Random(1)
    numbers = [[draw.random() for _ in range(15)] for _ in range(200)]
    browser.open(f"{site.as_uri()}/play/calculator.html")
    assert browser.run("Object.keys(TABLE.models)") == play.SHOWN, "python -m benchmarks.play"
    layouts = browser.run(f"(numbers => {DRAW})({json.dumps(numbers)})")
    assert len({command for command, *_ in layouts}) > 190
    for command, rank, c, found in layouts:
        config = configure(c["model"])
        away = 2 * config.top_k * config.context * (1 - 1 / c["ep"])
        for kind, size in by_receipts(monkeypatch, command, rank, away).items():
            same = found[NAMES.get(kind, kind)] == pytest.approx(size, rel=1e-9)
            assert same, (command, rank, kind)


NAMES = {"parameters": "weights", "activations_peak": "activations"}


def test_the_table_is_of_dry_runs(site, browser):
    [played] = play.play([("tiny", 1, False)], devices.cluster_of(FLAGS.parse_args([]))).values()
    browser.open(f"{site.as_uri()}/play/calculator.html")
    *found, _ = browser.run("TABLE.models.tiny.bytes[1][0]")
    assert found == pytest.approx([n / 128 for n in play.block_bytes(*played)], rel=1e-3)


def test_schedules_are_pythons(site, browser):
    sizes = range(1, 6), (1, 2, 3, 4, 6, 9, 10, 12)
    cases = list(itertools.product(pipeline.SCHEDULES, *sizes, (2,)))
    cases += itertools.product(["interleaved"], *sizes, (3,))
    browser.open(f"{site.as_uri()}/play/schedules.html")
    found = browser.run(
        """(cases => cases.map((c) => {
      try { return simulate(schedule(...c), ({ kind }) => kind === "B" ? 2 : 1).map((row) =>
        row.map((a) => [a.start, a.end, [a.kind, a.stage, a.m]])) } catch (e) { return e.message }
    }))(%s)"""
        % json.dumps(cases)
    )
    for case, rows in zip(cases, found):
        try:
            chunks = case[3] if case[0] == "interleaved" else None
            spans = pipeline.simulate(pipeline.find_schedule(*case[:3], chunks))
        except ValueError as e:
            assert rows == str(e).partition(", not")[0]
        else:
            assert rows == json.loads(json.dumps(spans)), case


SETTINGS = "Object.fromEntries(new URLSearchParams(location.hash.slice(1)))"
FOCUS = "document.activeElement.id"


def test_settings_by_keyboard(site, browser):
    """Without a mouse: Tab reaches each control and says so, arrows move it; what is shown follows,
    and the address keeps it."""
    browser.open(f"{site.as_uri()}/play/calculator.html")
    assert browser.run(
        "[...document.forms.layout.elements].every((e) => !e.name || e.labels.length)"
    )
    memory = "document.querySelector('#memory output').value"
    before, reached = browser.run(memory), []
    browser.run("document.forms.layout.elements.model.focus()")
    while "zero" not in reached:
        browser.press("Tab")
        reached.append(browser.run(FOCUS))
        assert browser.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.press("ArrowLeft", times=3)
    assert {"dp", "pp"} <= {*reached} and browser.run(SETTINGS)["zero"] == "0"
    assert browser.run("document.activeElement.getAttribute('aria-valuetext')") == "0"
    assert browser.run(memory) != before and "too much" in browser.run(memory)
    browser.ask("Browser.grantPermissions", permissions=["clipboardReadWrite"])
    browser.run("document.querySelector('.command button').focus()")
    browser.press("Enter")
    assert "--dp 8 --batch" in browser.run("navigator.clipboard.readText()")
    # The same address shows the same
    all_of_it = "[location.href, document.querySelector('.play').innerText]"
    shown = browser.run(all_of_it)
    browser.open(shown[0])
    assert browser.run(all_of_it) == shown


def test_steps_by_keyboard(site, browser):
    browser.open(f"{site.as_uri()}/play/schedules.html#schedule=zb-h1&p=3&m=4&time=0")
    browser.run("document.forms.steps.elements.time.focus()")
    assert browser.run("document.querySelectorAll('#chart i').length") == 3 * 4 * 3
    does = "[...document.querySelectorAll('#ranks tr')].map((row) => row.cells[1].innerText)"
    assert browser.run(does) == ["waits"] * 3
    browser.press("ArrowRight", times=5)
    assert browser.run(does) == ["waits", "inputs' gradient of 0, stage 1", "forward of 1, stage 2"]


@pytest.mark.parametrize("page", ["calculator", "schedules"])
def test_on_a_phone(site, browser, page):
    browser.open(f"{site.as_uri()}/play/{page}.html", width=390)
    assert browser.run("document.documentElement.scrollWidth") == 390
    assert browser.run("[...document.querySelectorAll('.play input')].every((e) => e.offsetWidth)")
    assert browser.errors == []


def test_one_device(site, browser):
    browser.open(f"{site.as_uri()}/play/calculator.html#model=tiny&dp=1&zero=0")
    shown = browser.run("document.querySelector('.play').innerText")
    assert "Layout: 1 device\n" in shown and "nothing" in shown and "0.00000" not in shown
    assert browser.run("document.querySelector('.limit').innerText") == "141 GB"


def test_search_from_the_disk(site, browser):
    browser.open(f"{site.as_uri()}/index.html")
    browser.run("document.querySelector('.md-search__input').focus()")
    browser.ask("Input.insertText", text="all-reduce")
    found = "document.querySelectorAll('.md-search-result__item').length"
    assert browser.run(f"""new Promise((done) => {{
      const look = () => {found} ? done({found}) : setTimeout(look, 20);
      look();
    }})""")


def test_no_page_is_cut(site, browser):
    """At 1280 every line of code and every table has room."""
    cut = """[...document.querySelectorAll("pre > code, .md-typeset__scrollwrap")]
      .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.innerText.slice(0, 80))"""
    pages = [page for page in site.rglob("*.html") if "source" not in page.parts]
    assert len(pages) > 30
    for page in pages:
        browser.open(page.as_uri(), width=1280)
        assert (browser.run(cut), page.name) == ([], page.name)
