"""The meeting point of islands: python -m trainer.meeting --listen 0.0.0.0:29700 --secret-file S

Each island is a job of its own, anywhere. Its first rank connects to the meeting point, a small
process on a host that all of them reach. It computes nothing and keeps no weights: it passes the
islands' messages on, and decides who takes part in an outer step. So all islands average the same
messages, also where one of them is missing.

    island 0 ---+                       a round: one part of the model at one step
    island 1 ---+--- meeting point      done when all members' messages are there, or when the
    island 2 ---+                       timeout has passed: then it goes on with those that are

    join        an island comes. At the start all wait for each other, and the one that is furthest
                is the source. Later a member is the source: it sends its weights and outer momentum
                to the newcomer, which is a member from the next step on
    part        a member's message of a round. The reply has the messages of all who take part. A
                member that misses a round is none any more: its late message is refused, and it
                joins again
    fetch       a newcomer asks for a round that was under way when it got its weights
    state       the source's answer to `wanted`
    bye         an island leaves

Whoever connects must know the secret: both sides answer a random challenge with an HMAC of it.
Every frame then carries an HMAC under a key of this connection alone, with its number, so nothing
can be forged, replayed or left out. Contents are JSON and raw bytes: nothing is unpickled. It is
not encrypted: across networks of others take a tunnel, such as WireGuard or ssh.
"""

import contextlib
import hashlib
import hmac
import json
import os
import queue
import socket
import struct
import threading
import time

import harness
from harness import Refused, say

LARGEST = 1 << 40  # bytes of a frame
HEAD = struct.Struct(">IQ")  # bytes of the JSON, bytes of the rest
GREETING = 5.0  # seconds in which a stranger must show that it knows the secret


class LinkLost(ConnectionError):
    """The other side is gone, or is not who it says."""


class Stranger(LinkLost):
    """The other side has another secret."""


# --- frames between two who share a secret


def read_secret(path):
    """The secret in a file: its text, without white space around it."""
    try:
        with open(path, "rb") as file:
            secret = file.read(4096).strip()
    except OSError as e:
        raise Refused(f"--secret-file {path} can't be read ({e.strerror})") from e
    if len(secret) < 16:
        advice = f"put a longer one there: openssl rand -hex 32 > {path}"
        raise Refused(f"--secret-file {path} has {len(secret)} characters, too few: {advice}")
    return secret


