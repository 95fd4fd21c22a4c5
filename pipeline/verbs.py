"""The verbs of the command line: what each is called, where its function is, one line of help.

A row is text alone, so that `earlyfusion --help` imports no verb. A higher floor adds its rows in a module of
its own (rl/verbs.py), which the package names (pipeline/package/__init__.py).
"""

from typing import NamedTuple


class Verb(NamedTuple):
    """One verb."""

    function: str
    """A "package.module:function" with typed arguments, a typer.Typer of several, or, of a verb of recipes, a
    function of RecipeArguments."""
    text: str
    """One line for the help."""
    schema: str = ""
    """Of a verb of recipes: "package.module:Model", what a recipe of it may hold."""
    recipe: str | None = None
    """The recipe where none is named."""
    options: str = ""
    """Of a verb of recipes with options of its own: "package.module:RecipeOptions"."""


_RUN = "earlyfusion.pipeline.config.schema:RunConfig"
VERBS = {
    "pretrain": Verb(
        "earlyfusion.pipeline.pretrain:run", "train from scratch, vision and text from step one", _RUN, "nano"
    ),
    "sft": Verb(
        "earlyfusion.pipeline.sft:run",
        "fine-tune on chats: tools, thinking, zero-vision SFT",
        _RUN,
        "sft-zero-vision",
    ),
    "generate": Verb(
        "earlyfusion.pipeline.generate_cmd:generate",
        "answer a prompt, with or without an image, from a model directory",
    ),
    "init": Verb("earlyfusion.pipeline.init_cmd:init", "look at data of your own and write a recipe for it"),
    "prepare": Verb(
        "earlyfusion.data.prepare.cmd:prepare",
        "turn folders, jsonl, parquet, datasets or videos into indexed shards",
    ),
    "data": Verb(
        "earlyfusion.pipeline.report.sheet:app",
        "inspect a mix or shards: tree, counts, contact sheet; write example pictures",
    ),
    "chat": Verb("earlyfusion.pipeline.chat:chat", "talk to a model in the terminal, images by path"),
    "serve": Verb("earlyfusion.pipeline.serve.app:serve", "an OpenAI-compatible endpoint"),
    "eval": Verb(
        "earlyfusion.pipeline.report.evaluation:evaluate",
        "benchmarks: MMLU-Pro, GPQA, vision tasks, any lm-eval task",
    ),
    "compare": Verb(
        "earlyfusion.pipeline.report.compare:compare",
        "paired deltas between evaluated models, with honest statistics",
    ),
    "website": Verb("earlyfusion.pipeline.cli:websites", "from a clip of a page to the page"),
    "bench": Verb("earlyfusion.pipeline.cli:benches", "measure speed and memory"),
    "plan": Verb(
        "earlyfusion.pipeline.plan:run",
        "print a recipe's sizes, FLOPs, routing and stages; what it needs on N GPUs",
        _RUN,
        None,
        "earlyfusion.pipeline.planner.options:PlanOptions",
    ),
    "import": Verb("earlyfusion.pipeline.import_cmd:import_", "a checkpoint of others as a model directory"),
    "export": Verb("earlyfusion.pipeline.export_cmd:export", "a training checkpoint as a model directory"),
    "doctor": Verb("earlyfusion.pipeline.doctor:doctor", "check versions, devices and kernels"),
}
"""Name -> verb, in the order of the help."""

# A benchmark's peers are imported when it runs, and only then.
BENCHES = {
    "train": Verb("earlyfusion.pipeline.bench.train:train", "a training step, beside transformers"),
    "growth": Verb("earlyfusion.pipeline.bench.growth:growth", "a token's cost by length, width and experts"),
    "speedrun": Verb("earlyfusion.pipeline.bench.speedrun:speedrun", "how soon a recipe reaches the target"),
    "kernels": Verb("earlyfusion.pipeline.bench.kernels:kernels", "every kernel, beside fla and torch"),
    "data": Verb("earlyfusion.pipeline.bench.data:data", "reading, decoding and packing, beside webdataset"),
    "engine": Verb("earlyfusion.pipeline.bench.engine:engine", "generation, beside transformers"),
    "website": Verb(
        "earlyfusion.pipeline.bench.website:website", "pages rendered and scored, beside Playwright"
    ),
    "lm-eval": Verb("earlyfusion.pipeline.bench.lm_eval:lm_eval", "letters of MMLU-Pro, beside lm-eval"),
}

WEBSITES = {
    "demo": Verb("earlyfusion.pipeline.website:demo", "write the page that a clip or a screenshot shows"),
    "serve": Verb("earlyfusion.pipeline.website:serve_site", "drop a clip in the browser, see its page"),
    "eval": Verb("earlyfusion.pipeline.website:evaluate", "score a model on held-out pages, with floors"),
    "score": Verb("earlyfusion.pipeline.website:score_pages", "score a page beside the one it should be"),
    "record": Verb("earlyfusion.pipeline.website:record", "a clip of a page, scrolled through"),
    "pages": Verb("earlyfusion.pipeline.website:pages", "render pages to learn from"),
}
