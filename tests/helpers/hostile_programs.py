"""Programs that a sandbox must survive. Three kinds, by what must become of them:

``HELD``: tries something that must be refused, and prints "held" if it was; anything else is an escape.
``FORGED``: wants a test passed without knowing the answer; must score 0, and not as an error of the grader.
``GREEDY``: takes what it can get; must end by its deadline.

In the sources ``SECRET`` stands for the path of a readable file of the host, ``PORT`` for a port that the host listens
on, ``PID`` for one of its processes, ``MARK`` for the name of the environment variable and of the files by which an
escape would show.
"""

_PREAMBLE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)

def call(*arguments):
    if libc.syscall(*map(ctypes.c_long, arguments)) < 0:
        raise OSError(ctypes.get_errno(), "refused")

def libcall(name, *arguments):
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), "refused")

def refused(*attacks):
    for attack in attacks:
        try:
            result = attack()
        except (OSError, ValueError, KeyError, ImportError):
            continue
        print("escaped", result)
        break
    else:
        print("held")
"""

_HELD = {
    "reads accounts": "refused(lambda: open('/etc/passwd').read(), lambda: open('/etc/shadow').read())",
    "lists homes": "refused(*[lambda f=f: os.listdir(f) for f in ('/root', '/home', '/var', '/etc', '/mnt', '/srv')])",
    "reads a file of the host": """
refused(lambda: open('SECRET').read(), lambda: open('/proc/1/root' + 'SECRET').read())""",
    "links to a file of the host": """
os.symlink('SECRET', '/tmp/link')
refused(lambda: open('/tmp/link').read(), lambda: os.link('SECRET', '/tmp/hard'))""",
    "climbs out of its folder": "refused(lambda: open('../' * 30 + 'SECRET').read())",
    "climbs out of a root of its own": """
os.mkdir('/tmp/jail')
refused(lambda: os.chroot('/tmp/jail'))""",
    "reads the environment": """
import glob
seen = str(os.environ)
for name in glob.glob('/proc/*/environ'):
    try:
        seen += open(name).read()
    except OSError:
        pass
print('escaped' if 'MARK' in seen or set(os.environ) - {'PATH', 'HOME', 'PYTHONHASHSEED', 'OPENBLAS_NUM_THREADS',
      'PWD', 'LC_CTYPE'} else 'held')""",
    "inherits open files": """
extra = []
for fd in range(3, 4096):
    try:
        extra.append(os.readlink(f'/proc/self/fd/{fd}'))
    except OSError:
        pass
print(*extra or ['held'])""",
    "connects to the host": """
import socket
refused(*[lambda h=h: socket.create_connection((h, PORT), 2) for h in ('127.0.0.1', 'localhost', '::1')])""",
    "opens sockets of every family": "import socket\nrefused(*[lambda f=f: socket.socket(f) for f in range(1, 46)])",
    "finds network interfaces": """
names = {line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line}
print(*(names - {'lo'}) or ['held'])""",
    "traces its parent": "refused(lambda: call(101, 16, os.getppid(), 0, 0))",
    "reads its parent's memory": """
buffer = ctypes.create_string_buffer(64)
class Range(ctypes.Structure):
    _fields_ = [('base', ctypes.c_void_p), ('length', ctypes.c_size_t)]
here = Range(ctypes.addressof(buffer), 64)
refused(lambda: call(310, os.getppid(), ctypes.addressof(here), 1, ctypes.addressof(here), 1, 0))""",
    "sees other processes": """
pids = [int(p) for p in os.listdir('/proc') if p.isdigit()]
print('held' if max(pids) < 100 and all('MARK' not in open(f'/proc/{p}/cmdline').read() for p in pids) else pids)""",
    "writes to the system": """
folders = ['/', '/usr', '/usr/bin', '/usr/lib', '/dev', '/dev/shm', '/proc', '/proc/sys/kernel', '/etc', '/packages']
refused(*[lambda f=f: open(f + '/MARK', 'w') for f in folders])""",
    "overwrites the interpreter": "refused(lambda: open(os.path.realpath(sys.executable), 'r+b'))",
    "changes the kernel's settings": """
refused(*[lambda f=f: os.write(os.open(f, os.O_WRONLY), b'0 0 1') for f in ('/proc/sys/kernel/core_pattern',
        '/proc/sys/vm/overcommit_memory', '/proc/sysrq-trigger', '/proc/self/uid_map', '/proc/1/uid_map')])""",
    "mounts": """
