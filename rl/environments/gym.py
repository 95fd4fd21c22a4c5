"""Games of gymnasium: what is rendered is the picture, what the assistant says is the action.

    [[tasks]]
    name = "episode"                      # an episode of a seed, with nothing of its own to ask
    environment = "gymnasium"
    turns = 20

    [tasks.environment_options]
    id = "FrozenLake-v1"
    actions = ["left", "down", "right", "up"]
    options = { is_slippery = false }     # of gymnasium.make

The model sees a frame (render = true), the observation in words (words = true), or both, and the reward of
its last action. An action is the last name of `actions` in the message, or a number of a Discrete space; for
a Box or any other space JSON that fits it. A message without an action changes nothing and is told so; it
costs a turn.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image as PILImage

from earlyfusion.data.chat.template import Message
from earlyfusion.data.sample import Image, Segment, Text
from earlyfusion.data.tasks.problem import Problem
from earlyfusion.kernels.errors import one_line
from earlyfusion.kernels.files import Record, module_here, plain
from earlyfusion.rl.environments.base import Environment, EnvironmentFault, Step, environment


@environment("gymnasium")
class Gymnasium(Environment):
    """See the module. id: of gymnasium.make. actions: names of the actions of a Discrete space, in order.
    system: what the model is told first; made of the names if not given. options: of gymnasium.make. module:
    imported first, for games that register themselves. size: longest side of a frame, in pixels. Raises
    EnvironmentFault where gymnasium or the game is missing."""

    def __init__(
        self,
        id: str,
        actions: Sequence[str] = (),
        system: str = "",
        render: bool = True,
        words: bool = False,
        size: int | None = None,
        module: str = "",
        options: Record | None = None,
    ) -> None:
        try:
            import gymnasium  # of the extra `environments`
        except ImportError:
            raise EnvironmentFault(
                "environment 'gymnasium': pip install 'earlyfusion[environments]'"
            ) from None
        mode = "rgb_array" if render else None
        try:
            if module:
                module_here(module)
            self.game: Any = gymnasium.make(id, render_mode=mode, **(options or {}))
        except Exception as error:  # gymnasium's own, and whatever the game raises
            raise EnvironmentFault(f"gymnasium.make({id!r}): {one_line(error, 200)}") from None
        self.actions, self.render, self.words, self.size = list(actions), render, words, size
        space = self.game.action_space
        count = int(space.n) if isinstance(space, gymnasium.spaces.Discrete) else None
        if self.actions and count != len(self.actions):
            raise EnvironmentFault(f"{id}: {len(self.actions)} names of actions for the space {space}")
        if not self.actions and count is not None:
            self.actions = [str(i) for i in range(count)]
        self.choices = f"one of: {', '.join(self.actions)}" if self.actions else f"JSON of {space}"
        self.system = system or f"Play {id}. Answer with {self.choices}."

    def reset(self, problem: Problem) -> list[Message]:
        """The rules and the first frame; the episode is a function of the problem's seed."""
        seed = int(problem.meta.get("seed", 0)) % 2**31
        seen, _ = self.game.reset(seed=seed)
        # Spaces draw by themselves, too.
        self.game.action_space.seed(seed)
        return [Message("system", (Text(self.system, 0.0),)), self._shown(seen, problem.question)]

    def step(self, message: Message) -> Step:
        """One action of the game, or none where the message names none."""
        action = self._action(message.text)
        if action is None:
            told = Message("user", (Text(f"That is no action. Answer with {self.choices}.", 0.0),))
            return Step([told], counts={"not_an_action": 1})
        seen, reward, ended, cut, _ = self.game.step(action)
        done = bool(ended or cut)
        return Step([self._shown(seen, f"reward {float(reward):g}")], float(reward), done, {"actions": 1})

    def close(self) -> None:
        """Close the game."""
        self.game.close()

    def _action(self, text: str) -> Any:
        if self.actions:
            # The last one counts: a model may weigh several before it decides.
            names = "|".join(sorted(map(re.escape, self.actions), key=len, reverse=True))
            found = re.findall(rf"(?<!\w)({names})(?!\w)", text, re.IGNORECASE)
            known = [name.lower() for name in self.actions]
            return known.index(found[-1].lower()) if found else None
        try:
            action = np.asarray(json.loads(text), dtype=self.game.action_space.dtype)
        except (ValueError, TypeError, RecursionError):
            return None
        return action if self.game.action_space.contains(action) else None

    def _shown(self, seen: Any, told: str) -> Message:
        parts: list[Segment] = []
        if self.render:
            frame = PILImage.fromarray(np.asarray(self.game.render(), dtype=np.uint8))
            if self.size is not None:
                frame.thumbnail((self.size, self.size))
            parts.append(Image(frame.convert("RGB")))
        lines = [json.dumps(plain(seen))] if self.words or not self.render else []
        lines += [told] if told else []
        return Message("user", (*parts, Text("\n".join(lines), 0.0)))
