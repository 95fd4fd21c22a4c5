"""The shipped studies: what each asks, and what was published."""

from rich.table import Table

from earlyfusion.data.options import Options, verb
from earlyfusion.data.tables import print_table
from earlyfusion.pipeline.study.ladder import FOLDER, read_ladder
from earlyfusion.rl.verbs import STUDIES

TRANSFER = "Kimi K2.5: visual RL raised text benchmarks (MMLU-Pro 84.7 to 86.4, GPQA-Diamond 84.3 to 86.4)"


class ListOptions(Options):
    pass


@verb
def listing(options: ListOptions) -> None:
    """Entry of `earlyfusion study list`."""
    table = Table(title="earlyfusion study NAME", title_justify="left")
    for head in ("study", "what is asked", "what was published"):
        table.add_column(head)
    for name, study in STUDIES.items():
        if (FOLDER / f"{name}.toml").is_file():
            config = read_ladder(name, {})
            table.add_row(name, config.title, config.claim)
        elif name != "list":
            table.add_row(name, study.text, TRANSFER)
    print_table(table)
