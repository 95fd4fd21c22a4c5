"""Episodes of an environment that asks by itself: a problem is a seed and nothing else."""

from earlyfusion.data.tasks.problem import Problem, Split, Task, TaskError, task


@task("episode")
class Episode(Task):
    """Seeds for environments (rl/environments): problem.meta["seed"], even ones to train on, odd ones held
    out. The environment says what there is to do, and pays. question: said beside the first thing that is
    seen."""

    levels = ({},)

    def __init__(self, question: str = "") -> None:
        self.question = question

    def sample(self, seed: int, split: Split = "train", difficulty: int = 0) -> Problem:
        """The episode of a number."""
        if split not in ("train", "test") or difficulty:
            raise TaskError(
                f"episode: split {split!r}, level {difficulty}; there are train and test, and level 0"
            )
        number = 2 * seed + (split == "test")
        return Problem(
            self.question,
            None,
            "",
            None,
            "",
            str(number),
            "",
            {"seed": number},
            self.name,
            f"{self.name}/{split}/0/{seed}",
        )

    def test_problems(self, count: int, seed: int, difficulty: int = 0) -> list[Problem]:
        """`count` held-out episodes."""
        return [self.sample(seed * count + i, "test", difficulty) for i in range(count)]

    def score(self, problem: Problem, answer: str) -> float:
        """Nothing: an environment that pays nothing has no right answer."""
        return 0.0
