"""The C++ under the decode step: products, exponentials, and a library that is built once or done without."""

import ctypes
import os
import platform
import shutil
import stat
import warnings

import pytest
import torch
from cases import refused

from earlyfusion.kernels.cpu import program as cpp
from earlyfusion.kernels.cpu.program import Sampling, compiled


@pytest.fixture
def anew():
    """For tests that set the environment of the compiler: nothing is known from before, and nothing
    afterwards."""
    cpp._library.cache_clear()
    yield
    cpp._library.cache_clear()


needs_compiler = pytest.mark.skipif(cpp.compiler() is None, reason="needs a C++ compiler")
FUNCTIONS = ("exp", "sigmoid", "softplus", "log", "log_one_minus")
# Fp32: two units in the last place, relative.
ROUNDING = 3e-7


def product(x, w, into=None):
    """x w by decode.cpp's product, added to `into` if given; rows may lie apart."""
    panels = cpp.pack(w)
    matrix = cpp.Matrix(panels.data_ptr(), *w.shape)
    out = x.new_full((len(x), w.shape[1]), float("nan")) if into is None else into
    rows = len(x), x.data_ptr(), x.stride(0)
    compiled().product(*rows, ctypes.byref(matrix), out.data_ptr(), out.stride(0), into is not None)
    return out


def function(name, x):
    """One of FUNCTIONS of contiguous numbers, as vector.h computes them."""
    y = torch.full_like(x, float("nan"))
    compiled().apply(FUNCTIONS.index(name), x.numel(), x.data_ptr(), y.data_ptr())
    return y


