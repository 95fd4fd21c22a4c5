"""What a hostile program tries, by area: expressions that are true when it got through, for
tests/eval/test_sandbox_probes.py.

`W` is the world outside, made by the test: a secret, sockets, a process, keys, memory. Every probe is
harmless where it gets through (signal 0, the same mode again), so that all of them can be tried without a
sandbox as well.
"""

import json

HELPERS = r"""
import ctypes, errno, fcntl, json, mmap, os, platform, resource, select, signal, socket, struct
import sys, threading, time
signal.signal(signal.SIGIO, signal.SIG_IGN)  # what a watched folder sends
L = ctypes.CDLL(None, use_errno=True)
LATER = platform.machine() == "aarch64"

def call(x86, arm, *args):
    "A system call by its numbers; raises OSError."
    number = arm if LATER else x86
    if number is None:
        raise OSError(errno.ENOSYS, "not on this architecture")
    known = lambda a: ctypes.c_long(a) if isinstance(a, int) else a
    args = [ctypes.c_char_p(a) if isinstance(a, bytes) else known(a) for a in args]
    value = L.syscall(ctypes.c_long(number), *args)
    if value < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return True

def reached(x86, arm, *args):
    "Whether the kernel looked at a call instead of refusing it outright."
    try:
        return call(x86, arm, *args)
    except OSError as error:
        return error.errno not in (errno.EPERM, errno.ENOSYS, errno.EAGAIN, errno.EACCES)

def made(path):
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY)); os.unlink(path); return True

def child(pid):
    if pid == 0:
        os._exit(0)
    return os.waitpid(pid, 0)[0] == pid

def talk(family, kind, address, *rest):
    with socket.socket(family, kind) as s:
        s.settimeout(1)
        if kind == socket.SOCK_DGRAM:
            return s.sendto(b"x", address)
        s.connect(address)
        return s.send(b"x")

def opened(family, kind):
    with socket.socket(family, kind):
        return True

def there(look):
    "A question about a path outside: any answer but 'there is no such thing'."
    try:
        look(); return True
    except PermissionError:
        return False

def memory_file():
    name = ctypes.c_char_p(b"x"); number = 279 if LATER else 319
    fd = L.syscall(number, name, 0)
    if fd < 0: raise OSError(ctypes.get_errno(), "memfd")
    os.close(fd); return True

def threads():
    one = threading.Thread(target=int); one.start(); one.join(); return True

def limit(name, value):
    "Raise a limit to more than it is; where it is endless there is nothing to raise."
    now = resource.getrlimit(name)[1]
    if now == resource.RLIM_INFINITY: return True
    resource.setrlimit(name, (now + value, now + value)); resource.setrlimit(name, (now, now)); return True

def chdir(path):
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(path); os.fchdir(here); return True
    finally:
        os.close(here)

def owned(fd):
    r, w = os.pipe()
    try:
        fcntl.fcntl(r, fcntl.F_SETOWN, fd); return True
    finally:
        os.close(r); os.close(w)
"""


def table(text):
    "Lines `name | expression` as a dict; a line that begins with a blank goes on with the one before."
    probes, name = {}, ""
    for line in text.strip().splitlines():
        if line[0] == " ":
            probes[name] += line.strip(" ")
        else:
            name, _, probes[name] = line.partition(" | ")
    return probes


