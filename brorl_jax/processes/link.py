"""How the processes of a run talk on the host: one TCP connection from every process to process 0.

Over it go small messages: who is there, signs of life, stop signals, and what ``gather`` collects. Arrays on devices
go by jax's own collectives. A link of our own, since jax's answer to a dead process is to abort without saying which,
after its heartbeat time, and since nothing of jax has to be up: a process that is missing, or has another config, is
named before anything is loaded.

A frame is one byte (what), eight bytes (length), and as many bytes: JSON or raw data, never anything that could run.
The link trusts its network, as jax's own coordination does: keep the port behind the cluster's firewall.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from brorl_jax.errors import UserError

MAGIC = b"brorl-jax 1\n"
HEADER = struct.Struct(">cQ")
HELLO, WELCOME, REFUSED, ALIVE, DATA, STOP, LEFT = b"H", b"W", b"R", b"A", b"D", b"S", b"L"
RETRY_S, HELLO_S, TELL_S, PIECE = 0.2, 10.0, 1.0, 1 << 20
MOST = 1 << 20  # bytes of any frame that is not data


class Peer:
    """The other end of one connection."""

    def __init__(self, index: int, connection: socket.socket) -> None:
        self.index, self.connection = index, connection
        self.seen = time.monotonic()  # when it last showed a sign of life
        self.left: str | None = None  # why it went; "": as agreed
        self.inbox: queue.Queue[tuple[str, bytes] | None] = queue.Queue()
        self._lock = threading.Lock()

    def send(self, kind: bytes, *payload: bytes, wait_s: float = -1) -> bool:
        """Sends one frame; False if another is on its way, maybe stuck, and is so after ``wait_s`` (-1: for ever).

        An error is left to the reader, which sees it, too, and knows why.
        """
        if not self._lock.acquire(timeout=wait_s):
            return False
        try:
            self.connection.sendall(HEADER.pack(kind, sum(map(len, payload))))
            for part in payload:
                self.connection.sendall(part)
        except OSError:
            pass
        finally:
            self._lock.release()
        return True

    def receive(self) -> tuple[bytes, bytes]:
        """The next frame.

        Raises:
            OSError: The connection has ended.
        """
        kind, size = HEADER.unpack(self.take(HEADER.size))
        if kind != DATA and size > MOST:
            raise OSError(f"a frame {kind!r} of {size} bytes")
        return kind, self.take(size)

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes; raises ``OSError`` if the connection ends before."""
        data = bytearray()
        while len(data) < size:
            piece = self.connection.recv(min(PIECE, size - len(data)))
            if not piece:
                raise ConnectionError("closed")
            self.seen = time.monotonic()
            data += piece
        return bytes(data)

    def hurry(self) -> None:
        """From now on nothing sent waits for longer than ``TELL_S``: the other end may be stuck, its buffers full."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(TELL_S), 0))

    def gone(self) -> bool:
        """Whether it has closed the connection, as far as is known without waiting."""
        patience = self.connection.gettimeout()
        self.connection.settimeout(0)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.connection.settimeout(patience)


class Link:
    """One process's connections: process 0 has one to every other, the others have one to process 0.

    Args:
        index: Of this process.
        count: Of all.
        peers: The connections.
        lost_after_s: Without a sign of life for so long, a process counts as dead.
        wait_s: Longest wait for a process that is alive.
        die: Called from a thread of the link with one line, when a process is gone; does not return.
    """

    def __init__(
        self,
        index: int,
        count: int,
        peers: list[Peer],
        *,
        lost_after_s: float,
        wait_s: float,
        die: Callable[[str], Any] | None = None,
    ) -> None:
        self.index, self.count = index, count
        self.stop_signal = 0  # set by this process's signal handler or by another process
        self.agreed = False  # all processes end now
        self._peers, self._lost_after_s, self._wait_s = peers, lost_after_s, wait_s
        self._die = die or _exit
        self._leaving = False
        self._told: set[int] = set()  # who knows of our stop signal
        for peer in peers:
            peer.connection.settimeout(None)
            threading.Thread(target=self._listen, args=(peer,), daemon=True).start()
        self._every = min(1.0, lost_after_s / 5)
        for work in (self._beat, self._watch):
            threading.Thread(target=work, daemon=True).start()

    def gather(self, payload: bytes, what: str) -> list[bytes]:
        """The payloads of all processes, in order of their index; all must call it, with the same ``what``.

        Raises:
            UserError: A process did not come within ``wait_s``, or is somewhere else.
        """
        name = what.encode()
        head = struct.pack(">H", len(name)) + name
        if self.index:
            self._peers[0].send(DATA, head, payload)
            packed = self._next(self._peers[0], what)
            sizes = struct.unpack_from(f">{self.count}Q", packed)
            parts, at = [], 8 * self.count
            for size in sizes:
                parts.append(packed[at : at + size])
                at += size
            return parts
        parts = [payload, *(self._next(peer, what) for peer in self._peers)]
        sizes = struct.pack(f">{self.count}Q", *map(len, parts))
        for peer in self._peers:
            peer.send(DATA, head, sizes, *parts)
        return parts

    def leave(self, reason: str = "") -> None:
        """Tells the others that this process goes: as agreed, or for ``reason``, which ends them, too."""
        self._leaving = True
        for peer in self._peers:
            peer.hurry()
            peer.send(LEFT, f"process {self.index} stopped: {reason}"[:2000].encode() if reason else b"")
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)  # what is under way still arrives

    def _next(self, peer: Peer, what: str) -> bytes:
        """The next data of a process."""
        try:
            item = None if peer.left is not None and peer.inbox.empty() else peer.inbox.get(timeout=self._wait_s)
        except queue.Empty:
            late = f"process {peer.index}" if self.index == 0 else "process 0, or one that this waits for"
            raise UserError(
                f"waited {self._wait_s:g} s for {late} at {what!r}: it is alive but does not come; "
                "see its output, or raise config.processes.wait_s"
            ) from None
        if item is None:
            raise UserError(f"process {peer.index} has ended, this one waits for it at {what!r}")
        if item[0] != what:
            raise UserError(f"process {peer.index} is at {item[0]!r}, this one at {what!r}: they have drifted apart")
        return item[1]

    def _listen(self, peer: Peer) -> None:
        """Reads all that a process sends."""
        try:
            while True:
                kind, payload = peer.receive()
                if kind == DATA:
                    (size,) = struct.unpack_from(">H", payload)
                    peer.inbox.put((payload[2 : 2 + size].decode(), payload[2 + size :]))
                elif kind == STOP:
                    self.stop_signal = self.stop_signal or payload[0]
                elif kind == LEFT:
                    peer.left = payload.decode()
                    peer.inbox.put(None)
                    if peer.left and not self._leaving:
                        self._lost(peer.left)
        except Exception as error:  # not only its end: without a reader, it would be waited for in vain
            if peer.left is None and not self._leaving:
                self._lost(f"process {peer.index} is gone ({error or type(error).__name__})")

    def _lost(self, text: str) -> None:
        for peer in self._peers:  # process 0 tells the others, which see only itself
            if peer.left is None:
                peer.hurry()
                peer.send(LEFT, text.encode(), wait_s=TELL_S)
        self._die(text)

    def _beat(self) -> None:
        """Shows that this process lives, and passes its stop signal on. May get stuck, so it looks after nothing."""
        while not self._leaving:
            for peer in self._peers:
                told = not self.stop_signal or peer.index in self._told
                if not told and peer.send(STOP, bytes([self.stop_signal]), wait_s=0):
                    self._told.add(peer.index)
                peer.send(ALIVE, wait_s=0)  # data under way is a sign of life as well
            time.sleep(self._every)

    def _watch(self) -> None:
        """Looks for silence, from its first look on: a process may have waited long for the others to come."""
        woke = float("-inf")
        while not self._leaving:
            now = time.monotonic()
            slept, woke = now - woke, now
            for peer in self._peers:
                if slept > self._lost_after_s / 2:  # suspended, perhaps all of us: what was sent is still to be read
                    peer.seen = now
                silent = now - peer.seen
                if peer.left is None and silent > self._lost_after_s and not self._leaving:
                    self._lost(f"process {peer.index} has shown no sign of life for {silent:.0f} s")
            time.sleep(self._every)


def _exit(text: str) -> None:
    """Ends this process at once: its main thread may be in a collective that never returns."""
    try:
        os.write(2, f"\nerror: {text}; this process stops, the same commands resume the run\n".encode())
        sys.stdout.flush()
    finally:  # even if nobody reads that
        os._exit(1)


def connect(
    address: tuple[str, int], index: int, count: int, facts: dict[str, Any], *, start_timeout_s: float
) -> tuple[list[Peer], dict[str, Any]]:
    """Finds the other processes and compares what must be equal; returns the connections and process 0's facts.

    Args:
        address: Of process 0: host and port.
        facts: JSON-able, flat; those whose name begins with ``_`` may differ.

    Raises:
        UserError: Processes are missing after ``start_timeout_s``, or differ; the message names them.
    """
    deadline = time.monotonic() + start_timeout_s
    return (_join if index else _host)(address, index, count, facts, deadline, start_timeout_s)


def _host(
    address: tuple[str, int], _: int, count: int, facts: dict[str, Any], deadline: float, patience: float
) -> tuple[list[Peer], dict[str, Any]]:
    where = text(address)
    try:
        server = socket.create_server((_own(address[0]), address[1]), family=family(address[0]), backlog=128 + count)
    except OSError as error:
        raise UserError(f"process 0 cannot listen on --coordinator={where}: {error.strerror or error}") from error
    peers: dict[int, Peer] = {}
    came: queue.Queue[tuple[Peer, dict[str, Any]]] = queue.Queue()
    over = threading.Event()
    with server:
        server.settimeout(RETRY_S)
        try:
            while len(peers) < count - 1:
                if time.monotonic() > deadline:
                    missing = ", ".join(str(i) for i in range(1, count) if i not in peers)
                    raise UserError(
                        f"{len(peers) + 1} of {count} processes came within {patience:g} s, missing: {missing}; start "
                        f"them with --coordinator={where}, or raise config.processes.start_timeout_s"
                    )
                with contextlib.suppress(OSError):  # nobody, or one that is gone already
                    connection = _tuned(server.accept()[0], HELLO_S)
                    threading.Thread(target=_greet, args=(connection, came, over), daemon=True).start()
                while not came.empty():
                    peer, theirs = came.get_nowait()
                    if problem := _problem(theirs, count, facts, peers):
                        peer.send(REFUSED, problem.encode())
                        raise UserError(problem)
                    peer.index = theirs["index"]
                    peers[peer.index] = peer
            for peer in peers.values():
                peer.send(WELCOME, json.dumps(facts).encode())
        except UserError as error:
            for peer in peers.values():
                peer.send(REFUSED, str(error).encode())
            raise
        finally:
            over.set()
            while not came.empty():
                came.get_nowait()[0].connection.close()
    return [peers[i] for i in sorted(peers)], facts


def _own(host: str) -> str:
    """Where process 0 listens: at its address; everywhere if its name means loopback to itself, as Debian makes it."""
    named = host != "localhost" and not host[0].isdigit() and ":" not in host
    return "" if named and socket.gethostbyname(host).startswith("127.") else host


def _greet(connection: socket.socket, came: queue.Queue[tuple[Peer, dict[str, Any]]], over: threading.Event) -> None:
    """Hears out who has connected: a process goes to ``came``, a stranger is turned away and keeps nobody waiting."""
    peer = Peer(-1, connection)
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if peer.take(len(MAGIC)) == MAGIC:
            kind, payload = peer.receive()
            theirs = json.loads(payload)
            if kind == HELLO and _is_hello(theirs) and not over.is_set():
                came.put((peer, theirs))
                if not over.is_set():
                    return
    connection.close()


def _is_hello(theirs: Any) -> bool:
    if not isinstance(theirs, dict) or not isinstance(theirs.get("facts"), dict):
        return False
    index, count = theirs.get("index"), theirs.get("count")
    return isinstance(index, int) and isinstance(count, int) and 0 < index < count


def _problem(theirs: dict[str, Any], count: int, facts: dict[str, Any], peers: dict[int, Peer]) -> str:
    """Why a process that said hello cannot take part; empty if it can."""
    index, name = theirs["index"], f"process {theirs['index']}"
    if theirs["count"] != count:
        return f"{name} was started with --processes={theirs['count']}, process 0 with --processes={count}"
    if index in peers and not peers[index].gone():  # else it was started again
        return f"two processes were started with --process_id={index}"
    for key in {**facts, **theirs["facts"]}:
        ours, other = facts.get(key), theirs["facts"].get(key)
        if ours != other and not key.startswith("_"):
            return f"{name} has {key} = {other!r}, process 0 has {ours!r}; start all with the same command"
    return ""


def _join(
    address: tuple[str, int], index: int, count: int, facts: dict[str, Any], deadline: float, patience: float
) -> tuple[list[Peer], dict[str, Any]]:
    where, trouble = text(address), "nothing tried"
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection(address, timeout=HELLO_S)
        except OSError as error:
            trouble = error.strerror or str(error)
            time.sleep(RETRY_S)  # process 0 may start later than we
            continue
        peer = Peer(0, _tuned(connection, deadline - time.monotonic() + HELLO_S))
        try:
            connection.sendall(MAGIC)
            peer.send(HELLO, json.dumps({"index": index, "count": count, "facts": facts}).encode())
            kind, payload = peer.receive()
        except OSError as error:
            raise UserError(
                f"process 0 at --coordinator={where} ended before all processes had come, or another program listens "
                f"there ({error})"
            ) from error
        if kind == REFUSED:
            raise UserError(payload.decode())
        if kind != WELCOME:
            raise UserError(f"--coordinator={where}: another program listens there")
        return [peer], json.loads(payload)
    raise UserError(
        f"process {index} found no process 0 at --coordinator={where} within {patience:g} s ({trouble}); "
        "start it, or raise config.processes.start_timeout_s"
    )


def _tuned(connection: socket.socket, timeout: float) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(timeout)
    return connection


def family(host: str) -> socket.AddressFamily:
    """Of a host's address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def text(address: tuple[str, int]) -> str:
    """``host:port`` or ``[IPv6]:port``."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
