"""Programs nobody has read: what they may do works, what they may not is refused, counted, and the caller
goes on."""

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sandbox_probes import PARTS, programs

from earlyfusion.data.errors import DataError
from earlyfusion.eval.sandbox import host as module
from earlyfusion.eval.sandbox.host import REASONS, Limits, ProgramResult, Sandbox

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
SHORT = Limits(wall_s=2.0, cpu_s=1.0, memory_mb=128, file_bytes=1 << 16, output_bytes=1 << 14, max_chars=500)
ESCAPED = Path(tempfile.gettempdir()) / f"escaped-{os.getpid()}"
"""Where everybody may write, but no program."""


@pytest.fixture(scope="module")
def box():
    with Sandbox(
        SHORT, allow_weaker=True
    ) as sandbox:  # other tests look at walls; these at what programs get
        yield sandbox


def picture(seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (21, 34, 3), dtype=np.uint8))


# ---- what programs are for


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("1 + 1", "2"),
        ("print('a')\nprint('b')", "a\nb"),
        ("print('a')\n'b'", "a\n'b'"),
        ("x = 3", "(no output)"),
        ("import numpy as np\nnp.linalg.det(np.eye(3) * 2)", "np.float64(7.999999999999998)"),
        (
            "import math, json, statistics\njson.dumps([math.gcd(12, 18), statistics.mean([1, 2])])",
            "'[6, 1.5]'",
        ),
        ("open('a.txt', 'w').write('xyz')\nopen('a.txt').read()", "'xyz'"),
        ("class A:\n    def f(self): return [i ** 2 for i in range(3)]\nA().f()", "[0, 1, 4]"),
        ("1 / 0", "line 1: ZeroDivisionError: division by zero"),
        ("x = 1\ny = x +", "line 2: SyntaxError: invalid syntax"),
        ("def f():\n    return undefined\nf()", "line 2: NameError: name 'undefined' is not defined"),
    ],
)
def test_a_program_is_a_notebook_cell(box, code, text):
    result = box.run(code)
    assert (result.text, result.refused, result.ok) == (text, (), not text.startswith("line"))


@pytest.mark.parametrize("seed", [0, 1])
def test_pictures_are_mounted_exactly_and_ordinary_work_meets_no_wall(box, seed):
    image = picture(seed)
    code = (
        "from PIL import Image, ImageOps, ImageFilter, ImageDraw\nimport numpy as np\nim ="
        " Image.open('image.png')\nim.crop((2, 3, 9, 8)).resize((14,"
        " 10)).rotate(30).filter(ImageFilter.BLUR).save('b.png')\nImageDraw.Draw(im.copy()).text((0, 0),"
        " 'x')\nImageOps.invert(im).save('c.jpg')\nImage.open('c.jpg').load()\nnp.save('d.npy',"
        " np.array(im)); int(np.load('d.npy').astype(int).sum())"
    )
    result = box.run(code, {"image.png": image, "words.txt": "abc"})
    assert (result.reason, result.refused, result.stderr) == ("ok", (), "")
    assert int(result.value) == int(np.array(image).astype(int).sum())


def test_nothing_is_kept_from_one_program_to_the_next(box):
    assert box.run("open('left', 'w').write('x')\nimport math\nmath.pi = 3").ok
    assert box.run("import math\nmath.pi > 3.1").value == "True"
    assert box.run("open('left')").error.startswith("line 1: FileNotFoundError")


# ---- hostile programs

