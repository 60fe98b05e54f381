"""Runs a judged program on inputs. Shares the program's process: its word counts for nothing beyond the data it hands
over, and it is given nothing worth stealing.

Requests arrive marshalled on standard input, each with its length before it; a reply is a kind and its bytes:
``o`` exit status and standard output, ``v`` a value, ``e`` an exception, ``t`` out of time.
Imports are few because each one is paid for by every program.
"""

import marshal
import os
import resource
import select
import sys
import time
from _json import encode_basestring_ascii as quote

MAX_OUTPUT = 4 << 20  # of one test, bytes
MAX_VALUE = 16 << 20  # the largest that HumanEval+ asks for have 12 MB
_CHUNK = 1 << 16
_KILL = 9  # importing "signal" would take a third of the start-up time

_requests = os.dup(0)
_replies = os.dup(1)
_module = type(sys)("__main__")
_objects = {}


# --- talking ---------------------------------------------------------------------------------------------------------


def _read(count):
    data = b""
    while len(data) < count:
        chunk = os.read(_requests, min(count - len(data), 1 << 20))
        if not chunk:
            os._exit(0)
        data += chunk
    return data


def _reply(kind, data=b"", fd=None):
    data = len(data).to_bytes(4, "big") + kind + data
    while data:
        data = data[os.write(_replies if fd is None else fd, data) :]


def _failure(error):
    try:
        text = str(error)[:300]
    except BaseException:
        text = ""
    return f"[{quote(type(error).__name__)},{quote(text)}]".encode()


_CONTAINERS: tuple = (list, "l"), (tuple, "t"), (set, "s"), (frozenset, "f")


def _plain_items(items, room):
    """Many items at once, a tenth of the time: where all are texts, or all are numbers that need no tag; else ""."""
    kinds = {*map(type, items)}
    if kinds == {str} and sum(map(len, items)) <= room:
        return ",".join(map(quote, items))
    if kinds <= {int, float} and all(-(1 << 62) < x < 1 << 62 if type(x) is int else x - x == 0 for x in items):
        return ",".join(map(repr, items))
    return ""


class _Writer:
    """Values as text, in pieces; gives up once they grow beyond MAX_VALUE."""

    def __init__(self, keep):
        self.keep, self.left, self.parts = keep, MAX_VALUE, []

    def put(self, text):
        self.left -= len(text)
        if self.left < 0:
            raise ValueError("the value is too large")
        self.parts.append(text)

    def many(self, tag, items):
        items = [*items]
        self.put(f'["{tag}",[')
        if text := _plain_items(items, self.left):
            return self.put(text + "]]")
        for i, item in enumerate(items):
            if i:
                self.put(",")
            self.write(item)
        self.put("]]")

    def write(self, x):
        if x is None or x is True or x is False:
            self.put("null" if x is None else "true" if x else "false")
        elif isinstance(x, int):
            x = int.__pos__(x)
            self.put(int.__repr__(x) if -(1 << 62) < x < 1 << 62 else f'["i","{x:x}"]')
        elif isinstance(x, float):
            x = float.__pos__(x)
            self.put("NaN" if x != x else "Infinity" if x == 1e999 else "-Infinity" if x == -1e999 else repr(x))
        elif isinstance(x, str):
            self.left -= len(x)
            if self.left < 0:
                raise ValueError("the value is too large")
            self.put(quote(str.__str__(x)))
        elif isinstance(x, (bytes, bytearray)):
            self.put(f'["b",{quote(bytes(x[:MAX_VALUE]).decode("latin-1"))}]')
        elif isinstance(x, complex):
            self.put('["c",')
            self.write(x.real)
            self.put(",")
            self.write(x.imag)
            self.put("]")
        elif isinstance(x, range):
            self.put(f'["g",{x.start},{x.stop},{x.step}]')
        elif isinstance(x, dict):
            self.put('["d",[')
            for i, (k, v) in enumerate(dict.items(x)):
                self.put("[" if not i else ",[")
                self.write(k)
                self.put(",")
                self.write(v)
                self.put("]")
            self.put("]]")
        else:
            for kind, tag in _CONTAINERS:
                if isinstance(x, kind):
                    return self.many(tag, kind.__iter__(x))
            self.other(x)

    def other(self, x):
        if type(x).__module__ == "numpy" and hasattr(x, "tolist"):
            return self.write(x.tolist())  # arrays and their numbers cross as lists and numbers
        if not self.keep:
            raise TypeError(f"a {type(x).__name__} is no plain value")
        _objects[id(x)] = x
        self.put(f'["r",{id(x)}]')


def _value(x, keep=False):
    writer = _Writer(keep)
    writer.write(x)
    return "".join(writer.parts).encode()


def _target(key):
    """An object by its number, or what a name stands for in the program."""
    if not isinstance(key, str):
        return _objects[key]
    return _module.__dict__[key] if key in _module.__dict__ else _module.__builtins__.__dict__[key]


def _revive(x):
    """References among arguments become the objects they stand for."""
    if isinstance(x, frozenset) and len(x) == 1:
        (only,) = x
        if isinstance(only, tuple) and len(only) == 2 and only[0] == "\0ref":
            return _target(only[1])
    if isinstance(x, (list, tuple, set)):
        return type(x)(map(_revive, x))
    if isinstance(x, dict):
        return {_revive(k): _revive(v) for k, v in x.items()}
    return x


# --- requests --------------------------------------------------------------------------------------------------------


