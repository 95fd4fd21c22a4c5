"""Two environments of the package verifiers: a guessing game, and a question with a tool."""

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    """Higher or lower, until the number is said."""

    async def env_response(self, messages, state, **_):
        said = int(messages[-1].content)
        if said == int(state["answer"]):
            state["found"] = True
        word = "right" if state.get("found") else "higher" if said < int(state["answer"]) else "lower"
        if state.get("found"):
            state["final_env_response"] = [vf.UserMessage(content=word)]
        return [vf.UserMessage(content=word)]


def found(state):
    return 1.0 / len(state["trajectory"]) if state.get("found") else 0.0


def double(number: int) -> str:
    """Twice a number."""
    return str(2 * number)


def right(completion, answer):
    return float(completion[-1].content == answer)


def load_environment(tools=False):
    rows = [{"question": f"number {i}", "answer": str(2 * i if tools else i)} for i in range(6)]
    train, held = Dataset.from_list(rows[:4]), Dataset.from_list(rows[4:])
    if tools:
        rubric = vf.Rubric(funcs=[right])
        return vf.ToolEnv(tools=[double], dataset=train, eval_dataset=held, rubric=rubric, max_turns=4)
    rubric = vf.Rubric(funcs=[found])
    return Guess(dataset=train, eval_dataset=held, rubric=rubric, max_turns=5, system_prompt="Guess.")