PARTS["<ESCAPED>"] = str(ESCAPED)
HOSTILE = programs(r"""
read | forbidden
    open('/etc/passwd').read()

read by numpy | forbidden
    import numpy as np
    np.fromfile('/etc/passwd', np.uint8)

read by pillow | forbidden
    from PIL import Image
    Image.open('../../etc/passwd')

read the process | forbidden
    open('/proc/self/environ').read()

write | forbidden
    open('<ESCAPED>', 'w').write('x')

write above | forbidden
    open('../escaped', 'w').write('x')

list | forbidden
    <OS>
    os.listdir('/')

link | forbidden
    <OS>
    os.symlink('/etc/passwd', 'p')
    open('p').read()

rename out | forbidden
    <OS>
    open('a', 'w').close()
    os.rename('a', '<ESCAPED>')

caught | forbidden
    try:
        open('/etc/passwd')
    except BaseException:
        pass
    'went on'

import | forbidden
    import os

import socket | forbidden
    import socket

import by hand | forbidden
    __import__('subprocess').run(['id'])

import by another's builtins | forbidden
    import random
    random.__builtins__['__import__']('subprocess')

ctypes | forbidden
    import numpy.ctypeslib as c
    c.load_library('libc.so.6', '/lib')

ctypes by another's builtins | forbidden
    import random
    random.__builtins__['__import__']('ctypes').CDLL(None)

gc | forbidden
    import random
    random.__builtins__['__import__']('gc').get_objects()

shell | forbidden
    <OS>
    os.system('touch <ESCAPED>')

fork bomb | forbidden
    <OS>
    while True: os.fork()

exec | forbidden
    <OS>
    os.execv('/bin/sh', ['sh'])

kill the parent | forbidden
    <OS>
    os.kill(os.getppid(), 9)

abort | error
    <OS>
    os.abort()

exit | error
    <OS>
    os._exit(0)

delete the directory | forbidden
    <OS>
    os.rmdir(os.getcwd())

delete what is in it | ok
    <OS>
    os.remove('image.png')
    os.listdir('.')

code objects | forbidden
    def f(): pass
    f.__code__.replace(co_code=b'\x00' * 8)
    f.__code__ = f.__code__
    1

pickle | forbidden
    import numpy as np
    np.save('a.npy', np.array([print], object))
    np.load('a.npy', allow_pickle=True)

many files | forbidden
    for i in range(10**6): open(str(i), 'w').close()

a large file | output_limit
    open('a', 'wb').write(bytes(10**6))

memory | memory
    x = bytearray(10**10)

memory in steps | memory
    x = []
    while True: x.append(bytearray(10**6))

memory by numpy | memory
    import numpy as np
    np.ones(10**9)

recursion | error
    def f(): f()
    f()

loop | timeout
    while True: pass

loop that catches all | timeout
    while True:
        try:
            while True: pass
        except BaseException: pass

sleep | timeout
    import time
    time.sleep(60)

one long operation | timeout
    x = 7 ** 10 ** 9

regular expression | timeout
    import re
    re.match('(a+)+$', 'a' * 60 + 'b')

output | output_limit
    print('x' * 10**6)

output for ever | output_limit
    while True: print('x' * 99)

errors for ever | output_limit
    <OS>
    while True: os.write(2, b'x' * 999)

results for ever | output_limit
    <OS>
    while True: os.write(3, b'x' * 9999)

a forged result | forbidden
    <OS>
    os.write(3, b'\n[1]\n{"reason": [], "refused": 3, "layers": 1}\n')
    os._exit(0)

a long value | ok
    'x' * 10**6

repr that fails | error
    class A:
        def __repr__(self): raise ValueError('no')
    A()

repr that hangs | timeout
    class A:
        def __repr__(self):
            while True: pass
    A()

broken stdout | ok
    <OS>
    os.sys.stdout = None
    1

closed descriptors | ok
    <OS>
    os.closerange(0, 3)
    1

exit code | error
    raise SystemExit(3)

null byte | error
    x = '\0'
    open('\0')

surrogates | ok
    print('\ud800')
    '\ud800'
""")
"""name | how it has to end"""
HOSTILE["deep nesting"] = ("(" * 5000 + ")" * 5000, "error")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_contained_and_the_next_one_runs(box, name):
    code, reason = HOSTILE[name]
    result = box.run(code, {"image.png": picture()})
    assert isinstance(result, ProgramResult) and result.reason in REASONS
    assert result.reason == reason, (result.error, result.stderr)
    assert reason != "forbidden" or result.refused
    assert all(len(part) < SHORT.max_chars + 60 for part in (result.stdout, result.stderr, result.value))
    assert result.seconds < SHORT.wall_s + 1
    assert not ESCAPED.exists()
    assert box.run("6 * 7").value == "42"


def test_processor_time_is_the_programs_own():
    """On a busy machine the kernel's limit, which counts ticks, once ended programs early, and they were told
    that the memory had run out."""
    with Sandbox(Limits(wall_s=60, cpu_s=0.3), allow_weaker=True) as box:
        result = box.run("while True: pass")
    assert result.reason == "timeout" and 0.3 <= result.cpu_s < 0.9, result


# ---- the caller's side


def test_no_directory_and_no_process_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    with Sandbox(SHORT, allow_weaker=True) as box:
        for code in ("1", "while True: pass", "open('a', 'w')", "print('x' * 10**6)"):
            box.run(code)
        server = box._server.pid
        children = Path(f"/proc/{server}/task/{server}/children")
        for _ in range(50):  # the last supervisor ends after its report
            if not children.read_text():
                break
            time.sleep(0.05)
        assert children.read_text() == ""
    assert not Path(f"/proc/{server}").exists() and list(tmp_path.iterdir()) == []


def test_a_server_that_was_killed_is_started_again():
    with Sandbox(SHORT, allow_weaker=True) as box:
        assert box.run("1").ok
        box._server.kill()
        box._server.wait()
        assert box.run("2").value == "2"


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/b", "a/../b"])
def test_a_file_name_that_leaves_the_directory_is_the_callers_error(box, name):
    with pytest.raises(DataError, match="plain file name"):
        box.run("1", {name: b"x"})


def test_a_program_ends_with_its_caller():
    """The caller is killed in the middle of a program: its server and the program go too."""
    script = (
        "from earlyfusion.eval.sandbox.host import Limits, Sandbox\nbox = Sandbox(Limits(wall_s=60,"
        " cpu_s=60), allow_weaker=True)\nbox.run('1')\nprint(box._server.pid, flush=True)\n"
        "box.run('while True: pass')\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as caller:
        server = int(caller.stdout.readline())
        children = Path(f"/proc/{server}/task/{server}/children")
        for _ in range(600):
            if children.read_text().split():
                break
            time.sleep(0.05)
        supervisor = int(children.read_text().split()[0])
        caller.kill()
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() for pid in (server, supervisor)):
            return
        time.sleep(0.05)
    pytest.fail("the server or a program outlived the caller")


def test_programs_from_threads_do_not_mix(box):
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda i: box.run(f"print({i})\n{i}").text, range(12)))
    assert texts == [f"{i}\n{i}" for i in range(12)]