def address(text):
    """HOST:PORT as (host, port). Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise ValueError(f"{text[:80]!r} is no HOST:PORT, such as 10.0.0.1:29700")
    return host.strip("[]"), int(port)


class Wire:
    """An authenticated connection. `sent` and `received` count its bytes."""

    def __init__(self, connection, secret, is_server):
        self.connection, self.is_server = connection, is_server
        self.sent = self.received = 0
        self.numbers = [0, 0]  # frames sent and received
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.settimeout(GREETING)
        own = os.urandom(32)
        connection.sendall(own)
        other = self.read(32)
        server, client = (own, other) if is_server else (other, own)
        both = server + client
        connection.sendall(sign(secret, b"server" if is_server else b"client", both))
        expected = sign(secret, b"client" if is_server else b"server", both)
        if not hmac.compare_digest(bytes(self.read(32)), expected):
            raise Stranger("it does not know the secret")
        self.key = sign(secret, b"key", both)
        connection.settimeout(None)

    def send(self, kind, payload=b"", **about):
        """Send a frame: JSON and bytes."""
        text = json.dumps(about | {"kind": kind}).encode()
        head = HEAD.pack(len(text), len(payload))
        parts = head, self.mac(True, head), text, payload, self.mac(True, text, payload)
        self.numbers[0] += 1
        for part in parts:
            self.connection.sendall(part)
            self.sent += len(part)

    def receive(self):
        """The next frame: (kind, dict, bytes)."""
        head = self.read(HEAD.size)
        self.verify(self.read(32), self.mac(False, head))
        text_bytes, payload_bytes = HEAD.unpack(head)
        if text_bytes > 1 << 20 or payload_bytes > LARGEST:
            raise LinkLost("a frame is too large")
        text, payload = self.read(text_bytes), self.read(payload_bytes)
        self.verify(self.read(32), self.mac(False, text, payload))
        self.numbers[1] += 1
        about = json.loads(text)
        return about.pop("kind"), about, payload

    def mac(self, sending, *parts):
        """Of parts of the next frame in one direction."""
        direction = b"server" if sending == self.is_server else b"client"
        number = self.numbers[0 if sending else 1].to_bytes(8, "big")
        return sign(self.key, direction + number + bytes([len(parts)]), *parts)

    def verify(self, given, expected):
        if not hmac.compare_digest(bytes(given), expected):
            raise LinkLost("a frame was changed on its way")

    def read(self, size):
        """Exactly `size` bytes."""
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                n = self.connection.recv_into(view[: 1 << 20])
            except OSError as e:
                raise LinkLost(f"the connection broke ({e.strerror or e})") from e
            if n == 0:
                raise LinkLost("the connection was closed")
            view = view[n:]
            self.received += n
        return data

    def close(self):
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def sign(key, *parts):
    signature = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        signature.update(part)
    return signature.digest()


class Peer:
    """The other end of a wire. A thread sends to it, so that nobody waits for a slow link."""

    def __init__(self, wire):
        self.wire, self.outgoing = wire, queue.SimpleQueue()
        threading.Thread(target=self.write, daemon=True).start()

    def send(self, kind, payload=b"", **about):
        self.outgoing.put((kind, payload, about))

    def close(self):
        """After what is still to be sent."""
        self.outgoing.put(None)

    def write(self):
        while frame := self.outgoing.get():
            kind, payload, about = frame
            try:
                self.wire.send(kind, payload, **about)
            except OSError:
                break
        self.wire.close()


# --- the meeting point


class Member(Peer):
    """An island that is connected."""

    def __init__(self, wire, island):
        super().__init__(wire)
        self.island = island
        self.step, self.digest = 0, 0  # where it is, when it joins
        self.active_after = 0  # it takes part in rounds of later steps than this one
        self.said_bye = False


class Round:
    """One part of the model at one step."""

    def __init__(self):
        self.messages, self.listeners = {}, []  # {island: bytes}; newcomers who want them
        self.began = time.monotonic()


class MeetingPoint:
    """Serves islands until `stop` is set. All that threads share is behind `lock`."""

    def __init__(self, secret, log=say):
        self.secret, self.log = secret, log
        self.lock = threading.Lock()
        self.members = {}  # {island: Member}, active ones
        self.joining = {}  # {island: Member} that wait for weights, or for the start
        self.settings, self.options = None, {}  # of the run, by whoever came first
        self.rounds = {}  # {(step, part): Round} under way
        self.done = {}  # {part: (step, {island: bytes})} the latest round of each part
        self.source = None  # the member that was asked for its weights
        self.first_join, self.started = 0.0, False
        self.strangers = threading.Semaphore(64)  # those that have not shown the secret yet

    def serve(self, listener):
        """Accept islands until the listening socket is closed."""
        threading.Thread(target=self.watch, daemon=True).start()
        while True:
            try:
                connection, where = listener.accept()
            except OSError:
                return
            threading.Thread(target=self.greet, args=(connection, where), daemon=True).start()

    def greet(self, connection, where):
        """The life of one connection."""
        if not self.strangers.acquire(blocking=False):
            return connection.close()
        try:
            wire = Wire(connection, self.secret, is_server=True)
        except OSError as e:
            connection.close()
            return self.log(f"turned away {where[0]}: {e}")
        finally:
            self.strangers.release()
        member = None
        try:
            while True:
                kind, about, payload = wire.receive()
                if kind == "bye":
                    if member:
                        member.said_bye = True
                    return
                if member is None:
                    member = Member(wire, int(about["island"]))  # its first frame is `join`
                with self.lock:
                    if kind == "join":
                        self.join(member, about)
                    elif kind == "part":
                        self.take(member, about["step"], about["part"], payload)
                    elif kind == "fetch":
                        self.fetch(member, about["step"], about["part"])
                    elif kind == "state":
                        self.pass_on(member, about, payload)
        except OSError:
            pass  # it is gone
        except (KeyError, ValueError, TypeError) as e:
            self.log(f"an island sent nonsense ({e!r})")
        finally:
            wire.close()
            if member:
                member.close()
                with self.lock:
                    self.leave(member)

    # What follows runs with the lock

    def join(self, member, about):
        old = self.members.get(member.island) or self.joining.get(member.island)
        if old not in (None, member):  # the process that this one replaces
            self.leave(old)
            old.close()
        if not self.members and not self.joining:
            self.settings, self.options = about["settings"], about
            self.rounds, self.done, self.source = {}, {}, None
            self.first_join = time.monotonic()
        if about["settings"] != self.settings:
            return member.send("refused", why="it has other settings than the islands before it")
        if not 0 <= member.island < about["islands"]:
            return member.send("refused", why=f"there is no island {member.island}")
        member.step, member.digest = about["step"], about["digest"]
        self.joining[member.island] = member
        if self.members:
            self.ask_source()
        elif len(self.joining) == about["islands"]:
            self.start()

    def start(self):
        """All are there, or time is up: those that are where the furthest is go on from there."""
        self.started = True
        first = max(self.joining.values(), key=lambda m: (m.step, -m.island))
        missing = sorted(set(range(self.options["islands"])) - set(self.joining))
        if missing:
            self.log(f"starting without {names(missing)}")
        for island, member in sorted(self.joining.items()):
            if (member.step, member.digest) == (first.step, first.digest):
                self.admit(member, first.step)
                del self.joining[island]
        for member in self.members.values():  # the first tells the others before it goes on
            tells = bool(self.joining) and member is first
            self.source = first if tells else self.source
            member.send("go", step=member.step, state=False, tell=tells)

    def admit(self, member, step):
        self.members[member.island] = member
        member.active_after = step

    def ask_source(self):
        """Ask a member for its weights if somebody waits for them."""
        if self.joining and self.members and self.source not in self.members.values():
            self.source = self.members[min(self.members)]
            self.source.send("wanted")

    def pass_on(self, source, about, payload):
        """The source's weights: for all who wait."""
        self.source = None
        for island, member in sorted(self.joining.items()):
            self.admit(member, about["step"])
            member.send("go", payload, **about | {"state": True})
            where = f"island {source.island}, step {about['step']}"
            self.log(f"island {island} takes the weights of {where}")
        self.joining = {}

    def take(self, member, step, part, message):
        latest = self.done.get(part, (-1,))[0]
        if self.members.get(member.island) is not member or step <= latest:
            return member.send("late", step=step, part=part)
        current = self.rounds.setdefault((step, part), Round())
        current.messages[member.island] = message
        self.check(step, part)

    def check(self, step, part, late=False):
        """End a round if nobody is missing, or if it is late."""
        current = self.rounds[step, part]
        expected = {i for i, m in self.members.items() if m.active_after < step}
        missing = sorted(expected - set(current.messages))
        if missing and not late:
            return
        del self.rounds[step, part]
        for island in missing:  # it comes back with `join`
            del self.members[island]
        if missing:
            self.log(f"step {step} goes on without {names(missing)}")
        self.done[part] = step, current.messages
        for island in current.messages:
            if island in self.members:
                self.reply(self.members[island], step, part)
        for member in current.listeners:
            self.reply(member, step, part)

    def reply(self, member, step, part):
        """Send a member what the others have said in a round, and what it has said if it does not
        know: after it has joined anew."""
        messages = self.done[part][1]
        known = member.island in messages and member.active_after < step
        told = [i for i in sorted(messages) if i != member.island or not known]
        about = {"step": step, "part": part, "islands": told}
        about["sizes"] = [len(messages[i]) for i in told]
        about["missing"] = sorted(set(range(self.options["islands"])) - set(messages))
        member.send("result", b"".join(messages[i] for i in told), **about)

    def fetch(self, member, step, part):
        if (step, part) in self.rounds:
            self.rounds[step, part].listeners.append(member)
        elif self.done.get(part, (-1,))[0] == step:
            self.reply(member, step, part)
        else:
            member.send("late", step=step, part=part)

    def leave(self, member):
        for where in (self.members, self.joining):
            if where.get(member.island) is member:
                del where[member.island]
                if not member.said_bye:
                    self.log(f"island {member.island} is gone")
        if self.source is member:
            self.source = None
        for step, part in list(self.rounds):
            self.check(step, part)
        self.ask_source()

    def watch(self):
        """A thread: what waits too long goes on without those who are missing."""
        while True:
            time.sleep(0.05)
            with self.lock:
                now = time.monotonic()
                for step, part in list(self.rounds):
                    began = self.rounds[step, part].began
                    if now - began > self.options["island_timeout"]:
                        self.check(step, part, late=True)
                waits = self.joining and not self.members
                if waits and now - self.first_join > self.options["start_timeout"]:
                    self.start()