AREAS = {
    "files": table(r"""
read /etc/passwd | os.close(os.open('/etc/passwd', os.O_NONBLOCK)) is None
read /etc/hostname | os.close(os.open('/etc/hostname', os.O_NONBLOCK)) is None
read /etc/group | os.close(os.open('/etc/group', os.O_NONBLOCK)) is None
read /proc/self/environ | os.close(os.open('/proc/self/environ', os.O_NONBLOCK)) is None
read /proc/self/maps | os.close(os.open('/proc/self/maps', os.O_NONBLOCK)) is None
read /proc/1/environ | os.close(os.open('/proc/1/environ', os.O_NONBLOCK)) is None
read /proc/self/mem | os.close(os.open('/proc/self/mem', os.O_NONBLOCK)) is None
read /proc/self/root/etc/passwd | os.close(os.open('/proc/self/root/etc/passwd', os.O_NONBLOCK)) is None
read /proc/meminfo | os.close(os.open('/proc/meminfo', os.O_NONBLOCK)) is None
read /proc/net/unix | os.close(os.open('/proc/net/unix', os.O_NONBLOCK)) is None
read /proc/sys/kernel/hostname | os.close(os.open('/proc/sys/kernel/hostname', os.O_NONBLOCK)) is None
read /sys/kernel/mm/transparent_hugepage/enabled | os.close(os.open('/sys/kernel/mm/transparent_hugepage
  /enabled', os.O_NONBLOCK)) is None
read /dev/mem | os.close(os.open('/dev/mem', os.O_NONBLOCK)) is None
read /dev/kmsg | os.close(os.open('/dev/kmsg', os.O_NONBLOCK)) is None
read /dev/tty | os.close(os.open('/dev/tty', os.O_NONBLOCK)) is None
read /dev/zero | os.close(os.open('/dev/zero', os.O_NONBLOCK)) is None
read /dev/full | os.close(os.open('/dev/full', os.O_NONBLOCK)) is None
read /dev/ptmx | os.close(os.open('/dev/ptmx', os.O_NONBLOCK)) is None
read /dev/vda | os.close(os.open('/dev/vda', os.O_NONBLOCK)) is None
read ../../etc/passwd | os.close(os.open('../../etc/passwd', os.O_NONBLOCK)) is None
read a long way up | os.close(os.open('../' * 40 + 'etc/passwd', os.O_NONBLOCK)) is None
read /./etc/../etc/passwd | os.close(os.open('/./etc/../etc/passwd', os.O_NONBLOCK)) is None
list /etc | os.listdir('/etc') and '/etc' not in ('/', '/tmp')
list /proc | os.listdir('/proc') and '/proc' not in ('/', '/tmp')
list /proc/self/fd | os.listdir('/proc/self/fd') and '/proc/self/fd' not in ('/', '/tmp')
list /proc/self/root | os.listdir('/proc/self/root') and '/proc/self/root' not in ('/', '/tmp')
list /sys | os.listdir('/sys') and '/sys' not in ('/', '/tmp')
list /dev | os.listdir('/dev') and '/dev' not in ('/', '/tmp')
list /dev/shm | os.listdir('/dev/shm') and '/dev/shm' not in ('/', '/tmp')
list /run | os.listdir('/run') and '/run' not in ('/', '/tmp')
list /var | os.listdir('/var') and '/var' not in ('/', '/tmp')
list /usr | os.listdir('/usr') and '/usr' not in ('/', '/tmp')
list / or what is beside the folder | [n for d in ('/', '..') for n in os.listdir(d) if not n.startswith
  ('program')]
read a secret | open(W['secret']).read()
read by a system call | (fd := L.open(W['secret'].encode(), 0)) >= 0 and os.read(fd, 1)
read by openat from / | os.read(os.open(W['secret'][1:], 0, dir_fd=os.open('/', os.O_PATH)), 1)
read by openat2 | call(437, 437, -100, W['secret'].encode(), struct.pack('=QQQ', 0, 0, 0), 24)
read over a folder's descriptor | os.read(os.open('../../etc/passwd', 0, dir_fd=os.open('.', os.O_PATH))
  , 1)
a name | socket.getaddrinfo(b'localhost', 1)
map a file | mmap.mmap(os.open(W['secret'], os.O_RDONLY), 1, prot=mmap.PROT_READ)
send a file | os.sendfile(1, os.open(W['secret'], os.O_RDONLY), 0, 0) == 0
read over a symbolic link | os.symlink(W['secret'], 'link') or open('link').read()
read over a hard link | os.link(W['secret'], 'hard') or open('hard').read()
write a secret | os.close(os.open(W['secret'], os.O_WRONLY)) is None
append to a secret | os.close(os.open(W['secret'], os.O_WRONLY | os.O_APPEND)) is None
truncate a secret | os.truncate(W['secret'], W['size']) is None
make a file outside | made(W['open'] + '/new')
make a file in /tmp | made('/tmp/new-' + W['name'])
make a file in / | made('/new-' + W['name'])
make a file beside the folder | made('../new-' + W['name'])
make a file without a name outside | os.open(W['open'], os.O_TMPFILE | os.O_WRONLY) and True
make a folder outside | os.mkdir(W['open'] + '/d') or os.rmdir(W['open'] + '/d') is None
remove outside | made(W['open'] + '/gone')
rename outside | os.rename(W['secret'], W['secret']) is None
move a file out | open('m', 'w').close() or os.rename('m', W['open'] + '/m') or os.unlink(W['open'] + '/
  m') is None
move a file in | os.rename(W['secret'], 'taken') or os.rename('taken', W['secret']) is None
exchange files | open('x', 'w').close() or call(316, 276, -100, b'x', -100, W['secret'].encode(), 2) an
  d call(316, 276, -100, b'x', -100, W['secret'].encode(), 2)
a named pipe outside | os.close(os.open(W['fifo'], os.O_RDWR)) is None
a named pipe | os.mkfifo('pipe') is None
a device | os.mknod('device', 0o20666, os.makedev(1, 3)) is None
a socket file | os.mknod('sock', 0o140666) is None
write where Python lies | made(os.path.dirname(os.__file__) + '/new')
write where NumPy lies | made(os.path.dirname(sys.modules['numpy'].__file__) + '/new')
write /dev/shm | made('/dev/shm/new-' + W['name'])
write /var/tmp | made('/var/tmp/new-' + W['name'])
open by handle | reached(304, 265, -100, None, 0)
name to handle | reached(303, 264, -100, W['secret'].encode(), None, None, 0)
the caller's folder | os.listdir(W['open'])
climb by fchdir | os.fchdir(os.open('..', os.O_RDONLY)) or made('new-' + W['name'])
lock outside | fcntl.flock(os.open(W['secret'], os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB) is None
run its own file | open('e', 'w').write('#!/bin/true') and os.execv('e', ['e'])
"""),
    "metadata": table(r"""
stat | there(lambda: os.stat(W['secret']))
stat by a system call | call(332, 291, -100, W['secret'].encode(), 0, 0x7ff, bytes(256))
lstat /etc/shadow | there(lambda: os.lstat('/etc/shadow'))
access | os.access(W['secret'], os.F_OK)
readlink | os.readlink(W['link'])
readlink /proc/self/exe | os.readlink('/proc/self/exe')
chdir | chdir(W['open'])
chdir /etc | chdir('/etc')
a path descriptor | os.open(W['secret'], os.O_PATH)
"""),
    "properties": table(r"""
statfs | os.statvfs(W['open'])
statfs of / | os.statvfs('/')
list attributes | os.listxattr(W['secret']) is not None
read an attribute | os.getxattr(W['secret'], 'user.a')
write an attribute | os.setxattr(W['secret'], 'user.a', b'1') is None
remove an attribute | reached(197, 14, W['secret'].encode(), b'user.none')
chmod | os.chmod(W['secret'], 0o666) is None
chmod of a folder | os.chmod(W['open'], 0o777) is None
chmod by fchmodat | call(268, 53, -100, W['secret'].encode(), 0o666)
chmod by fchmodat2 | reached(452, 452, -100, W['secret'].encode(), 0o666, 0)
chown | os.chown(W['secret'], -1, -1) is None
lchown | os.lchown(W['secret'], -1, -1) is None
times | os.utime(W['secret'], (1e9, 1e9)) is None
times by now | reached(280, 88, -100, W['secret'].encode(), None, 0)
times by utimes | reached(235, None, W['secret'].encode(), None)
attributes of inodes | reached(469, 469, -100, W['secret'].encode(), bytes(24), 24, 0)
chmod of its own folder | os.chmod('.', 0o700) is None
owner of its own file | open('own', 'w').close() or os.chown('own', -1, -1) is None
"""),
    "processes": table(r"""
fork | child(os.fork())
fork by the library | child(L.fork()) if True else 0
clone | (p := L.syscall(220 if LATER else 56, 17, 0, 0, 0, 0)) >= 0 and child(p)
clone3 | reached(435, 435, bytes(64), 0)
threads | threads()
spawn | os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)
system | os.system('true') == 0
popen | os.popen('echo 1').read()
execve | reached(59, 221, b'/', None, None)
execveat | reached(322, 281, -100, b'/', None, None, 0)
signal the caller | os.kill(W['pid'], 0) is None
signal a victim | os.kill(W['victim'], 0) is None
signal the first process | reached(62, 129, 1, 0) and os.getpid() != 1
signal all | reached(62, 129, -1, 0)
signal the group | os.killpg(0, 0) is None
signal a parent | os.getppid() and os.kill(os.getppid(), 0) is None
signal by tgkill | call(234, 131, W['victim'], W['victim'], 0)
signal by tkill | reached(200, 130, W['victim'], 0)
signal with a value | reached(129, 138, W['victim'], 0, bytes(128))
signal with a value by thread | reached(297, 240, W['victim'], W['victim'], 0, bytes(128))
descriptor of a process | os.pidfd_open(W['victim'])
descriptor of itself | os.pidfd_open(os.getpid())
signal by descriptor | reached(424, 424, 0, 0, None, 0)
take a descriptor | reached(438, 438, 0, 0, 0)
trace me | reached(101, 117, 99, 0, 0, 0)
attach | reached(101, 117, 0x4206, W['victim'], 0, 0) and reached(101, 117, 17, W['victim'], 0, 0)
read memory | reached(310, 270, W['victim'], None, 0, None, 0, 0)
write memory | reached(311, 271, W['victim'], None, 0, None, 0, 0)
advise memory | reached(440, 440, 0, None, 0, 0, 0)
reap memory | reached(448, 448, 0, 0)
move pages | reached(279, 239, 0, 0, None, None, None, 0)
migrate pages | reached(256, 238, W['victim'], 0, None, None)
compare | reached(312, 272, os.getpid(), os.getpid(), 0, 0, 0)
priority | os.setpriority(os.PRIO_PROCESS, W['victim'], 19) is None
its own priority | reached(141, 140, 0, 0, 0)
scheduler | reached(144, 119, W['victim'], 0, bytes(4))
scheduler attributes | reached(314, 274, W['victim'], None, 0)
processors | reached(203, 122, W['victim'], 0, None)
input and output class | reached(251, 30, 1, W['victim'], 0)
limits of another | bool(resource.prlimit(W['victim'], resource.RLIMIT_CPU))
group of another | os.getpgid(W['victim'])
session of another | os.getsid(W['victim'])
processors of another | os.sched_getaffinity(W['victim'])
clock of another | time.clock_gettime(~W['victim'] << 3 | 2)
owner of signals | owned(W['victim'])
a session | reached(112, 157)
a group | reached(109, 154, 0, 0)
wait | reached(61, 260, -1, 0, 1, 0)
wait by identity | reached(247, 95, 0, 0, None, 5, None)
processes listed | [n for n in os.listdir('/proc') if n.isdigit()]
"""),
    "network": table(r"""
socket of family unix | opened(1, 1)
socket of family unix, datagram | opened(1, 2)
socket of family inet | opened(2, 1)
socket of family inet, datagram | opened(2, 2)
socket of family inet, raw | opened(2, 3)
socket of family inet6 | opened(10, 1)
socket of family inet6, datagram | opened(10, 2)
socket of family netlink | opened(16, 3)
socket of family packet | opened(17, 3)
socket of family alg | opened(38, 5)
socket of family vsock | opened(40, 1)
socket of family xdp | opened(44, 3)
socket of family bluetooth | opened(31, 3)
socket of family can | opened(29, 3)
socket of family key | opened(15, 3)
socket of family rds | opened(21, 5)
socket of family tipc | opened(30, 2)
socket of family ax25 | opened(3, 5)
socket of family x25 | opened(9, 5)
socket of family atm | opened(8, 2)
socket of family pppox | opened(24, 1)
socket of family llc | opened(26, 1)
socket of family nfc | opened(39, 5)
socket of family kcm | opened(41, 2)
socket of family smc | opened(43, 1)
socket of family mctp | opened(45, 2)
socket of family qipcrtr | opened(42, 2)
socket of family ieee802154 | opened(36, 2)
a path of a Unix socket | talk(socket.AF_UNIX, socket.SOCK_STREAM, W['unix'])
a path of a Unix socket, datagram | talk(socket.AF_UNIX, socket.SOCK_DGRAM, W['unix_datagram'])
a path of a Unix socket, relative | talk(socket.AF_UNIX, socket.SOCK_STREAM, '../' * 9 + W['unix'][1:])
an abstract Unix socket | talk(socket.AF_UNIX, socket.SOCK_STREAM, W['abstract'])
TCP | talk(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', W['tcp']))
UDP | talk(socket.AF_INET, socket.SOCK_DGRAM, ('127.0.0.1', W['udp']))
a pair | socket.socketpair()
listen | socket.create_server(('127.0.0.1', 0))
connect on no socket | reached(42, 203, 0, None, 0)
bind on no socket | reached(49, 200, 0, None, 0)
listen on no socket | reached(50, 201, 0, 0)
accept on no socket | reached(43, 202, 0, None, None)
accept4 | reached(288, 242, 0, None, None, 0)
sendto | reached(44, 206, 0, None, 0, 0, None, 0)
recvfrom | reached(45, 207, 0, None, 0, 0, None, None)
sendmsg | reached(46, 211, 0, None, 0)
recvmsg | reached(47, 212, 0, None, 0)
sendmmsg | reached(307, 269, 0, None, 0, 0)
recvmmsg | reached(299, 243, 0, None, 0, 0, None)
options of sockets | reached(54, 208, 0, 0, 0, None, 0)
names of sockets | reached(51, 204, 0, None, None)
shutdown | reached(48, 210, 0, 0)
interfaces | [n for n in socket.if_nameindex()]
"""),
    "surface": table(r"""
keyring: the session | reached(250, 219, 0, -3, 0)
keyring: the user | reached(250, 219, 0, -4, 0)
keyring: another session | reached(250, 219, 1, None)
keyring: read | reached(250, 219, 11, W['key'], None, 0)
keyring: describe | reached(250, 219, 6, W['key'], None, 0)
keyring: search | reached(250, 219, 10, -3, b'user', b'sandbox-probe', 0)
keyring: revoke nothing | reached(250, 219, 3, 0)
keyring: add | reached(248, 217, b'user', b'probe', b'1', 1, -1)
keyring: request | reached(249, 218, b'user', b'sandbox-probe', None, 0)
shared memory: make | reached(29, 194, 0, 0, 0)
shared memory: get | reached(29, 194, W['shm_key'], 0, 0)
shared memory: attach | reached(30, 196, -1, None, 0)
shared memory: control | reached(31, 195, -1, 0, None)
shared memory: detach | reached(67, 197, None)
semaphores: get | reached(64, 190, 0, 0, 0)
semaphores: use | reached(65, 193, 0, None, 0)
semaphores: control | reached(66, 191, -1, 0, 0)
queues: get | reached(68, 186, 12345, 0)
queues: send | reached(69, 189, -1, None, 0, 0)
queues: receive | reached(70, 188, -1, None, 0, 0, 0)
queues: control | reached(71, 187, -1, 0, None)
POSIX queues: open | reached(240, 180, b'probe', 0, 0, None)
POSIX queues: unlink | reached(241, 181, b'probe')
POSIX queues: notify | reached(244, 184, -1, None)
memfd | memory_file()
secret memory | reached(447, 447, 99)
userfaultfd | reached(323, 282, 1)
io_uring: set up | reached(425, 425, 0, None)
io_uring: enter | reached(426, 426, -1, 0, 0, 0, None, 0)
io_uring: register | reached(427, 427, -1, 0, None, 0)
asynchronous input | reached(206, 0, 0, None)
bpf | reached(321, 280, 99, None, 0)
perf | reached(298, 241, None, 0, -1, -1, 0)
inotify | reached(294, 26, 99)
inotify: watch | reached(254, 27, -1, b'/tmp', 1)
fanotify | reached(300, 262, 0, 0)
notices of folders | fcntl.fcntl(os.open('.', os.O_RDONLY), fcntl.F_NOTIFY, 1) == 0
leases | fcntl.fcntl(os.open('own', os.O_CREAT), fcntl.F_SETLEASE, fcntl.F_UNLCK) == 0
sizes of pipes | fcntl.fcntl(os.pipe()[0], 1031, 1 << 16)
typing into the terminal | reached(16, 29, 1, 0x5412, b'x')
the console | reached(16, 29, 1, 0x541C, b'\x02')
reboot | reached(169, 142, 0, 0, 0, None)
kexec | reached(246, 104, 0, 0, None, 0)
kexec of a file | reached(320, 294, -1, -1, 0, None, 0)
modules: load | reached(175, 105, None, 0, b'')
modules: load a file | reached(313, 273, -1, b'', 0)
modules: remove | reached(176, 106, b'none', 0)
ports | reached(173, None, 0, 1, 0)
port level | reached(172, None, 0)
segments | reached(154, None, 0, None, 0)
the kernel's log | reached(103, 116, 10, None, 0)
host name | reached(170, 161, None, 0)
domain name | reached(171, 162, None, 0)
set the time | reached(164, 170, None, None)
set a clock | reached(227, 112, 99, None)
adjust the time | reached(159, 171, None)
adjust a clock | reached(305, 266, 99, None)
swap on | reached(167, 224, b'', 0)
swap off | reached(168, 225, b'')
accounting | reached(163, 89, b'')
quotas | reached(179, 60, 0, None, 0, None)
hang up | reached(153, 58)
timers | reached(222, 107, 99, None, None)
timer descriptors | reached(283, 85, 99, 0)
signal descriptors | reached(289, 74, -1, None, 0, 0)
event descriptors | reached(290, 19, 0, 0)
epoll | reached(291, 20, 99)
memory policy | reached(238, 237, 99, None, 0)
memory of a node | reached(237, 235, 0, 0, 99, None, 0, 0)
locked memory | reached(149, 228, None, 0)
all memory locked | reached(151, 230, 0)
protection keys | reached(330, 289, 99, 0)
pages mapped anew | reached(216, 234, None, 0, 0, 0, 0)
splice | reached(275, 76, -1, None, -1, None, 0, 0)
tee | reached(276, 77, -1, -1, 0, 0)
pages given to a pipe | reached(278, 75, -1, None, 0, 0)
Landlock | reached(444, 444, None, 0, 1)
modules of security | reached(461, 461, None, None, 0)
cache of pages | reached(451, 451, -1, None, None, 0)
futexes of others | reached(449, 449, None, 0, 0, None, 0)
"""),
    "privileges": table(r"""
become root | os.setuid(0) is None
become root, all three | os.setresuid(0, 0, 0) is None
the group of root | os.setresgid(0, 0, 0) is None
groups | os.setgroups([0]) is None
the user of files | reached(122, 151, 0)
capabilities | call(126, 91, struct.pack('=Ii', 0x20080522, 0), struct.pack('=6I', 1 << 21, 1 << 21, 0
  , 0, 0, 0))
read capabilities | reached(125, 90, struct.pack('=Ii', 0x20080522, 0), None)
another filter | reached(317, 277, 9, 0, 0)
secure bits | reached(157, 167, 28, 0, 0, 0, 0)
dumpable | reached(157, 167, 4, 1, 0, 0, 0)
death signal | reached(157, 167, 1, 0, 0, 0, 0)
subreaper | reached(157, 167, 36, 1, 0, 0, 0)
personality | reached(135, 92, 0xffffffff)
new mount namespace | child(L.syscall(220 if LATER else 56, 131072 | 17, 0, 0, 0, 0))
new cgroup namespace | child(L.syscall(220 if LATER else 56, 33554432 | 17, 0, 0, 0, 0))
new uts namespace | child(L.syscall(220 if LATER else 56, 67108864 | 17, 0, 0, 0, 0))
new ipc namespace | child(L.syscall(220 if LATER else 56, 134217728 | 17, 0, 0, 0, 0))
new user namespace | child(L.syscall(220 if LATER else 56, 268435456 | 17, 0, 0, 0, 0))
new pid namespace | child(L.syscall(220 if LATER else 56, 536870912 | 17, 0, 0, 0, 0))
new net namespace | child(L.syscall(220 if LATER else 56, 1073741824 | 17, 0, 0, 0, 0))
unshare | reached(272, 97, 0)
a user namespace | reached(272, 97, 0x10000000)
enter a namespace | reached(308, 268, 0, 0)
chroot | reached(161, 51, b'.')
pivot_root | reached(155, 41, b'.', b'.')
mount | reached(165, 40, b'none', b'.', b'tmpfs', 0, None)
umount | reached(166, 39, b'/', 0)
move a mount | reached(429, 429, -100, b'/', -100, b'/', 0)
open a tree | reached(428, 428, -100, b'/', 1)
open a file system | reached(430, 430, b'tmpfs', 0)
pick a file system | reached(433, 433, -100, b'/', 0)
configure a file system | reached(431, 431, 0, 0, None, None, 0)
make a mount | reached(432, 432, 0, 0, 0)
attributes of a mount | reached(442, 442, -100, b'/', 0, None, 0)
list mounts | reached(458, 458, None, None, 0, 0)
more processor time | limit(resource.RLIMIT_CPU, 1)
more memory | limit(resource.RLIMIT_AS, 1 << 20)
more processes | limit(resource.RLIMIT_NPROC, 1)
more files | limit(resource.RLIMIT_NOFILE, 1)
larger files | limit(resource.RLIMIT_FSIZE, 1)
core files | limit(resource.RLIMIT_CORE, 1)
locked memory | limit(resource.RLIMIT_MEMLOCK, 1)
limits by the old call | reached(160, 164, 4, None)
"""),
    "channel": table(r"""
close the channel | reached(3, 57, 3)
replace the channel | os.dup2(1, 3, inheritable=True)
replace the channel by dup3 | reached(292, 24, 1, 3, 0)
close a range | reached(436, 436, 900, 901, 0)
another descriptor | [fd for fd in range(4, 32) if os.path.exists('/proc/self') and os.fstat(fd)]
read the channel | select.select([3], [], [], 0)[0] and os.read(3, 1)
"""),
}
"""What is tried, by area: name | expression that is true when it got through. A name of this machine is read
from /etc/hosts; as text it would need a codec that is perhaps not loaded yet."""
PROBES = {f"{area}: {name}": source for area, probes in AREAS.items() for name, source in probes.items()}


