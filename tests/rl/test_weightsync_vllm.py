"""vLLM's transfer of weights, with a server in its place that keeps to the documented routes and joins over
gloo: every tensor arrives bit for bit under its name, in the order of the protocol, again after a failure."""

import json
import threading
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from serve_model import write_model

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.hub.folder import load_model, save_model
from earlyfusion.rl.fleet import served
from earlyfusion.rl.fleet.served import Served, ServedOptions
from earlyfusion.rl.weightsync.vllm import WeightTransfer, beside

WAIT = timedelta(seconds=30)
ROUND = ["pause?mode=keep", "start_weight_update", "update_weights", "finish_weight_update", "resume"]


class Workers:
    """Two workers of a server: what they were sent, and what they were asked to do."""

    def __init__(self):
        self.asked, self.updates, self.versions, self.received = [], [], [], [{}, {}]
        self.broken, self.groups, self.listed = False, [], {}
        workers = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                known = {"/v1/models": {"data": [{"id": "toy"}]}, "/get_world_size": {"world_size": 2}}
                self.answer(known[self.path])

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                workers.asked.append(self.path[1:])
                work = getattr(workers, self.path[1:].partition("?")[0], None)
                self.answer(work(body) if work else {})

            def answer(self, found):
                data = json.dumps(found or {}).encode()
                self.send_response(503 if found is False else 200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def init_weight_transfer_engine(self, body):
        about = body["init_info"]
        assert about["rank_offset"] == 1 and about["world_size"] == 3 and not about["packed"]
        self.listed = {}

        def join(rank):
            store = dist.TCPStore("127.0.0.1", about["port"], is_master=False)
            return dist.ProcessGroupGloo(store, rank, 3, WAIT)

        self.groups = [found.result() for found in [beside(join, rank) for rank in (1, 2)]]

    def update_weights(self, body):
        self.updates.append(body["update_info"])
        if self.broken:
            return False
        self.listed = body["update_info"] or self.listed
        options = dist.BroadcastOptions()
        options.rootRank = 0

        def receive(group, received):
            for name, dtype, shape in zip(*(self.listed[key] for key in ("names", "dtype_names", "shapes"))):
                received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                group.broadcast([received[name]], options).wait()

        for found in [beside(receive, *each) for each in zip(self.groups, self.received)]:
            found.result()

    def finish_weight_update(self, body):
        self.versions.append(body["weight_version"])


def join_gloo(world, device, tell):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = beside(tell, {"port": store.port})
    group = dist.ProcessGroupGloo(store, 0, world, WAIT)
    told.result()
    return group


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_arrive_whole_and_again_after_a_failure(tmp_path, monkeypatch, dtype):
    folder, workers = write_model(tmp_path / "model"), Workers()
    net, tokenizer = load_model(folder, dtype=dtype), Tokenizer.load(folder)
    options = ServedOptions(folder, tmp_path / "none", reload="update_weights")
    one = Served(workers.url, options)
    # NCCL has no CPU to join: named, and nothing was asked of the server.
    assert "NCCL joins GPUs" in Served.publish([one], net.state_dict(), 1)[0] and not workers.asked

    monkeypatch.setattr(served, "WeightTransfer", partial(WeightTransfer, join=join_gloo))
    for version in (1, 2):
        with torch.no_grad():
            net.decoder.embed_tokens.weight.mul_(1.3)
        assert Served.publish([one], net.state_dict(), version) == {} and one.version == version
        want = load_file(save_model(net, tokenizer, tmp_path / "want") / "model.safetensors")
        for received in workers.received:
            assert received.keys() == want.keys()
            for name, tensor in want.items():
                assert received[name].dtype == tensor.dtype and torch.equal(received[name], tensor), name
    assert workers.asked == ["init_weight_transfer_engine", *ROUND, *ROUND]
    assert workers.versions == ["1", "2"] and workers.updates[1] == {}, "the list is sent once"

    # The server refuses: told, asked once, not finished, writing goes on; whoever comes after begins anew.
    workers.broken = True
    assert "HTTP 503" in Served.publish([one], net.state_dict(), 3)[0] and one.version == 2
    assert workers.asked[-4:] == [*ROUND[:3], "resume"] and workers.versions == ["1", "2"]
    workers.broken = False
    after = one.successor()
    assert Served.publish([after], net.state_dict(), 4) == {}
    assert workers.versions[-1] == "4" and workers.updates[-1]["names"] == list(workers.received[0])
    workers.server.shutdown()
