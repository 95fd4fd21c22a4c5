"""`earlyfusion long2short`: give a long-thinking model's skill to short answers (Kimi k1.5, section 2.4).

average: weights of two or more models of one configuration. shortest: of n sampled answers the shortest right
one, as documents for fine-tuning. dpo: the shortest right answer against longer wrong ones and much longer
right ones. The fourth way, reinforcement learning with a length reward and a lower token limit, is
`earlyfusion rl` with [length].
"""

from __future__ import annotations

import sys

from earlyfusion.pipeline import cli
from earlyfusion.pipeline.verbs import Verb


def long2short() -> None:
    """Give a long-thinking model's skill to short answers."""


# A way is imported when it is called; the list of them needs no torch.
WAYS = {
    "average": Verb("earlyfusion.rl.long2short.average:average", "merge the weights of two or more models"),
    "shortest": Verb(
        "earlyfusion.rl.long2short.shortest:shortest", "shortest right answers as documents for SFT"
    ),
    "dpo": Verb("earlyfusion.rl.long2short.dpo:dpo", "preference training for shorter answers"),
}
app = cli.group_of(WAYS, long2short)


# torchrun starts modules, not console scripts.
if __name__ == "__main__":
    sys.exit(cli.main(["long2short", *sys.argv[1:]]))