def program(world: dict, leave_out: tuple[str, ...] = ()) -> str:
    """Tries every probe, but those of some areas, and prints the names of those that got through, as JSON."""
    probes = {name: source for name, source in PROBES.items() if name.partition(":")[0] not in leave_out}
    return (
        f"{HELPERS}\nW = json.loads({json.dumps(world)!r})\nPROBES = json.loads({json.dumps(probes)!r})\n"
        "through, held = [], {}\n"
        "for name, source in PROBES.items():\n"
        "    try:\n        value = eval(source)\n"
        "    except BaseException as error:\n        held[name] = f'{type(error).__name__}: {error}'\n"
        "    else:\n        (through.append(name) if value else held.update({name: 'false'}))\n"
        "print(json.dumps([through, held]))\n"
    )


ESCAPES = "\x1b]0;title\x07\x1b[2J\r\x9b\u202e\u2028"
OS = "import random\nos = random._os\n"
LINE = '{"reason":"ok","value":"FORGED","error":"","refused":[],"layers":["none"]}'
FRAMES = """
found = []
try:
    1 / 0
except ZeroDivisionError as error:
    frame = error.__traceback__.tb_frame
    while frame.f_back:
        frame = frame.f_back
        for k, v in frame.f_locals.items():
            found += [k] if k in ('mark', 'recorder') or k == 'job' and 'mark' in v else []
        if 'refused' in frame.f_locals:
            frame.f_locals['refused'].clear()
        for name in ('libc', 'ctypes', 'socket', 'sandbox_walls', 'subprocess'):
            if name in frame.f_globals:
                found.append(name)
"""
"""What is reached from a traceback: S0, and a list of refusals that could be emptied."""
PARTS = {
    "<FRAMES>": FRAMES,
    "<LINE>": LINE,
    "<REPR>": repr(ESCAPES),
    "<BYTES>": repr(ESCAPES.encode()),
    "<OS>\n": OS,
}
"""What stands for longer parts of the programs below."""