refused(lambda: libcall('mount', b'none', b'/tmp', b'tmpfs', 0, None), lambda: libcall('umount2', b'/proc', 2),
        lambda: libcall('mount', b'none', b'/usr', None, 32 | 4096, None),
        lambda: libcall('mount', b'none', b'/', None, 32 | 4096, None))""",
    "makes namespaces": """
flags = (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x4000000, 0x8000000, 0x2000000)
def cloned(flag):
    def attack():
        pid = libc.syscall(56, ctypes.c_long(flag | 17), 0, 0, 0, 0)
        if pid < 0:
            raise OSError(ctypes.get_errno(), 'refused')
        if not pid:
            os._exit(0)
    return attack
refused(*[lambda f=f: call(272, f) for f in flags], *map(cloned, flags))""",
    "joins namespaces": """
refused(*[lambda n=n: call(308, os.open(f'/proc/1/ns/{n}', 0), 0) for n in ('mnt', 'net', 'pid', 'user', 'ipc')])""",
    "becomes root": """
refused(lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), lambda: os.setresuid(0, 0, 0))""",
    "gains privileges by a program": """
status = dict(line.split(':', 1) for line in open('/proc/self/status'))
caps = [status[c].strip() for c in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb')]
print('held' if status['NoNewPrivs'].strip() == '1' and set(caps) == {'0' * 16} else (status['NoNewPrivs'], caps))""",
    "makes devices": """
refused(lambda: os.mknod('/tmp/disk', 0o60666, os.makedev(8, 0)),
        lambda: os.mknod('/tmp/memory', 0o20666, os.makedev(1, 1)))""",
    "opens devices": """
refused(*[lambda d=d: open('/dev/' + d, 'rb') for d in ('mem', 'kmsg', 'sda', 'vda', 'kvm', 'fuse', 'tty')])""",
    "opens files by handle": "refused(lambda: call(304, -100, ctypes.addressof(ctypes.create_string_buffer(128)), 0))",
    "calls what exploits go through": """
numbers = dict(bpf=321, perf_event_open=298, userfaultfd=323, io_uring_setup=425, keyctl=250, add_key=248,
               init_module=175, kexec_load=246, fsopen=430, open_tree=428, modify_ldt=154, memfd_secret=447)
refused(*[lambda n=n: call(n, 0, 0, 0, 0, 0, 0) for n in numbers.values()])""",
    "keeps memory that no limit counts": "refused(lambda: call(29, 0, 1 << 28, 0o1600), lambda: os.memfd_create('x'))",
    "uses the other numbers of system calls": """
pid = os.fork()
if not pid:
    libc.syscall(ctypes.c_long(0x40000000 | 39))
    os._exit(0)
print('held' if os.WIFSIGNALED(os.waitpid(pid, 0)[1]) else 'escaped')""",
    "raises its limits": """
import resource
names = ('RLIMIT_AS', 'RLIMIT_NPROC', 'RLIMIT_FSIZE', 'RLIMIT_NOFILE', 'RLIMIT_CPU', 'RLIMIT_CORE')
refused(*[lambda n=n: resource.setrlimit(getattr(resource, n), (1 << 40, 1 << 40)) for n in names])""",
    "pushes itself forward": """
refused(lambda: os.nice(-5), lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)))""",
    "touches the machine": """
import time
refused(lambda: time.clock_settime(time.CLOCK_REALTIME, 0), lambda: libcall('sethostname', b'x', 1),
        lambda: libcall('reboot', 0x1234567), lambda: libcall('swapon', b'/tmp', 0))""",
    "imports from elsewhere": """
import importlib
names = ['brorl_jax', 'jax', 'pytest', 'sitecustomize', 'usercustomize', 'runner', 'guest', 'tester', 'conftest']
refused(*[lambda n=n: importlib.import_module(n) for n in names])""",
    "kills processes of the host": "refused(*[lambda p=p: os.kill(p, 9) for p in (PID, 0x3ffffe)])",
}

_FORGED = {
    "prints what a grader prints": "print('PASSED\\nok\\nAll tests passed\\n1.0\\n[true]')",
    "leaves at once": "import os\nos._exit(0)",
    "leaves by exception": "raise SystemExit(0)",
    "leaves when called": "import os\ndef f(*a):\n    os._exit(0)",
    "exits when called": "import sys\ndef f(*a):\n    sys.exit(0)",
    "equals everything": """
class Any:
    __eq__ = __ge__ = __le__ = __contains__ = lambda *a: True
    __ne__ = __lt__ = __gt__ = lambda *a: False
    __hash__ = lambda s: 0
    __bool__ = lambda s: True
    __repr__ = __str__ = lambda s: ''
    __sub__ = __rsub__ = __abs__ = __call__ = __getitem__ = lambda s, *a: s
    __float__ = lambda s: 0.0
    __len__ = __index__ = __int__ = lambda s: 0
    __iter__ = lambda s: iter([s])
    def __getattr__(self, name): return self
