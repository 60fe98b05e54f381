"""Runs a problem's own assertions in a sandbox of its own, against a program that runs in another one.

The names that the program defines are stand-ins here: calling one sends the arguments out and brings plain data back.
So the assertions, what they expect and how they compare never come near the program. Each job runs in a fork; numpy is
imported once, when a job first needs it.

Frames have their length before them; jobs arrive marshalled. Sent: ``q`` a question for the program (marshalled), ``r``
the results (JSON; null if the program is gone, text if the tests do not run). Received besides jobs: the program's
replies, ``v`` a value, ``e`` an exception, anything else if it is gone.
"""

import builtins
import contextlib
import importlib
import io
import json
import marshal
import os
import resource
import symtable
import sys

# The first two would end a loop of the test early, and pass it; the last can't be made from a text.
_REFUSED = StopIteration, StopAsyncIteration, UnicodeError, BaseExceptionGroup
_MAX_DEPTH, _MAX_RANGE = 200, 1_000_000
_requests, _replies = os.dup(0), os.dup(1)


class Gone(BaseException):
    """The program ended or ran out of time."""


class Unsupported(BaseException):
    """The test asks for something that can't cross to the program: the verifier's fault, not the program's."""


class ProgramError(Exception):
    """An exception of the program without a built-in name."""


# --- talking ---------------------------------------------------------------------------------------------------------


def _read(count):
    data = b""
    while len(data) < count:
        chunk = os.read(_requests, min(count - len(data), 1 << 20))
        if not chunk:
            os._exit(0)
        data += chunk
    return data


def _receive():
    return _read(int.from_bytes(_read(4), "big"))


def _send(kind, data):
    data = len(data).to_bytes(4, "big") + kind + data
    while data:
        data = data[os.write(_replies, data) :]


def _question(what, target, *rest):
    """One operation on the program's objects; raises what the program raised."""
    try:
        data = marshal.dumps(("ask", what, target, *rest, False))
    except ValueError:
        data = marshal.dumps(("ask", what, target, *map(_plain, rest), True))
    _send(b"q", data)
    reply = _receive()
    if reply[:1] == b"v":
        return _build(json.loads(reply[1:]))
    if reply[:1] != b"e":
        raise Gone
    name, text = json.loads(reply[1:])
    kind = getattr(builtins, str(name), None)
    if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, _REFUSED):
        kind = ProgramError
    error = kind(text)
    error.__dict__["of_program"] = True
    raise error


def _build(node, depth=0):
    """A value as the runner writes it: JSON with a tag for each kind of container.

    Reading it builds nothing but built-in values and stand-ins: no classes, no code, no pickles, whatever hostile hands
    have written.
    """
    if not isinstance(node, list):
        if isinstance(node, dict):
            raise TypeError("a bare object")
        return node
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    tag, *rest = node
    if tag in _CONTAINERS:
        (items,) = rest
        return _CONTAINERS[tag]([_build(item, depth + 1) for item in items])
    if tag == "d":
        (pairs,) = rest
        return {_build(k, depth + 1): _build(v, depth + 1) for k, v in pairs}
    if tag == "r":
        (key,) = rest
        return Remote(int(key))
    return _SCALARS[tag](*rest)


def _range(*bounds):
    if len(range(*bounds)) > _MAX_RANGE:  # a test may make a list of it
        raise ValueError("a range beyond all bounds")
    return range(*bounds)


_CONTAINERS = {"l": list, "t": tuple, "s": set, "f": frozenset}
_SCALARS = {
    "i": lambda digits: int(digits, 16),
    "b": lambda text: text.encode("latin-1"),
    "c": lambda real, imag: complex(float(real), float(imag)),
    "g": lambda start, stop, step: _range(int(start), int(stop), int(step)),
}