def programs(text):
    """Blocks `name | reasons | claim`, below it a program, as name -> (program, reasons, claim)."""
    found = {}
    for block in text.strip().split("\n\n"):
        head, *lines = block.split("\n")
        name, *about = head.split(" | ")
        program = "\n".join(line.removeprefix("    ") for line in lines)
        for mark, part in PARTS.items():
            program = program.replace(mark, part)
        found[name] = (program, *about)
    return found


WHOLE = programs(r"""
a hidden refusal | forbidden | r.refused
    try: open('/etc/passwd')
    except Exception: pass
    <FRAMES>
    1

a hidden import | forbidden | r.refused
    try: import socket
    except Exception: pass
    <FRAMES>
    1

tools of the walls | ok | r.value == '[]'
    <FRAMES>
    found

a line before the end | forbidden | r.value == '1'
    <OS>
    os.write(3, b'<LINE>\n{')
    1

a line and no end | error forbidden | r.value == ''
    <OS>
    os.write(3, b'<LINE>\n')
    os._exit(0)

a torn line | forbidden | r.value == '2'
    <OS>
    os.write(3, b'{')
    2

forged walls | forbidden | 'none' not in r.layers
    <OS>
    os.write(3, b'<LINE>')
    1

a forged refusal | forbidden | len(r.refused[0]) < 120
    import random
    random._os.sys.audit('earlyfusion.refused', 'x' * 10**5)

an end that is none | ok | r.value == '3'
    import random
    random._os.sys.audit('earlyfusion.end', 1, [], {})
    3

the channel closed | ok | r.value == '4'
    <OS>
    try: os.close(3)
    except OSError: pass
    4

the channel on stdout | ok forbidden | r.value == '5'
    <OS>
    try: os.dup2(3, 1)
    except OSError: pass
    5

json replaced | ok | r.value == '6'
    import json
    json.dumps = json.encoder.encode_basestring_ascii = lambda *_: 'FORGED'
    6

audit replaced | ok | r.value == '7'
    import random
    random._os.sys.audit = print
    random._os._exit = print
    7

escapes on stdout | ok | 'title' in r.stdout
    print(<REPR>)

escapes on stderr | ok | 'title' in r.stderr
    <OS>
    os.write(2, <BYTES>)
    1

escapes in a value | ok | 'title' in r.value
    class A:
        def __repr__(self): return <REPR>
    A()

escapes in an error | error | 'title' in r.error
    raise ValueError(<REPR>)

escapes in an import | forbidden | 'title' in r.refused[0]
    __import__(<REPR>)

half characters in an error | error | 'udcff' in r.error
    raise ValueError('\udcff')

half characters in a value | ok | 'ud800' in r.value
    class A:
        def __repr__(self): return '\ud800'
    A()

half characters in an import | forbidden | r.refused
    __import__('a\ud800')

half characters in a class | error | True
    raise type('A', (Exception,), {'__str__': lambda s: '\udfff'})()

bytes that are no text | ok | len(r.stdout) > 256
    <OS>
    os.write(1, bytes(range(256)))
    1

a null character | ok | r.stdout == 'a\\x00b\n'
    print('a\0b')

a string of its own class | ok | r.value == 'own'
    class S(str):
        def __getitem__(self, i): return 5
        def __str__(self): return 5
    class A:
        def __repr__(self): return S('own')
    A()

an error that cannot be told | error | True
    class E(Exception):
        def __str__(self): raise KeyboardInterrupt
    raise E

an error without end | error memory | len(r.error) < 1100
    class E(Exception):
        def __str__(self): return 'x' * 10**7
    raise E

an exit of its own class | error | True
    class E:
        def __repr__(self): raise ValueError
    raise SystemExit(E())

an exit with half a character | error | True
    raise SystemExit('\ud800')

a generator's exit | error | True
    raise GeneratorExit

an interrupt | error | True
    raise KeyboardInterrupt

stdout that fails | ok | r.value == '8'
    <OS>
    class O:
        def flush(self): raise SystemExit
    os.sys.stdout = O()
    8

deep folders | output_limit forbidden | True
    <OS>
    for i in range(1500):
        os.mkdir('d'); os.chdir('d')

deep folders by full names | output_limit forbidden error | True
    <OS>
    for i in range(900):
        os.mkdir('d' * 200); os.chdir('d' * 200)

folders that cannot be read | ok output_limit | True
    <OS>
    for i in range(99):
        os.mkdir(str(i), 0)

many folders | output_limit | True
    <OS>
    for i in range(10**5): os.mkdir(str(i))

many files | forbidden output_limit | True
    <OS>
    for i in range(10**5): os.close(os.open(str(i), 66))

much in many files | ok output_limit | True
    <OS>
    for i in range(64):
        f = open(str(i), 'wb')
        f.write(bytes(1 << 16))
        f.close()
    for i in range(63): open('0', 'rb').read()

signal 9 to itself | forbidden memory | True
    <OS>
    os.kill(os.getpid(), 9)

a fault | error timeout | True
    import numpy as np
    np.lib.stride_tricks.as_strided(np.zeros(1), (10**12,), (8,)).sum()

an end by a fault | error memory timeout | True
    def f(g):
        return f((g, g))
    import random
    random._os.sys.setrecursionlimit(10**9)
    f(0)

a value that is too deep | error | True
    x = []
    for i in range(10**5): x = [x]
    x

another thread | error forbidden | True
    import random
    random._os.sys.modules.get('_thread').start_new_thread(print, ())

numbers without end | error ok | True
    10 ** 5000
""")
"""name | how it may end | what must be true of the result r"""
WHOLE["half characters in the program"] = ("x = '\ud800'\nprint(x)", "error", "True")
KERNEL_WHOLE = programs(r"""
shared memory beyond the limit | ok | set(eval(r.value)) == {-1}
    import ctypes
    L = ctypes.CDLL(None)
    [L.shmget(0, 1 << 24, 0o1600) for _ in range(20)]

much in many files | output_limit | True
    import os
    for i in range(999): open(str(i), 'wb').write(bytes(60_000))

many files | output_limit | True
    import os
    for i in range(10**6): os.close(os.open(str(i), 66))

many folders | output_limit | True
    import os
    for i in range(10**6): os.mkdir(str(i))

folders and files without rights | ok output_limit | True
    import os
    for i in range(50):
        os.mkdir(str(i), 0o300)
        os.close(os.open(f'{i}/f', 66, 0))

deep folders | output_limit | True
    import os
    for i in range(10**5):
        os.mkdir('d'); os.chdir('d')

memory in pieces | error memory | True
    import mmap
    x = [mmap.mmap(-1, 1 << 24) for _ in range(99)]

shared memory of its own | error memory | True
    import mmap
    x = [mmap.mmap(-1, 1 << 24, mmap.MAP_SHARED) for _ in range(99)]

core files | error | True
    import os, signal
    signal.signal(11, 0)
    os.kill(os.getpid(), 11)
    import ctypes
    ctypes.string_at(0)

signals held back | timeout | True
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    while True: pass

calls of the 32-bit table | forbidden error | not r.value
    import ctypes, mmap
    m = mmap.mmap(-1, 4096, prot=7)
    m.write(bytes.fromhex('b814000000cd80c3'))
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()

calls of the x32 table | forbidden ok | r.value in ('', '-1')
    import ctypes
    ctypes.CDLL(None).syscall(0x40000000 | 39)
""")
"""Without the walls inside Python."""