def f(*a): return Any()""",
    "a text that equals everything": """
class Any(str):
    __eq__ = lambda *a: True
    __ne__ = lambda *a: False
    __hash__ = lambda s: 0
def f(*a): return Any('x')""",
    "a list that equals everything": """
class Any(list):
    __eq__ = lambda *a: True
    __ne__ = lambda *a: False
def f(*a): return Any()""",
    "poses as another class": """
class Any:
    __class__ = str
    def __eq__(self, other): return True
def f(*a): return Any()""",
    "returns what is not a number": "def f(*a): return float('nan')",
    "returns itself": "def f(*a): return f",
    "returns a type": "def f(*a): return type",
    "redefines the language": """
import builtins
for name in ('all', 'any', 'bool', 'len', 'str', 'isinstance', 'sorted', 'type', 'abs', 'range', 'compile', 'exec'):
    setattr(builtins, name, lambda *a, **k: True)
builtins.AssertionError = builtins.Exception = KeyboardInterrupt
def f(*a): return True""",
    "redefines the test": "check = candidate = test = lambda *a: True\ndef f(*a): return None",
    "redefines modules": """
import sys, types
for name in ('json', 'math', 'numpy', 'marshal', 'os', 'time', 'builtins', '__main__', 'pytest', 'unittest'):
    fake = types.ModuleType(name)
    fake.__getattr__ = lambda n: (lambda *a, **k: True)
    sys.modules[name] = fake
def f(*a): return True""",
    "ends the loop of the test": "def f(*a): raise StopIteration\ndef g(): yield",
    "raises what a test may expect": "def f(*a): raise AssertionError",
    "looks for the answer in frames": """
import sys
def f(*a):
    frame, found = sys._getframe(), []
    while frame:
        found += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    return [v for v in found if isinstance(v, str) and len(v) == 16][0]
print(f())""",
    "looks for the answer in memory": """
import gc
def f(*a):
    found = [v for o in gc.get_objects() for v in gc.get_referents(o)]
    return max((v for v in found if isinstance(v, str) and len(v) == 16 and v.isalnum()), default='')
print(f())""",
    "looks for the answer in files": """
import os
def f(*a):
    seen = ''
    for top in ('/tmp', '/packages', '/proc/self/fd'):
        for folder, _, names in os.walk(top):
            for name in names:
                try:
                    with open(os.open(folder + '/' + name, os.O_RDONLY | os.O_NONBLOCK), 'rb') as file:
                        seen += file.read(1000).decode('latin-1')
                except (OSError, TypeError):
                    pass
    return seen
print(f())""",
    "writes verdicts to every file": """
import os
def f(*a):
    for kind, data in ((b'r', b'[true]'), (b'r', b'[1.0]'), (b'v', b'null'), (b'o', bytes(8)), (b'v', b'true')):
        for fd in range(3, 64):
            try:
                os.write(fd, len(data).to_bytes(4, 'big') + kind + data)
            except OSError:
                pass
f()""",
    "writes verdicts to its parents' files": """
import os
data = b'[1.0]'
for pid in (1, 2, os.getppid()):
    for fd in range(64):
        try:
            out = os.open(f'/proc/{pid}/fd/{fd}', os.O_WRONLY | os.O_NONBLOCK)
            os.write(out, len(data).to_bytes(4, 'big') + b'r' + data)
        except OSError:
            pass
def f(*a): return None""",
    "talks nonsense to the grader": """
import os
for fd in range(3, 64):
    try:
        os.write(fd, os.urandom(4096))
    except OSError:
        pass
def f(*a): return None""",
    "promises an endless reply": """
import os
for fd in range(3, 64):
    try:
        os.write(fd, b'\\xff\\xff\\xff\\xffv')
    except OSError:
        pass
def f(*a): return None""",
    "takes over the driver": """
import gc
for space in [o for o in gc.get_objects() if isinstance(o, dict) and '_handlers' in o]:
    reply = space['_reply']
    for kind in b'r', b'o', b'v', b'x', b'v':
        reply(kind, b'[true]')
    for name in list(space['_handlers']):
        space['_handlers'][name] = lambda *a: reply(b'v', b'true')
def f(*a): return True""",
    "patches its driver's memory": """
import os
try:
    memory = os.open(f'/proc/{os.getppid()}/mem', os.O_RDWR)
    for line in open(f'/proc/{os.getppid()}/maps'):
        low, high = (int(x, 16) for x in line.split()[0].split('-'))
        if 'rw' in line and '[heap]' in line:
            os.pwrite(memory, b'1' * (high - low), low)