@needs_compiler
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 31, 64])
@pytest.mark.parametrize(("inner", "columns"), [(1, 1), (7, 5), (33, 32), (128, 452), (300, 97)])
def test_products_of_any_shape(rows, inner, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    # Rows that lie apart.
    x = torch.randn(rows, inner + 3, generator=generator)[:, 2 : 2 + inner]
    w = torch.randn(inner, columns, generator=generator)
    exact = x.double() @ w.double()
    # A running sum of `inner` terms of size 1.
    tolerance = 1e-6 * inner**0.5 * 4
    torch.testing.assert_close(product(x, w).double(), exact, atol=tolerance, rtol=0)
    around = torch.full((rows, columns + 4), float("nan"))
    around[:, 2:-2] = 1.0
    product(x, w, around[:, 2:-2])
    torch.testing.assert_close(around[:, 2:-2].double(), exact + 1, atol=2 * tolerance, rtol=0)
    # Nothing beside it was touched.
    assert around[:, :2].isnan().all() and around[:, -2:].isnan().all()


@needs_compiler
def test_a_row_of_a_product_has_its_bits_whatever_stands_around_it():
    x, w = torch.randn(40, 70), torch.randn(70, 50)
    whole = product(x, w)
    for first, end in [(0, 1), (3, 5), (7, 20), (39, 40), (11, 40)]:
        assert torch.equal(product(x[first:end], w), whole[first:end])


@needs_compiler
def test_exponentials():
    """Every float in coarse steps over the range where results are normal numbers, and odd counts."""
    x = torch.linspace(-86.9, 87.9, 1_000_003)
    around_one = torch.cat([torch.logspace(-30, 30, 300_001), torch.linspace(0.5, 2, 300_001)])
    below_one = torch.cat([torch.logspace(-9.6, -0.01, 300_001), 1 - torch.logspace(-7.2, -1, 300_001)])
    exact = {
        "exp": (x, torch.exp, ROUNDING),
        "sigmoid": (x, torch.sigmoid, 2 * ROUNDING),
        "softplus": (x, lambda y: torch.nn.functional.softplus(y, threshold=1000), 2 * ROUNDING),
        "log": (around_one, torch.log, 2 * ROUNDING),
        "log_one_minus": (below_one, lambda y: torch.log1p(-y), 2 * ROUNDING),
    }
    for name, (given, law, tolerance) in exact.items():
        want = law(given.double())
        # Relative to the result, also where it is near zero.
        off = (function(name, given).double() - want).abs() / (want.abs() + 1e-30)
        assert float(off.max()) < tolerance, name
    for count in range(1, 40):
        assert torch.equal(function("exp", x[:count].clone()), function("exp", x)[:count])


@needs_compiler
def test_exponentials_at_the_borders():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([-inf, -1e4, -87.5, 0.0, 88.5, 1e4, inf, nan])
    got = function("exp", x)
    assert (got[:3] > 0).all() and (got[:3] < 2e-38).all() and float(got[3]) == 1.0
    assert got[4:7].isfinite().all() and (got[4:7] > 1e38).all() and got[7].isnan()
    # A NaN must stay a NaN: a softmax over it would give finite probabilities.
    for name, law in (("sigmoid", torch.sigmoid), ("softplus", torch.nn.functional.softplus)):
        torch.testing.assert_close(function(name, x)[1:6], law(x)[1:6], atol=1e-37, rtol=1e-6)
        assert function(name, x)[7].isnan()


@needs_compiler
def test_structures_are_of_one_size_on_both_sides():
    """One field forgotten on one side, and addresses are read from beside it."""
    kinds = (cpp.Measure, cpp.Mix, cpp.Kda, cpp.Mla, cpp.Mlp, cpp.Moe, cpp.Finish)
    assert [kind.KIND for kind in kinds] == list(range(7))
    for which, structure in enumerate((*kinds, cpp.Step)):
        assert ctypes.sizeof(structure) == compiled().structure_size(which), structure
    assert ctypes.sizeof(Sampling) == compiled().sampling_size()


@needs_compiler
def test_other_dtypes_are_refused():
    program, ids = cpp.Program(8, 1), torch.zeros(2, dtype=torch.int32)
    refused(
        {
            "weight is torch.float64": lambda: program.keep(torch.zeros(3, dtype=torch.float64)),
            "weight has strides": lambda: program.keep(torch.zeros(3, 4).T),
            "slots is torch.int32": lambda: cpp.step_of(ids, ids, ids, ids, 8, torch.zeros(2, 8), 2),
        }
    )


@needs_compiler
def test_the_library_is_built_once(anew, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpp.library() is not None
    made = sorted((tmp_path / "earlyfusion").iterdir())
    assert {path.suffix for path in made} == {".sha256", ".so"} and len(made) == 2
    assert stat.S_IMODE((tmp_path / "earlyfusion").stat().st_mode) == 0o700
    monkeypatch.setattr(cpp, "_compile", lambda *_: pytest.fail("compiled again"))
    cpp._library.cache_clear()
    assert cpp.library() is not None and sorted((tmp_path / "earlyfusion").iterdir()) == made
    cpp._library.cache_clear()


@pytest.fixture
def kept(anew, monkeypatch, tmp_path):
    """A cache with one small library of a compiler that is quick, and how often it compiled."""
    calls = tmp_path / "calls"
    quick, source = tmp_path / "quick-cxx", tmp_path / "small.cpp"
    source.write_text('extern "C" void decode() {}')
    # A compiler for the tests: it makes a tiny library and counts how often it was called.
    quick.write_text(
        f'#!/bin/sh\nfor out; do :; done\n[ "$out" = --version ] && exit 0\necho "$1" >> {calls}\n'
        f'exec {shutil.which("g++")} -shared -fPIC {source} -o "$out"\n'
    )
    quick.chmod(0o755)
    monkeypatch.setenv("CXX", str(quick))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "earlyfusion"

    def load():
        cpp._library.cache_clear()
        return cpp.library(), len(calls.read_text().splitlines()) if calls.exists() else 0

    assert load()[1] == 1
    return folder, load, calls


needs_gxx = pytest.mark.skipif(
    shutil.which("g++") is None or shutil.which("sh") is None, reason="needs g++ and a shell"
)


@needs_gxx
@pytest.mark.parametrize("damage", ["half", "empty", "garbage", "no seal"])
def test_a_damaged_library_is_built_again(damage, kept):
    """Half a library loads and then kills the process; it is not loaded to find that out."""
    folder, load, _ = kept
    [made] = folder.glob("*.so")
    whole = made.read_bytes()
    # The one that is loaded stays as it is.
    made.unlink()
    made.write_bytes(
        {"half": whole[: len(whole) // 2], "empty": b"", "garbage": b"\0" * len(whole)}.get(damage, whole)
    )
    if damage == "no seal":
        made.with_suffix(".sha256").unlink()
    library, compiled_times = load()
    assert library is not None and compiled_times == 2 and made.read_bytes()[:4] == whole[:4]
    assert load()[1] == 2


@needs_gxx
@pytest.mark.parametrize("which", ["folder", "library", "owner"])
def test_a_cache_that_is_not_this_users_alone_is_not_loaded(which, kept):
    folder, load, _ = kept
    path, named = folder, r"may be written by another user .*rwxrwxrwx.*chmod go-w"
    if which != "folder":
        [path] = folder.glob("*.so")
    if which != "owner":
        path.chmod(0o777)
    elif os.getuid():
        pytest.skip("only root can give files away")
    else:
        named = "owner 12345"
        os.chown(path, 12345, -1)
    # What others may write is code that others choose.
    with pytest.warns(RuntimeWarning, match=named):
        assert load() == (None, 1)


@needs_gxx
def test_flags_inside_cxx_are_the_compilers(kept, monkeypatch):
    folder, load, calls = kept
    monkeypatch.setenv("CXX", f"{os.environ['CXX']} -DOTHER='a b'")
    library, compiled_times = load()
    assert library is not None and compiled_times == 2 and calls.read_text().splitlines()[1] == "-DOTHER=a b"
    # Other flags, another library.
    assert len(list(folder.glob("*.so"))) == 2
    monkeypatch.setenv("CXX", "g++ 'unclosed")
    assert cpp.compiler() is None


def test_without_a_compiler_or_a_wish_there_is_none(anew, monkeypatch):
    monkeypatch.setenv("EF_KERNELS", "torch")
    assert cpp.library() is None and "EF_KERNELS=torch" in cpp.status()
    monkeypatch.delenv("EF_KERNELS")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cpp.library() is None and "no C++ compiler" in cpp.status()
    with pytest.raises(RuntimeError, match="not compiled on this machine"):
        cpp.pack(torch.zeros(2, 2))


@pytest.mark.skipif(os.name == "nt" or shutil.which("sh") is None, reason="needs a shell")
def test_a_compiler_that_fails_is_told_and_leaves_nothing(anew, monkeypatch, tmp_path):
    broken = tmp_path / "broken-cxx"
    broken.write_text("#!/bin/sh\necho 'vector.h: what is this?' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="what is this") as said:
        assert cpp.library() is None
    assert "EF_KERNELS=torch" in str(said[0].message) and not list((tmp_path / "earlyfusion").iterdir())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Told once.
        assert cpp.library() is None
    assert "does not compile" in cpp.status()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("options", [("-march=x86-64-v3",), ("-Wall", "-Wextra", "-Werror")])
def test_narrower_vectors(options, anew, monkeypatch, tmp_path):
    """As on a processor with AVX2, and on one without."""
    if platform.machine() != "x86_64" or (
        options[0].startswith("-march") and not torch.cpu._is_avx2_supported()
    ):
        pytest.skip("needs an x86-64 processor with AVX2")
    monkeypatch.setattr(cpp, "NATIVE", (options,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpp.panel_width() == (16 if options[0].startswith("-march") else 8)
    test_products_of_any_shape(31, 33, 97, 0)
    test_a_row_of_a_product_has_its_bits_whatever_stands_around_it()
    test_exponentials()
    test_exponentials_at_the_borders()
