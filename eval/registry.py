"""The benchmarks by name. A file of eval/benchmarks says its own:

    @benchmark("counting", "how many objects: exact, mean absolute error")
    class Counting(BaseTask): ...

The files are imported when a benchmark is first asked for.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from earlyfusion.eval import benchmarks
from earlyfusion.eval.benchmarks.base import BaseTask
from earlyfusion.eval.protocol import EvalError, TaskOptions
from earlyfusion.kernels.errors import did_you_mean

Factory = TypeVar("Factory", bound=Callable[[TaskOptions], BaseTask])


class Benchmark(NamedTuple):
    """make: TaskOptions -> BaseTask. text: one line for the list."""

    make: Callable[[TaskOptions], BaseTask]
    text: str


HARNESS_TASKS = ("blimp", "piqa", "bbh", "gsm8k")
"""Text benchmarks that lm-evaluation-harness asks for us (eval/benchmarks/lm_eval.py)."""

_KNOWN: dict[str, Benchmark] = {}


def benchmark(name: str, text: str) -> Callable[[Factory], Factory]:
    """Decorator of a class or function that makes a task of TaskOptions."""

    def add(factory: Factory) -> Factory:
        _KNOWN[name] = Benchmark(factory, text)
        return factory

    return add


def known_benchmarks() -> Mapping[str, Benchmark]:
    """All benchmarks, by name."""
    # Importing a file is what registers its benchmarks.
    for found in pkgutil.iter_modules(benchmarks.__path__):
        importlib.import_module(f"{benchmarks.__name__}.{found.name}")
    return dict(sorted(_KNOWN.items()))


def build_task(name: str, options: TaskOptions | None = None) -> BaseTask:
    """The task of that name. Raises EvalError for an unknown name."""
    if name in HARNESS_TASKS:
        raise EvalError(
            f"task {name!r} is asked by lm-evaluation-harness: earlyfusion eval --harness lm-eval --tasks"
            f" {name} --data {name}=PATH (pip install 'earlyfusion[eval]')"
        )
    # All files are imported first: a name is only unknown when nobody has said it.
    known = known_benchmarks()
    if name not in known:
        raise EvalError(f"unknown task {name!r}; {did_you_mean(name, known)}")
    return known[name].make(options or TaskOptions())


def build_by_name(given: str, options: TaskOptions, data: Mapping[str, str | Path]) -> BaseTask:
    """The task of "name" or "name:form", with its own data path where there is one."""
    name, _, form = given.partition(":")
    path = data.get(name, options.data)
    # A form in the name goes before one for all tasks.
    place = None if path is None else Path(path)
    return build_task(name, replace(options, form=form or options.form, data=place))