except OSError:
    pass
def f(*a): return None""",
    "kills its driver": "import os\nos.kill(os.getppid(), 9)\ndef f(*a): os.kill(os.getppid(), 9)",
    "kills all it sees": "import os\ntry:\n    os.kill(-1, 9)\nexcept OSError:\n    pass\ndef f(*a): os.kill(-1, 9)",
    "prints when nobody looks": """
import atexit
atexit.register(print, '[true]')
class Late:
    def __del__(self): print('[true]')
late = Late()
def f(*a): return None""",
    "a dictionary of references": "class R: pass\ndef f(*a): return {R(): R() for _ in range(9)}",
    "nests deeply": "def f(*a):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
    "contains itself": "def f(*a):\n    x = []\n    x.append(x)\n    return x",
    "returns a flood": "def f(*a): return ['x' * 1000] * 10**6",
    "returns an endless range": "def f(*a): return range(10**18)",
    "returns a number of a million digits": "def f(*a): return 1 << 3_000_000",
    "returns keys that collide": "def f(*a): return {(i * (2**61 - 1)): 0 for i in range(3000)}",
    "text that is no text": "def f(*a): return '\\ud800'\nprint('\\udcff')",
    "does not compile": "def f(:",
    "has a zero byte": "x = 1\0",
    "nests its source": "x = " + "(" * 5000 + ")" * 5000,
}

_GREEDY = {
    "loops": "while True: pass",
    "loops when called": "def f(*a):\n    while True: pass\nf()",
    "loops in C": "x = 9 ** 9 ** 9",
    "backtracks": "import re\nre.match('(a+)+$', 'a' * 64 + 'b')",
    "sleeps": "import time\ntime.sleep(1000)",
    "waits for input": "import sys\nsys.stdin.read()\nimport signal\nsignal.pause()",
    "ignores signals": """
import signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    time.sleep(1)""",
    "survives its limit of processor time": """
import signal
signal.signal(signal.SIGXCPU, lambda *a: None)
while True: pass""",
    "forks without end": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "forks and leaves": "import os\nwhile True:\n    if os.fork():\n        os._exit(0)",
    "starts threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,)).start()",
    "starts interpreters": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'while True: pass'])",
    "orphans children": """
import os, time
for _ in range(4):
    if not os.fork():
        os.setsid()
        if not os.fork():
            time.sleep(1000)
        os._exit(0)
raise SystemExit(1)""",
    "orphans children that hold its output": """
import os, time
if not os.fork():
    os.setsid()
    while True:
        print('x', flush=True)
        time.sleep(0.01)
raise SystemExit(1)""",
    "stops itself": "import os\nos.kill(os.getpid(), 19)",
    "stops its driver": "import os, time\nos.kill(os.getppid(), 19)\ntime.sleep(1000)",
    "floods memory": "x = bytearray(10 << 30)",
    "floods memory bit by bit": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "floods memory in children": """
import os, time
while True:
    try:
        pid = os.fork()
    except OSError:
        time.sleep(1000)
    if not pid:
        x = []
        while True:
            try:
                x.append(bytearray(4 << 20))
            except MemoryError:
                time.sleep(1000)""",
    "maps memory": "import mmap\nx = [mmap.mmap(-1, 1 << 30) for _ in range(100)]",
    "floods the disk": """
n = 0
while True:
    try:
        with open(f'/tmp/{n}', 'wb') as file:
            while True: file.write(bytes(1 << 16))
    except OSError:
        n += 1""",
    "makes files without end": "n = 0\nwhile True:\n    open(f'/tmp/{n}', 'w').close()\n    n += 1",
    "makes folders within folders": "import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')",
    "opens files without end": "x = []\nwhile True: x.append(open('/dev/null'))",
    "floods its output": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "floods its errors": "import os\nwhile True: os.write(2, b'x' * 65536)",
    "writes a gigabyte": "print('x' * (1 << 28))\nprint('x' * (1 << 28))",
    "recurses": "import sys\nsys.setrecursionlimit(10**9)\ndef f(*a): return f(*a)\nf()",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "shuts its files": "import os\nos.closerange(0, 4096)\nwhile True: pass",
    "leaves threads behind": "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()",
    "never finishes leaving": "import atexit, time\natexit.register(time.sleep, 1000)",
}

HELD = {name: _PREAMBLE + source.strip() for name, source in _HELD.items()}
FORGED = {name: source.strip("\n") for name, source in _FORGED.items()}
GREEDY = {name: source.strip("\n") for name, source in _GREEDY.items()}
