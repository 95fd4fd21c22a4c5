"""Dispatch: the table is the contract between model code and kernels."""

import inspect

import pytest
import torch

from earlyfusion.kernels import dispatch


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    monkeypatch.delenv(dispatch.ENVIRONMENT, raising=False)


@pytest.mark.parametrize("op", dispatch.REGISTRY)
def test_every_registered_backend_exists_and_takes_the_arguments_of_the_definition(op):
    entries = dispatch.REGISTRY[op]
    assert "naive" in entries, "every operation has a definition"
    law = list(inspect.signature(dispatch.load(entries["naive"])).parameters.values())
    for path in entries.values():
        given = inspect.signature(dispatch.load(path)).parameters
        # Forms may take more options than the law, never fewer.
        names = [p.name for p in law if p.kind is not p.KEYWORD_ONLY]
        assert list(given)[: len(names)] == names, path
        assert {p.name for p in law} <= set(given), path


def test_the_backend_follows_the_device(monkeypatch):
    monkeypatch.setitem(dispatch.REGISTRY, "probe", {"naive": "a:b", "torch": "c:d", "triton": "e:f"})
    monkeypatch.setitem(dispatch.REGISTRY, "plain", {"naive": "a:b"})
    monkeypatch.setattr(dispatch, "_has_triton", lambda: True)
    assert dispatch.pick("probe", "cpu") == "torch"
    assert dispatch.pick("probe", torch.device("cuda", 1)) == "triton"
    assert dispatch.pick("probe", "meta") == "torch"
    assert dispatch.pick("plain", "cuda") == "naive"
    # float64 is for checking: a tensor of it never meets a kernel.
    assert dispatch.pick("probe", torch.empty(0, device="meta").double()) == "torch"
    monkeypatch.setitem(dispatch.REGISTRY, "probe", {"naive": "a:b", "torch": "c:d"})
    monkeypatch.setenv(dispatch.ENVIRONMENT, "triton")
    assert dispatch.pick("probe", "cuda") == "torch"


@pytest.mark.parametrize(
    ("value", "expected"), [("naive", "naive"), ("torch", "torch"), ("AUTO", "cpu"), ("", "cpu")]
)
def test_the_environment_picks_the_backend(monkeypatch, value, expected):
    monkeypatch.setenv(dispatch.ENVIRONMENT, value)
    assert dispatch.pick("kda", "cpu") == expected


def test_without_triton_installed_a_gpu_gets_the_torch_form(monkeypatch):
    monkeypatch.setattr(dispatch, "_has_triton", lambda: False)
    assert {dispatch.pick(op, "cuda") for op in dispatch.REGISTRY} <= {"torch", "naive"}


def test_resolve_returns_the_function_of_the_table():
    from earlyfusion.kernels.kda import chunk, recurrent

    assert dispatch.resolve("kda", torch.device("cpu")) is recurrent.kda
    assert dispatch.resolve("kda", torch.empty(0, dtype=torch.float64)) is chunk.kda
    rows = dispatch.table("cpu")
    assert [row[0] for row in rows] == list(dispatch.REGISTRY)
    assert ("kda", "cpu", "earlyfusion.kernels.kda.recurrent:kda") in rows


def test_unknown_names_are_refused_with_the_nearest_one(monkeypatch):
    with pytest.raises(ValueError, match="did you mean 'short_conv'"):
        dispatch.resolve("shrt_conv", "cpu")
    monkeypatch.setenv(dispatch.ENVIRONMENT, "tritn")
    with pytest.raises(ValueError, match="did you mean 'triton'"):
        dispatch.resolve("kda", "cpu")


def test_another_room_may_register_an_operation(monkeypatch):
    monkeypatch.setattr(dispatch, "REGISTRY", dict(dispatch.REGISTRY))
    dispatch.register("length", "naive", "builtins:len")
    assert dispatch.resolve("length", "cpu")([1, 2]) == 2
    with pytest.raises(ValueError, match="did you mean 'naive'"):
        dispatch.register("length", "naiv", "builtins:len")
