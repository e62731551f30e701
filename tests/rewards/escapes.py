"""Attempts of a program to leave its sandbox. Each is Python source that raises OSError or MemoryError if it fails.

`FILE`, `FOLDER`, `PORT`, `SOCKET`, `ABSTRACT`, `PID` and `VALUE` are replaced by what exists outside.
"""

_LIBC = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
_CHECK = "\nif found < 0: raise OSError(ctypes.get_errno(), 'failed')"
_RAISE = (
    "import resource\ntry: resource.setrlimit(resource.RLIMIT_{}, ({}))\n"
    "except ValueError as error: raise OSError from error"  # Python raises ValueError where the system forbids it
)

OUTSIDE = {
    "network": [
        "import socket\nsocket.create_connection(('127.0.0.1', PORT), 2)",
        "import socket\nsocket.socket(socket.AF_UNIX).connect(SOCKET)",
        "import socket\nsocket.socket(socket.AF_UNIX).connect(ABSTRACT)",
        "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    ],
    "reading": [
        "open(FILE).read()",
        "import os\nos.listdir(FOLDER)",
        "open('/etc/passwd').read()",
        "import os\nos.listdir('/sys/class')",
    ],
    "writing": ["open(FOLDER + '/made', 'w')", "open(FILE, 'a')", "import os\nos.chmod(FILE, 0o777)"],
    "symlinks": [
        "import os\nos.symlink(FILE, 'link')\nopen('link').read()",
        "import os\nos.symlink(FOLDER, 'folder')\nopen('folder/made', 'w')",
        "import os\nopen(os.path.join(*['..'] * 16, FILE.lstrip('/'))).read()",
    ],
    "processes": [
        "open('/proc/PID/environ').read()",
        "open('/proc/PID/cmdline').read()",
        "import os\nos.listdir('/proc/PID/root')",
        "import os\nos.sched_getaffinity(PID)",
    ],
    "signals": [
        "import os\nos.kill(PID, 0)",
        "import os\nos.kill(PID, 18)",
        "import os\nos.killpg(os.getpgid(PID), 0)",
    ],
    "environment": [
        "import os\nif os.environ.get('ORDINARY') != VALUE: raise OSError",
        "import os\nif VALUE not in open('/proc/self/environ').read(): raise OSError",
    ],
    "ptrace": [_LIBC + "found = libc.ptrace(0, 0, 0, 0)" + _CHECK],
    "memory outside of limits": [
        "import os\nos.memfd_create('x')",
        _LIBC + "found = libc.shmget(0, 4096, 0o1600)\nif found >= 0: libc.shmctl(found, 0, 0)" + _CHECK,
    ],
}
"""Attempts that succeed outside a sandbox."""

REFUSED = {
    "network": [
        "import socket\nsocket.create_connection(('192.0.2.1', 80), 2)",
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))",
        "import socket\nsocket.getaddrinfo('example.org', 80)",
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
        "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
        "import socket\nsocket.socket(40, socket.SOCK_STREAM).bind((0xFFFFFFFF, 0xFFFFFFFF))",  # AF_VSOCK, any port
        "import socket\nsocket.socket(40, socket.SOCK_DGRAM)",
        "import socket\nsocket.socket(38, socket.SOCK_SEQPACKET)",  # AF_ALG
    ],
    "reading": [
        "import os\nos.listdir(os.path.dirname(FILE) + '/..')",
        "open('/etc/shadow').read()",
        "open('/proc/1/root' + FILE).read()",
        "open('/proc/self/root' + FILE).read()",
        "open('/proc/kcore', 'rb').read(1)",
        "open('/dev/mem', 'rb').read(1)",
        "open('/dev/kmsg', 'rb').read(1)",
    ],
    "writing": [
        "open('/made', 'w')",
        "open('/usr/made', 'w')",
        "open('/etc/made', 'w')",
        "open('/dev/made', 'w')",
        "import sys\nopen(sys.prefix + '/made', 'w')",
        "open('/proc/sys/kernel/hostname', 'w').write('x')",
        "open('/proc/sys/kernel/core_pattern', 'w').write('x')",
        "open('/proc/sysrq-trigger', 'w').write('x')",
        "import os\nos.mknod('device', 0o20600, os.makedev(1, 1))",
    ],
    "ptrace": [
        _LIBC + "found = libc.ptrace(16, PID, 0, 0)" + _CHECK,
        _LIBC + "import os\nfound = libc.ptrace(16, os.getppid(), 0, 0)" + _CHECK,
        _LIBC + "import os\nfound = libc.process_vm_readv(os.getpid(), 0, 0, 0, 0, 0)" + _CHECK,
    ],
    "privileges": [
        "import os\nos.chroot('/tmp')",
        "import os\nos.setuid(0)",
        "import os\nos.setgroups([0])",
        "import os\nos.nice(-5)",
        _RAISE.format("NPROC", "4096, 4096"),
        _RAISE.format("AS", "-1, -1"),
        _LIBC + "found = libc.unshare(0x10000000)" + _CHECK,
        _LIBC + "found = libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)" + _CHECK,
        _LIBC + "found = libc.umount2(b'/usr', 2)" + _CHECK,
        _LIBC + "found = libc.mount(None, b'/usr', None, 0x1020, None)" + _CHECK,
        _LIBC + "import os\nfound = libc.setns(os.open('/proc/self/ns/net', 0), 0)" + _CHECK,
        _LIBC + "found = libc.sethostname(b'x', 1)" + _CHECK,
    ],
    "disk": [
        "with open('/tmp/large', 'wb') as file:\n    for _ in range(64): file.write(bytes(2**20))",
        "for i in range(64):\n    with open(f'/tmp/{i}', 'wb') as file: file.write(bytes(2**20))",
        "for i in range(64):\n    with open(f'/dev/shm/{i}', 'wb') as file: file.write(bytes(2**20))",
    ],
    "memory": [
        "bytearray(2**30)",
        "held = []\nwhile True: held.append(bytearray(2**24))",
        "import mmap\nheld = [mmap.mmap(-1, 2**26) for _ in range(64)]",
    ],
    "files": ["import os\nheld = [os.dup(0) for _ in range(4096)]"],
    "threads": [
        "import threading\nstop = threading.Event()\ntry:\n    for _ in range(64):\n"
        "        threading.Thread(target=stop.wait, daemon=True).start()\n"
        "except RuntimeError as error:\n    raise OSError from error\nfinally:\n    stop.set()"
    ],
    "fork bomb": [
        "import os\nfor _ in range(64):\n    if os.fork() == 0: os.read(os.pipe()[0], 1)",
        "import subprocess\nheld = [subprocess.Popen(['sleep', '60']) for _ in range(64)]",
    ],
}
"""Attempts that the sandbox must prevent, and that a test does not make outside."""
