"""A seccomp filter for the code sandbox, assembled here so that no library is needed.

Namespaces alone leave much of the kernel in reach. The filter takes away what a judged program has no use for: memory
that no limit counts (System V segments, memory files), sockets (vsock is in no network namespace), new namespaces,
tracing, keyrings and the interfaces that kernel exploits go through. Denied calls fail with EPERM.
"""

from __future__ import annotations

import platform
import struct

from brorl_jax.errors import UserError

# System call numbers: name -> (x86_64, aarch64); None where an architecture lacks it.
_DENIED: dict[str, tuple[int, int | None]] = {
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "personality": (135, 92),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "acct": (163, 89),
    "lookup_dcookie": (212, 18),
    "modify_ldt": (154, None),
}
_CLONE, _CLONE3 = (56, 220), 435
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWNS .. CLONE_NEWNET and CLONE_NEWTIME
_X32 = 0x40000000

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_EPERM, _ENOSYS = 0x00050001, 0x00050026
_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_AT_NUMBER, _AT_ARCHITECTURE, _AT_FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, little endian


def program(machine: str | None = None) -> bytes:
    """The filter as an array of ``struct sock_filter``, for ``bwrap --seccomp``.

    Raises:
        UserError: the numbers of system calls are not known for this architecture.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise UserError(
            f"the code sandbox has no system call filter for {machine}; it runs on {' and '.join(_ARCHITECTURES)}"
        )
    column, audit = _ARCHITECTURES[machine]
    denied = sorted(number for row in _DENIED.values() if (number := row[column]) is not None)
    code = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER),
    ]
    if machine == "x86_64":  # the same calls under other numbers
        code += [(_GREATER_EQUAL, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    code += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ENOSYS)]  # its flags lie in memory; libc falls back to clone
    for number in denied:
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    code += [
        (_EQUAL, 0, 3, _CLONE[column]),
        (_LOAD, 0, 0, _AT_FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES & ~0x80),  # the low byte of clone's flags is a signal
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