def _plain(x):
    """Arguments as marshal takes them; stand-ins as references, numpy's numbers and arrays as plain ones."""
    if isinstance(x, Remote):
        return frozenset([("\0ref", x._key)])
    if isinstance(x, type) and getattr(builtins, x.__name__, None) is x:
        return frozenset([("\0ref", x.__name__)])
    if isinstance(x, (bool, int, float, str, bytes, complex, type(None), type(...))):
        for kind in (bool, int, float, str):
            if isinstance(x, kind):
                return x if kind is bool else kind(x)
        return x
    if isinstance(x, dict):
        return {_plain(k): _plain(v) for k, v in x.items()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(x, kind):
            return kind(_plain(item) for item in x)
    if type(x).__module__ == "numpy" and hasattr(x, "tolist"):
        return x.tolist()
    if isinstance(x, range):
        return list(x)
    raise Unsupported(f"a {type(x).__name__} as an argument")


class Remote:
    """An object of the program, or a function it defines (``_key`` is its name or number)."""

    def __init__(self, key):
        object.__setattr__(self, "_key", key)

    def __call__(self, *args, **kwargs):
        return _question("call", self._key, args, kwargs)

    def __getattr__(self, name):
        if name.startswith("__"):  # numpy, copy and others look for protocols
            raise AttributeError(name)
        return _question("attr", self._key, name)

    def __setattr__(self, name, value):
        _question("set", self._key, name, value)

    def __iter__(self):
        return iter(_question("iter", self._key))

    def __len__(self):
        return int(_question("len", self._key))

    def __getitem__(self, key):
        return _question("item", self._key, key)

    def __str__(self):
        return str(_question("str", self._key))

    def __bool__(self):
        return bool(_question("bool", self._key))

    def __eq__(self, other):
        return isinstance(other, Remote) and other._key == self._key

    def __hash__(self):
        return hash(self._key)


# --- a job -----------------------------------------------------------------------------------------------------------


def _free_names(sources):
    """Names that the sources look up as globals and nowhere bind as such; a function's own variables are its own."""
    used, bound = {}, set()
    tables = [symtable.symtable(source, "test.py", "exec") for source in sources]
    while tables:
        table = tables.pop(0)
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table.get_type() == "module" or symbol.is_global():
                if symbol.is_assigned() or symbol.is_imported():
                    bound.add(symbol.get_name())
                if symbol.is_referenced():
                    used.setdefault(symbol.get_name())
    return [name for name in used if name not in bound and not hasattr(builtins, name)]


def _assertions(prefix, setup, tests, names):
    """Runs the tests; [passed, ...] or a message that says why they can't run."""
    space: dict = {"__name__": "tests"}
    exec(compile(prefix, "prefix.py", "exec"), space)
    for name in names:
        space[name] = Remote(name)
    for name in _free_names([setup, *tests]):
        if name in space:
            continue
        if name in sys.stdlib_module_names:  # the program's "math" may be anything
            space[name] = importlib.import_module(name)
            continue
        with contextlib.suppress(Exception):
            space[name] = _question("get", name)
    codes = [compile(test, "test.py", "exec") for test in (setup, *tests)]
    if not _holds(codes[0], space):
        return [False] * len(tests)
    return [_holds(code, space) for code in codes[1:]]


def _holds(code, space):
    try:
        exec(code, space)
    except (Exception, SystemExit) as error:
        if isinstance(error, ImportError) and not hasattr(error, "of_program"):
            raise Unsupported(f"{type(error).__name__}: {error}") from None
        return False
    return True


def _checker(source, *case):
    """The score that a checker gives one (input, expected, output), in a list.

    The checker defines ``check(input, expected, output) -> bool or float``, or is a script that reads the three from
    the files named in its arguments and prints the score first.
    """
    code = compile(source, "checker.py", "exec")
    space: dict = {"__name__": "checker"}
    if "check" in code.co_names:
        exec(code, space)
    try:
        return [float(space["check"](*case) if "check" in space else _script(code, case))]
    except ImportError:
        raise
    except (Exception, SystemExit):  # it can't read the output
        return [0.0]


def _script(code, case):
    sys.argv = ["checker.py"]
    for name, text in zip(("input", "expected", "output"), case, strict=True):
        with open(f"/tmp/{name}.txt", "w") as file:
            file.write(text)
        sys.argv.append(file.name)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        exec(code, {"__name__": "__main__"})
    return float(out.getvalue().split()[0])


def _job(kind, *arguments):
    try:
        results = {"assertions": _assertions, "checker": _checker}[kind](*arguments)
    except Gone:
        results = None
    except BaseException as error:
        results = f"{type(error).__name__}: {error}"
    _send(b"r", json.dumps(results).encode())


def _strict_shapes():
    """np.allclose broadcasts: an empty list would be close to anything."""
    import numpy

    close = numpy.allclose

    def allclose(a, b, *args, **kwargs):
        return numpy.shape(a) == numpy.shape(b) and close(a, b, *args, **kwargs)

    numpy.allclose = allclose


def main():
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    _send(b"v", b"null")
    while True:
        memory, *job = marshal.loads(_receive())
        if "numpy" not in sys.modules and any("numpy" in str(part) for part in job):
            with contextlib.suppress(ImportError):
                _strict_shapes()
        child = os.fork()
        if not child:
            try:
                _, most = resource.getrlimit(resource.RLIMIT_AS)
                memory = memory if most == resource.RLIM_INFINITY else min(memory, most)
                resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
                _job(*job)
                os._exit(0)
            finally:
                os._exit(1)
        if status := os.waitpid(child, 0)[1]:
            _send(b"r", json.dumps(f"their process ended (status {status})").encode())


main()
