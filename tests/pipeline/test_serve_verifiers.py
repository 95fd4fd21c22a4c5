"""verifiers (0.2) with our endpoint as its model: its client, its rollouts, its rubric. Skipped where it is
missing (pip install 'verifiers<0.3')."""

import pytest
from serve_model import Server, write_model

from earlyfusion.pipeline.load import load


def test_verifiers_evaluates_with_it(tmp_path, monkeypatch):
    """Greedy answers over its client are those of our own call, turn by turn, and its rubric pays them."""
    vf = pytest.importorskip("verifiers", exc_type=ImportError)
    from datasets import Dataset

    folder = write_model(tmp_path / "model")
    model = load(folder)
    rows = [{"question": f"number {i}", "answer": "7"} for i in range(3)]

    def length(completion) -> float:
        return float(len(completion[-1]["content"]))

    class Twice(vf.MultiTurnEnv):
        """Asks for more once."""

        async def env_response(self, messages, state, **_):
            return [vf.UserMessage(content="more")]

    rubric = vf.Rubric(funcs=[length])
    environment = Twice(eval_dataset=Dataset.from_list(rows), rubric=rubric, max_turns=2)
    server = Server(folder, "--max-new-tokens 200 --context 1000", key="secret")
    try:
        monkeypatch.setenv("EARLYFUSION_KEY", "secret")
        config = vf.ClientConfig(api_base_url=server.url, api_key_var="EARLYFUSION_KEY")
        words = {"temperature": 0.0, "max_tokens": 12}
        made = environment.evaluate_sync(config, "model", sampling_args=words, rollouts_per_example=2)
    finally:
        server.close()

    assert len(made["outputs"]) == 6
    for output in made["outputs"]:
        asked = [{"role": m["role"], "content": m["content"]} for m in output["prompt"]]
        told = [{"role": m["role"], "content": m["content"]} for m in output["completion"]]
        assert [m["role"] for m in told] == ["assistant", "user", "assistant"]
        for turn in (0, 2):
            assert told[turn]["content"] == model.chat(
                [*asked, *told[:turn]], max_new_tokens=12, temperature=0.0
            )
        assert output["reward"] == float(len(told[-1]["content"]))