def limits(cpu, memory, processes, file, files):
    """Hard limits: from here on nothing can raise them."""
    for name, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, file),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NPROC, processes),
    ):
        resource.setrlimit(name, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    _reply(b"v", b"null")


def load(prefix, source, run):
    """Compiles ``source``; as a module (``run``) also executes it, after ``prefix``."""
    global _program
    import builtins

    builtins.exit = builtins.quit = sys.exit  # "site" would define them
    _module.__name__ = _module.__dict__["__name__"] = "solution" if run else "__main__"
    _module.__dict__["__builtins__"] = builtins
    sys.modules[_module.__name__] = _module
    sys.argv = ["main.py"]
    try:
        prefix = compile(prefix, "prefix.py", "exec", dont_inherit=True)
        _program = [prefix, compile(source, "main.py", "exec", dont_inherit=True)]
    except BaseException as error:
        return _reply(b"c", _failure(error))
    try:
        if run:
            for code in _program:
                exec(code, _module.__dict__)
    except BaseException as error:
        return _reply(b"e", _failure(error))
    _reply(b"v", b"null")


def script(data, seconds):
    """Runs the program with ``data`` on its standard input, in a process of its own."""

    def body():
        for code in _program:
            exec(code, _module.__dict__)

    _apart(body, data, seconds, 1)


def call(name, args, seconds):
    """Calls a function of the program, in a process of its own."""

    def body():
        found = _module.__dict__.get(name)
        if found is None and "Solution" in _module.__dict__:
            found = getattr(_module.__dict__["Solution"](), name, None)
        if found is None:
            raise NameError(f"name {name!r} is not defined")
        data = _value(found(*args))
        while data:
            data = data[os.write(3, data) :]

    _apart(body, b"", seconds, 3)


def _apart(body, data, seconds, out_fd):
    """Forks, gives the child ``data`` to read, and replies with its exit status and what it wrote to ``out_fd``."""
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setsid()
            os.dup2(in_read, 0)
            os.dup2(out_write, 60)
            os.closerange(3, 60)
            os.dup2(60, out_fd)
            os.close(60)
            os._exit(_finish(body))
        finally:
            os._exit(1)
    os.close(in_read)
    os.close(out_write)
    status, out = _collect(child, in_write, out_read, data, time.monotonic() + seconds)
    os.close(out_read)
    if status is None:
        _reply(b"t")
    else:
        _reply(b"o", status.to_bytes(4, "big", signed=True) + b"".join(out))


def _finish(body):
    """Runs ``body`` to the end as an interpreter would: threads joined, exit handlers run, output flushed."""
    status = 0
    try:
        body()
    except SystemExit as exit:
        status = 0 if exit.code is None else exit.code & 255 if isinstance(exit.code, int) else 1
    except BaseException:
        status = 1
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        if "atexit" in sys.modules:
            sys.modules["atexit"]._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        status = status or 1
    return status


def _collect(child, in_write, out_read, data, deadline):
    """Feeds the child and reads its output till it ends; its whole process group is gone afterwards.

    Returns:
        The exit status, None out of time; and the pieces of output, up to MAX_OUTPUT.
    """
    os.set_blocking(in_write, False)
    os.set_blocking(out_read, False)
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(out_read, select.POLLIN)
    poll.register(in_write, select.POLLOUT)
    data, out, size, late, is_open = memoryview(data), [], 0, False, True
    while True:
        left = deadline - time.monotonic()
        ready = dict(poll.poll(max(left, 0) * 1000)) if left > 0 else {}
        late = not ready
        if in_write in ready:
            try:
                data = data[os.write(in_write, data[:_CHUNK]) :] if data else data
            except OSError:
                data = data[:0]
            if not data:
                poll.unregister(in_write)
                os.close(in_write)
                in_write = -1
        chunk = b""
        if is_open and (out_read in ready or ended in ready):
            try:
                chunk = os.read(out_read, _CHUNK)
                if not chunk:
                    is_open = False
                    poll.unregister(out_read)
            except BlockingIOError:
                pass
            out.append(chunk)
            size += len(chunk)
        if late or size > MAX_OUTPUT or (ended in ready and not chunk):
            break
    for kill in (os.kill, os.killpg):
        try:
            kill(child, _KILL)
        except ProcessLookupError:  # it had not come to make its group
            continue
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(ended)
    if in_write >= 0:
        os.close(in_write)
    return (None if late else status), out


# --- objects, for assertions -----------------------------------------------------------------------------------------


def ask(what, target, *rest):
    """One operation on the program's objects, in this process: get, call, attr, set, iter, len, item, str."""
    try:
        target = _target(target)
        if rest[-1]:
            rest = [_revive(x) for x in rest]
        result = target if what == "get" else _operations[what](target, *rest[:-1])
        data = _value(result, keep=True)
    except BaseException as error:
        return _reply(b"e", _failure(error))
    _reply(b"v", data)


_operations = {
    "call": lambda f, args, kwargs: f(*args, **kwargs),
    "attr": getattr,
    "set": setattr,
    "iter": list,
    "len": len,
    "item": lambda x, key: x[key],
    "str": str,
    "bool": bool,
}

_handlers = {"limits": limits, "load": load, "script": script, "call": call, "ask": ask}
while True:
    _name, *_arguments = marshal.loads(_read(int.from_bytes(_read(4), "big")))
    _handlers[_name](*_arguments)
