"""`earlyfusion bench kernels` on a CPU: it checks, measures, saves, and refuses what it does not know."""

import json
import sys
import types

import pytest
import torch

from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.segments import Segments
from earlyfusion.pipeline.bench import cases, kernels
from earlyfusion.pipeline.bench.case import Case, Setting, errors, peak_bytes
from earlyfusion.pipeline.bench.kernels import measure

CPU = torch.device("cpu")


def setting(against=()):
    return Setting(CPU, torch.float32, against, check=True)


def bench(out, **options) -> dict:
    """The report of a small run on the CPU."""
    given = {"only": "muon,rope", "rounds": 1, **options}
    assert kernels.kernels(out=str(out), **given) == 0
    return json.loads(out.read_text())


def test_the_command_checks_measures_and_saves(tmp_path, capsys):
    report = bench(tmp_path / "kernels.json", rounds=2)
    for labels in (report["errors"]["ours"], report["cases"]):
        assert {label.partition(":")[0] for label in labels} == {"rope", "muon"}
    for row in report["cases"].values():
        assert row["ours"]["forward_ms"] > 0 and row["ours"]["forward_peak_mib"] > 0
        assert 0 < row["ours"]["forward_share_of_floor"]
    assert "share_of_floor" in capsys.readouterr().out
    assert report["packages"]["torch"] == torch.__version__ and report["rates"]["copy_tb_per_s"] > 0


def test_a_broken_off_run_goes_on_where_it_was_on_the_same_machine_only(tmp_path, monkeypatch):
    out, calls = tmp_path / "kernels.json", []
    first = bench(out, only="rope")
    own = kernels.measure
    monkeypatch.setattr(
        kernels, "measure", lambda case, *given: calls.append(case.label) or own(case, *given)
    )
    again = bench(out, resume=True)
    assert [label.partition(":")[0] for label in calls] == ["muon"]
    assert first["cases"].items() <= again["cases"].items()
    for record in ('[1, "no record', json.dumps(again | {"threads": 99})):
        out.write_text(record)
        with pytest.raises(UserError, match="give another --out"):
            bench(out, resume=True)


def test_eager_peers_compute_what_ours_compute():
    """What everybody writes in plain torch: a document at a time, logits in full, a loop over experts."""
    found = {}
    for group in ("loss", "moe"):
        for case in kernels.cases(setting(["eager"]), [group]):
            found |= errors(case)
    assert set(found) == {"ours", "logits in full", "loop over experts"}
    assert max(found.values()) < 2e-5  # fp32, sums in another order

    for case in kernels.cases(Setting(CPU, torch.float32, ["eager"]), ["attention"]):
        got, expected = case.sides["SDPA per document"](*case.leaves), case.law(*case.leaves)[0]
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("option", ["only=kdaa: kda", "against=flaa: fla"])
def test_bad_options_are_named(tmp_path, option):
    given, match = option.split(": ")
    with pytest.raises(UserError, match=match):
        bench(tmp_path / "kernels.json", **dict([given.split("=")]))


@pytest.mark.parametrize(("lengths", "shape"), [((6, 6), (2, 6)), ((5, 7), (1, 12)), ((12,), (1, 12))])
def test_fla_is_called_as_its_users_call_it(lengths, shape, monkeypatch):
    """Real batches for equal lengths; else the very tensor of the call before, for which fla keeps its
    index."""
    seen = []

    def chunk_kda(q, k, v, f, b, **options):
        seen.append((tuple(q.shape[:2]), options["cu_seqlens"], options["safe_gate"]))
        return v, None

    monkeypatch.setitem(sys.modules, "fla.ops.kda", types.SimpleNamespace(chunk_kda=chunk_kda))
    segments, q = Segments(lengths), torch.randn(12, 2, 4)
    for safe in (False, True):
        side = cases.fla_kda(segments, CPU, -5.0, safe)
        for _ in range(2):
            assert torch.equal(side(q, q, q, q, q[..., 0], torch.zeros(2), torch.zeros(2, 4)), q)
    assert {found[0] for found in seen} == {shape}
    assert [found[2] for found in seen] == [False, False, True, True]
    assert seen[0][1] is seen[1][1] and (seen[0][1] is None) == (len(set(lengths)) == 1)


def double(**sides):
    """A case of doubling a number, with these sides."""
    x = torch.randn(5, 3, requires_grad=True)
    return Case("", "double", [x], sides, lambda a: 2 * a, [(8, 8), (8, 8)])


def test_a_wrong_kernel_is_noticed_in_outputs_and_in_gradients():
    wrong_gradient = lambda a: (2 * a).detach() + 2.1 * (a - a.detach())
    case = double(ours=lambda a: 2.1 * a, other=wrong_gradient, nan=lambda a: a * torch.nan)
    found = errors(case)
    assert found["ours"] == pytest.approx(0.05, rel=1e-3) == found["other"]
    assert found["nan"] == float("inf")


def test_a_failing_peer_is_told_and_not_fatal(capsys):
    case = double(ours=lambda a: 2 * a, peer=lambda a: a.no_kernel_image)
    assert set(measure(case, setting(), rounds=2)) == {"ours"} and errors(case)["peer"] == float("inf")
    assert capsys.readouterr().out.count("no_kernel_image") == 2


def test_the_regimes_are_what_they_are_called():
    """Mean decay per token in nats: R1 at most 5, R3 with heavy tails, R4 about a thousandth."""
    decays = {}
    for regime in cases.REGIMES:
        f, A_log, bias, bound = cases.gate(regime, 4000, 4, 32, setting())
        rate = A_log.exp()[:, None]
        if bound is None:
            decays[regime] = rate * torch.nn.functional.softplus(f + bias)
        else:
            decays[regime] = -bound * torch.sigmoid(rate * (f + bias))
    assert decays["R1"].max() <= 5
    assert decays["R3"].max() > 500 and decays["R3"].max() > 50 * decays["R3"].median()
    assert 5e-4 < decays["R4"].median() < 2e-3


def test_peak_memory_counts_what_is_alive_at_once():
    def call():
        a = torch.ones(1 << 20)
        del a
        b = torch.ones(1 << 19)
        return b + 1

    assert peak_bytes(call, CPU) == pytest.approx(4 << 20, rel=0.05)


def test_the_peers_of_kda_on_a_cpu_compute_the_same_and_are_measured():
    """What `--only kda` prints ratios of: two forms of one function, forward and backward. The ratios
    themselves are read from the command at T 2048 (docs/kernels.md), not from a timed test."""
    pytest.importorskip("transformers.models.kimi_linear")
    case = cases.kda_case("T96", (96,), 2, 16, "R2", setting(["transformers"]))
    found = errors(case)
    assert set(found) == {"ours", "transformers"}
    assert max(found.values()) < 1e-4  # fp32, sums in another order
    result = measure(case, setting(), rounds=1)
    assert result["ours / transformers"]["both_ms"] > 0
    for side in found:
        assert result[side]["both_ms"] > 0 and result[side]["both_peak_mib"] > 0
