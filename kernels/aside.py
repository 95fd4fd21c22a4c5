"""Plain functions beside an event loop."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def aside(function: Callable[..., Any], *given: Any) -> Any:
    """What a function returns or raises, run in a thread of its own.

    One that hangs is left to itself: its thread holds nothing that another waits for, and no loop waits for
    it at the end, as it would for asyncio's own threads.
    """
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def tell(outcome: Callable[[Any], None], value: Any) -> None:
        # Nobody waits any more after a deadline.
        if not waiter.done():
            outcome(value)

    def work() -> None:
        try:
            value, outcome = function(*given), waiter.set_result
        except Exception as error:
            value, outcome = error, waiter.set_exception
        except BaseException as error:  # SystemExit must not end this thread in silence
            value, outcome = RuntimeError(f"{type(error).__name__}: {error}"), waiter.set_exception
        # The loop may be gone by then.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, outcome, value)

    threading.Thread(target=work, daemon=True, name="aside").start()
    return await waiter
