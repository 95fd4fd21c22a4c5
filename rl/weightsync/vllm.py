"""New weights for vLLM by the routes that it documents: its workers join a group of NCCL, rank 0 broadcasts.

    VLLM_SERVER_DEV_MODE=1 vllm serve START --weight-transfer-config '{"backend": "nccl"}'
    roles.reload = "update_weights"                     in the recipe

A group a server: the trainer is rank 0, the workers follow. Names, dtypes and shapes go by HTTP. Calls that
the server answers once the group has met are made in a thread, while this side joins or sends. Answers that
are being written stand still meanwhile and go on with the new weights.

**It has not met a vLLM on a GPU.** The tests join a server of their own over gloo; NCCL's join is written by
the source alone: vLLM 0.33, docs/training/weight_transfer/nccl.md, "Trainer Without vLLM over HTTP".
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from earlyfusion.eval.models.base import EndpointModel
from earlyfusion.eval.protocol import EvalError
from earlyfusion.kernels.files import Record

Tell = Callable[[Record], Any]
"""Tells the server how to find the group, and returns when its workers have joined."""
JOIN_S = 60.0


def beside(work: Callable[..., Any], *given: Any) -> Future[Any]:
    """The result of a call in a thread that a process need not wait for when it ends."""
    found: Future[Any] = Future()

    def run() -> None:
        try:
            found.set_result(work(*given))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found


def join_nccl(world: int, device: torch.device, tell: Tell) -> Any:
    """The group of NCCL with this process as rank 0. Raises EvalError where the server does not join."""
    if device.type != "cuda":
        raise EvalError(f"roles.reload = update_weights: NCCL joins GPUs, the weights are on the {device}")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group: Any = dist.ProcessGroupNCCL(store, 0, world, dist.ProcessGroupNCCL.Options())
    joined = beside(group.eager_connect_single_device, device)
    # torch leaves the group's id under this key. Another client reads it: the first one is waiting.
    reader = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    reader.wait(["0"], timedelta(seconds=JOIN_S))
    told = beside(tell, {"nccl_unique_id_b64": base64.b64encode(reader.get("0")).decode()})
    # A server that refuses never joins, and nobody would end the wait for it.
    wait([joined, told], return_when=FIRST_COMPLETED)
    if told.done():
        told.result()
    joined.result()
    # The sum that every worker of vLLM asks for first.
    group.allreduce([torch.zeros(1, device=device)]).wait()
    told.result()
    return group


class WeightTransfer:
    """Trainer's end of the transfer to one server. Raises EvalError for a server that does not take it."""

    def __init__(self, server: EndpointModel, device: torch.device, join: Any = join_nccl) -> None:
        # Nothing is asked twice: a route that waits for the group has lost its part of it by then.
        self.server = EndpointModel(server.url, server.name, tries=1)
        self.known = Record()
        world = 1 + int(self._ask("get_world_size")["world_size"])

        def tell(place: Record) -> Record:
            about = {"rank_offset": 1, "world_size": world, "packed": False, **place}
            return self._ask("init_weight_transfer_engine", {"init_info": about})

        self.group = join(world, device, tell)

    def _ask(self, route: str, body: Record | None = None) -> Record:
        return self.server.request(f"{self.server.url.removesuffix('/v1')}/{route}", body)

    def send(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """All tensors, by their names in the server's checkpoint, and what the version is called. Raises
        EvalError; the server then waits for a whole transfer anew."""
        listed: Record = {
            "names": list(tensors),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        # Every list is long: the server remembers it.
        update = {} if listed == self.known else listed
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._ask("pause?mode=keep", {"mode": "keep"})
        try:
            self.known = Record()
            self._ask("start_weight_update", {"weight_version": None})
            told = beside(self._ask, "update_weights", {"update_info": update})
            sent = [self.group.broadcast([tensor.contiguous()], options) for tensor in tensors.values()]
            # First the server's word: where it failed, the broadcasts would wait for ever.
            told.result()
            for work in sent:
                work.wait()
            self._ask("finish_weight_update", {"weight_version": str(version)})
            self.known = listed
        finally:
            self._ask("resume", {"mode": "keep"})