def names(islands):
    return ", ".join(f"island {island}" for island in islands)


# --- an island's end


class Link:
    """An island's connection to the meeting point."""

    def __init__(self, where, secret, patience):
        self.replies, self.answers, self.patience = {}, queue.SimpleQueue(), patience
        self.wanted = threading.Event()  # the meeting point wants this island's weights
        deadline = time.monotonic() + patience
        while True:
            try:
                connection = socket.create_connection(where, timeout=GREETING)
                self.wire = Wire(connection, secret, is_server=False)
                break
            except Stranger as e:
                advice = "give both the same --secret-file"
                raise LinkLost(f"{where[0]}, port {where[1]}, has another secret: {advice}") from e
            except OSError as e:
                if time.monotonic() > deadline:
                    raise LinkLost(f"no meeting point on {where[0]}, port {where[1]}: {e}") from e
                time.sleep(0.1)
        self.peer = Peer(self.wire)
        threading.Thread(target=self.read, daemon=True).start()

    def join(self, **about):
        """Wait for the others, or for a member's weights. Returns (dict, bytes) of the answer."""
        self.peer.send("join", **about)
        kind, about, payload = self.wait(self.answers)
        if kind == "refused":
            raise Refused(f"the meeting point turns this island away: {about['why']}")
        return about, payload

    def ask(self, kind, step, part, message=b"", **about):
        """Send a round's message, or fetch a round. Returns a function that waits for (kind, dict,
        bytes) of the reply."""
        reply = self.replies[step, part] = queue.SimpleQueue()
        self.peer.send(kind, message, step=step, part=part, **about)
        if not self.alive:
            reply.put(LinkLost("the meeting point is lost"))
        return lambda: self.wait(reply)

    alive = True

    def read(self):
        """The work of a thread."""
        try:
            while True:
                kind, about, payload = self.wire.receive()
                if kind == "wanted":
                    self.wanted.set()
                elif kind in ("result", "late"):
                    self.replies.pop((about["step"], about["part"])).put((kind, about, payload))
                else:
                    self.answers.put((kind, about, payload))
        except (OSError, KeyError, ValueError) as e:
            self.alive = False
            lost = LinkLost(f"the meeting point is lost ({e})")
            for waiting in [self.answers, *self.replies.values()]:
                waiting.put(lost)

    def wait(self, answers):
        try:
            answer = answers.get(timeout=self.patience)
        except queue.Empty:
            raise LinkLost(f"the meeting point has not answered for {self.patience:g} s") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def leave(self):
        self.peer.send("bye")
        self.peer.close()


# --- alone, as a process


def listen(where):
    """A listening socket."""
    try:
        return socket.create_server(where, family=socket.AF_INET)
    except OSError as e:
        raise Refused(f"can't listen on {where[0]}, port {where[1]} ({e.strerror})") from e


def main():
    parser = harness.Parser(__doc__)
    g = parser.add_argument_group("the meeting point")
    g.add_argument("--listen", metavar="HOST:PORT", default="127.0.0.1:29700", help="where")
    why = "a file with the secret that the islands know too: at least 16 characters"
    g.add_argument("--secret-file", metavar="FILE", required=True, help=why)
    args = parser.parse_args()
    try:
        where = address(args.listen)
    except ValueError as e:
        raise Refused(f"--listen: {e}") from e
    secret = read_secret(args.secret_file)
    listener = listen(where)
    say(f"islands meet on {where[0]}, port {listener.getsockname()[1]}")
    MeetingPoint(secret).serve(listener)


if __name__ == "__main__":
    harness.script(main)
