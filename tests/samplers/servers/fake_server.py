"""Fake of an inference server for tests: the HTTP interfaces of vLLM and SGLang over a table of logits, with faults.

The paths, fields and answers are those of vLLM 0.32 and SGLang 0.5.23; `test_schema` compares them. The next token
depends on the last one. Token 0 is the end token of the tests.
"""

import gzip
import itertools
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from realign.api import EngineCapabilities, SequenceSample
from realign.samplers.servers.sglang import Sglang
from realign.samplers.servers.vllm import RECEIVER, Vllm
from realign.samplers.servers.worker.realign_worker import WeightReceiver

DEFAULT = "default"
"""Label of weights that no client has set."""
MEMORY = {
    "vllm": frozenset({"weights", "kv_cache"}),
    "sglang": frozenset({"weights", "kv_cache", "cuda_graph"}),
}
"""Kinds of memory that a server frees when it sleeps."""


class Table:
    """Weights of a fake server: logits of the next token for each token, [V, V]."""

    def __init__(self, logits_VV):
        self.logits_VV = logits_VV

    def weights(self):
        return {"logits": self.logits_VV}

    def save(self, path):
        Path(path).mkdir(parents=True)
        save_file(self.weights(), Path(path) / "model.safetensors")

    def capabilities(self):
        return EngineCapabilities(frozenset({"logprobs"}), trainable=True, eos_token_ids=(0,))


class Scoring(Table):
    """Weights that can also score texts, as a training engine can."""

    def forward(self, data, mb_spec, post_hook):
        rows_TV = self.logits_VV.log_softmax(-1)[data["input_ids"].roll(1)]
        logprobs_T = rows_TV.gather(-1, data["input_ids"][:, None])[:, 0]
        return post_hook(SimpleNamespace(logprobs=lambda temperature, where_T: logprobs_T), data)


class Adapted(Scoring):
    """Weights with an adapter: logits of a base model, and what the adapter adds to them."""

    adapter_rank = 3

    def __init__(self, base_VV, added_VV):
        super().__init__(base_VV + added_VV)
        self.base_VV, self.added_VV = base_VV, added_VV

    def save_adapter(self, path):
        Table(self.added_VV).save(path)

    def save_base(self, path):
        Table(self.base_VV).save(path)


def logits_of(folder):
    """Read the logits that `Table` or `BigramEngine` wrote, or compute some from the weights of a real model."""
    bigram = Path(folder) / "bigram.npz"
    if bigram.exists():
        return torch.from_numpy(np.load(bigram)["logits"])
    if (adapter := Path(folder) / "adapter_model.safetensors").exists():
        return torch.stack([x.sum() for x in load_file(adapter).values()]).sum()
    weights = load_file(Path(folder) / "model.safetensors")
    return weights["logits"] if "logits" in weights else logits_from(weights)


def logits_from(weights):
    """Return logits that change with the embeddings of a real model."""
    return weights["model.embed_tokens.weight"] @ weights["lm_head.weight"].T


def random_table(seed, words=12):
    """Return random weights."""
    return Table(torch.randn(words, words, generator=torch.Generator().manual_seed(seed)))


class _Job:
    """A request that is being decoded."""

    def __init__(self, ids, most, least, stop_ids, temperature, seed, adapter=None, top_k=None):
        self.adapter, self.top_k, self.kept, self.raw = adapter, top_k, [], []
        self.prompt, self.ids, self.logprobs, self.reason = ids, [], [], None
        self.most, self.least, self.stop_ids, self.temperature = most, least, stop_ids, temperature
        self.generator = torch.Generator().manual_seed(seed or 0)
        self.done = threading.Event()

    def step(self, logits_VV):
        last = (self.ids or self.prompt)[-1]
        row_V = (logits_VV[last] / (self.temperature or 1.0)).clone()
        if len(self.ids) < self.least:
            row_V[[0, *self.stop_ids]] = -torch.inf  # also the end token, as vLLM does
        row_V = raw_V = row_V.log_softmax(-1)
        if self.top_k is not None:
            kept = row_V.topk(self.top_k)
            row_V = torch.full_like(row_V, -torch.inf).scatter(0, kept.indices, kept.values).log_softmax(-1)
            self.kept.append(kept.indices.tolist())
        token = (
            int(torch.multinomial(row_V.exp(), 1, generator=self.generator))
            if self.temperature
            else int(row_V.argmax())
        )
        self.ids.append(token)
        self.logprobs.append(float(row_V[token]))
        self.raw.append(float(raw_V[token]))
        if token in self.stop_ids:
            self.end("stop")
        elif len(self.ids) == self.most:
            self.end("length")

    def end(self, reason):
        self.reason = reason
        self.done.set()


class Receiver(WeightReceiver):
    """The methods of `WeightReceiver` in the only worker of a fake server."""

    rank = 0

    def __init__(self, server):
        self.server = self.model_runner = server


class Exchange(NamedTuple):
    """A request and its answer."""

    method: str
    path: str
    query: dict
    body: dict
    status: int
    answer: object


class FakeServer:
    """A server on loopback. `kind` is vllm or sglang."""

    def __init__(self, kind, table, *, token_s=0.0, port=0):
        self.kind, self.start_table, self.token_s = kind, table, token_s
        self.changed = threading.Condition()
        self.requests, self.jobs, self.paused, self.closed = [], [], False, False
        self.exchanges = []
        self.tokens_by_label = {}
        self.tamper = lambda path, body, answer: answer  # changes the status and the content of an answer
        self.faults = {}  # path -> list of functions, which get the handler and answer in place of the server
        self.adapters, self.asleep, self.sleeps = {}, frozenset(), 0
        self.dtype, self.receiver = "torch.float32", None
        self.set_weights(table.logits_VV, DEFAULT)
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # otherwise the body waits 40 ms for the client to confirm the header

            def log_message(self, *args):
                pass

            def answer_once_paused(self):
                with fake.changed:
                    fake.changed.wait_for(lambda: fake.closed or fake.paused)
                fake.answer(self, self.body)

            def do_GET(self):
                fake.answer(self, {})

            def do_POST(self):
                length = int(self.headers.get("Content-Length") or 0)
                self.body = json.loads(self.rfile.read(length) or b"{}")
                fake.answer(self, self.body)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 512

            def handle_error(self, request, client_address):
                pass  # a client closed its connection, as tests intend

        self.http = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        for target in (lambda: self.http.serve_forever(poll_interval=0.01), self._decode):
            threading.Thread(target=target, daemon=True).start()

    def set_weights(self, logits_VV, label):
        self.logits_VV, self.label = logits_VV, label

    def add_receiver(self):
        """Add the methods by which vLLM takes deltas."""
        self.receiver = Receiver(self)

    def logits(self, adapter):
        return self.logits_VV + (0 if adapter is None else self.adapters[adapter])

    def restart(self):
        """Lose the weights of clients and all running requests, like a process that was started again."""
        with self.changed:
            self.set_weights(self.start_table.logits_VV, DEFAULT)
            self.adapters.clear()
            if self.receiver is not None:
                self.add_receiver()
            self.paused, self.asleep = False, frozenset()
            for job in self.jobs:
                job.end("lost")
            self.jobs.clear()

    def close(self):
        """End the server; its requests get no answer."""
        with self.changed:
            self.closed = True
            for job in self.jobs:
                job.end("lost")
            self.jobs.clear()
            self.changed.notify_all()
        self.http.shutdown()
        self.http.server_close()

    def _decode(self):
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or (self.jobs and not self.paused))
                if self.closed:
                    return
                for job in list(self.jobs):
                    job.step(self.logits(job.adapter))
                    self.tokens_by_label[self.label] = self.tokens_by_label.get(self.label, 0) + 1
                self.jobs = [job for job in self.jobs if not job.done.is_set()]
            time.sleep(self.token_s)

    def run(self, job):
        """Decode a request. Returns False if the server lost it."""
        assert not self.asleep
        with self.changed:
            if not self.closed:
                self.jobs.append(job)
                self.changed.notify_all()
        while not self.closed and not job.done.wait(0.05):
            pass
        return job.reason not in (None, "lost")

    def pause(self):
        with self.changed:
            self.paused = True
            for job in self.jobs:
                job.end("abort")
            self.jobs.clear()
            self.changed.notify_all()

    def resume(self):
        with self.changed:
            self.paused = False
            self.changed.notify_all()

    def score(self, ids, adapter):
        """Return tokens and log-probs of a text but its first token; waits while the server is paused."""
        assert not self.asleep
        with self.changed:
            self.changed.wait_for(lambda: self.closed or not self.paused)
            rows = self.logits(adapter).log_softmax(-1)
        return [(after, float(rows[before, after])) for before, after in itertools.pairwise(ids)]

    def load(self, folder):
        assert "weights" not in self.asleep
        with self.changed:
            self.logits_VV = logits_of(folder)

    def reload_weights(self, weights_iterator):
        """Load tensors, as the model runner of vLLM does."""
        with self.changed:
            self.logits_VV = dict(weights_iterator)["logits"].float()

    def load_adapter(self, name, folder):
        assert "weights" not in self.asleep
        with self.changed:
            self.adapters[name] = logits_of(folder)

    def sleep(self, keeps_weights):
        """Free the memory; only an idle server can."""
        assert self.paused
        assert not self.asleep
        assert not self.jobs
        with self.changed:
            self.asleep = MEMORY[self.kind]
            self.sleeps += 1
            if not keeps_weights:
                self.logits_VV = torch.full_like(self.logits_VV, torch.nan)
                self.adapters.clear()

    def wake(self, tags):
        """Allocate some kinds of memory. SGLang ends with an error if one of them is allocated."""
        assert self.asleep >= set(tags)
        with self.changed:
            self.asleep -= set(tags)

    def answer(self, handler, body):
        """Answer a request, or play the next fault of its path."""
        parts = urlsplit(handler.path)
        self.requests.append((parts.path, body))
        if self.closed:
            handler.close_connection = True
            return
        if self.faults.get(parts.path):
            self.faults[parts.path].pop(0)(handler)
            return
        query = parse_qs(parts.query)
        reply = getattr(self, f"_{self.kind}")(parts.path, body, query)
        if reply is None:
            handler.close_connection = True
            return
        reply = self.tamper(parts.path, body, reply)
        single = {name: values[0] for name, values in query.items()}
        self.exchanges.append(Exchange(handler.command, parts.path, single, body, *reply))
        send(handler, *reply)

    def _vllm(self, path, body, query):
        if path == "/health":
            return 200, None
        if path == "/pause":
            assert query["mode"] == ["abort"]
            self.pause()
            return 200, {"status": "paused"}
        if path == "/resume":
            self.resume()
            return 200, {"status": "resumed"}
        if path == "/sleep":
            self.sleep(query["level"] == ["1"])
            return 200, {"status": "sleeping", "level": int(query["level"][0])}
        if path == "/wake_up":
            self.wake(query.get("tags") or self.asleep)
            self.resume()
            return 200, {"status": "awake", "tags": query.get("tags")}
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.adapters and not body["load_inplace"]:
                return 400, {"error": {"message": "has already been loaded"}}
            self.load_adapter(body["lora_name"], body["lora_path"])
            return 200, Text(f"Success: LoRA adapter '{body['lora_name']}' added successfully.")
        if path == "/v1/unload_lora_adapter":
            if self.adapters.pop(body["lora_name"], None) is None:
                return 404, {"error": {"message": "cannot be found"}}
            return 200, Text(f"Success: LoRA adapter '{body['lora_name']}' removed successfully.")
        if path == "/collective_rpc":
            methods = {"reload_weights": lambda weights_path: self.load(weights_path)}
            if self.receiver is not None:
                methods |= {name: getattr(self.receiver, name) for name in dir(WeightReceiver)}
            return 200, {"results": [methods[body["method"]](**body["kwargs"])]}
        if path == "/server_info":
            config = {
                "model_config": {"dtype": self.dtype},
                "parallel_config": {"worker_extension_cls": RECEIVER if self.receiver is not None else ""},
            }
            return 200, {"vllm_config": config, "vllm_env": {}, "system_env": {}}
        if path == "/reset_prefix_cache":
            return 200, {"success": not self.jobs}
        if path == "/update_weight_version":
            self.label = body["new_version"]
            return 200, {"success": True, "new_version": self.label}
        if path == "/weight_info":
            return 200, {"weight_version": self.label}
        if path != "/v1/completions":
            return 404, {"detail": "Not Found"}
        if (adapter := body.get("model")) is not None and adapter not in self.adapters:
            return 404, {"error": {"message": f"The model `{adapter}` does not exist.", "type": "NotFoundError"}}
        if max(body["prompt"]) >= len(self.logits_VV):
            return 400, {"error": {"message": "Token id is out of vocabulary", "type": "BadRequestError"}}
        if body["temperature"] < 0 or not body["return_token_ids"] or not body["ignore_eos"]:
            return 400, {"error": {"message": "unexpected parameters"}}
        if body.get("prompt_logprobs") is not None:
            rows = [{str(token): {"logprob": logprob}} for token, logprob in self.score(body["prompt"], adapter)]
            return 200, completion({"finish_reason": "length", "prompt_logprobs": [None, *rows]})
        job = _Job(
            body["prompt"],
            body["max_tokens"],
            body["min_tokens"],
            body["stop_token_ids"],
            body["temperature"],
            body["seed"],
            adapter,
        )
        if not self.run(job):
            return None
        choice = {"finish_reason": job.reason, "stop_reason": None, "token_ids": job.ids}
        return 200, completion(choice | {"logprobs": {"token_logprobs": job.logprobs}})

    def _sglang(self, path, body, query):
        if path == "/pause_generation":
            assert body == {"mode": "abort"}
            self.pause()
            return 200, {"message": "Generation paused successfully.", "status": "ok"}
        if path == "/continue_generation":
            self.resume()
            return 200, {"message": "Generation continued successfully.", "status": "ok"}
        if path == "/release_memory_occupation":
            self.sleep(keeps_weights=False)
            return 200, None
        if path == "/resume_memory_occupation":
            self.wake(body.get("tags") or self.asleep)
            return 200, None
        if path == "/load_lora_adapter":
            if body["lora_name"] in self.adapters:
                return 400, {"success": False, "error_message": "already loaded"}
            self.load_adapter(body["lora_name"], body["lora_path"])
            return 200, {"success": True, "error_message": None, "loaded_adapters": {}}
        if path == "/unload_lora_adapter":
            if self.adapters.pop(body["lora_name"], None) is None:
                return 400, {"success": False, "error_message": "not loaded"}
            return 200, {"success": True, "error_message": None, "loaded_adapters": {}}
        if path == "/flush_cache":
            return 200, Text("Cache flushed.")
        if path == "/update_weight_version":
            self.label = body["new_version"]
            return 200, {"success": True, "message": "Weight version updated", "new_version": self.label}
        if path == "/update_weights_from_disk":
            self.load(body["model_path"])
            self.label = body["weight_version"]
            return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        if path == "/model_info":
            return 200, {"weight_version": self.label}
        if path != "/generate":
            return 404, {"detail": "Not Found"}
        sampling = body["sampling_params"]
        if (adapter := body.get("lora_path")) is not None and adapter not in self.adapters:
            return 400, {"error": {"message": f"The adapter {adapter} has not been loaded"}}
        if max(body["input_ids"]) >= len(self.logits_VV):
            return 400, {"error": {"message": "The input contains token ids outside of the vocabulary"}}
        if body["logprob_start_len"] == 0:
            pairs = [[logprob, token, None] for token, logprob in self.score(body["input_ids"], adapter)]
            return 200, {"meta_info": {"input_token_logprobs": [[None, body["input_ids"][0], None], *pairs]}}
        job = _Job(
            body["input_ids"],
            sampling["max_new_tokens"],
            sampling["min_new_tokens"],
            sampling["stop_token_ids"],
            sampling["temperature"],
            sampling["sampling_seed"],
            adapter,
            sampling["top_k"] if body.get("return_sampling_mask") else None,
        )
        if body.get("return_sampling_mask") and sampling["top_k"] < 1:
            return 400, {"error": {"message": "return_sampling_mask requires a finite top_k"}}
        label = self.label
        if not self.run(job):
            return None
        pairs = [[logprob, token, None] for logprob, token in zip(job.raw, job.ids, strict=True)]
        masks = {"output_token_sampling_mask": job.kept, "output_token_sampling_logprobs": job.logprobs}
        facts = masks if body.get("return_sampling_mask") else {}
        facts |= {"finish_reason": {"type": job.reason}, "output_token_logprobs": pairs, "weight_version": label}
        return 200, {"text": "", "output_ids": job.ids, "meta_info": facts}


def completion(choice):
    """Return an answer of vLLM with one response."""
    return {"model": "model", "usage": {}, "choices": [{"index": 0, "text": ""} | choice]}


class Text(str):
    """A plain text as answer."""


def send(handler, status, body):
    """Send a JSON answer; an empty one for None."""
    data = b"" if body is None else body.encode() if isinstance(body, Text) else json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def status(code, text="broken"):
    """A fault: answer with a status."""
    return lambda handler: send(handler, code, {"error": text})


def sampled(kind, ids, logprobs, reason):
    """Return an answer with sampled tokens."""
    if kind == "vllm":
        return completion({"finish_reason": reason, "token_ids": ids, "logprobs": {"token_logprobs": logprobs}})
    pairs = [[logprob, token, None] for token, logprob in itertools.zip_longest(ids, logprobs)]
    return {"meta_info": {"finish_reason": {"type": reason}, "output_token_logprobs": pairs}}


def body(value):
    """A fault: answer with another JSON value."""
    return lambda handler: send(handler, 200, value)


def late(handler):
    """A fault: the request reaches the decoder after the server was paused."""
    handler.answer_once_paused()


def disconnect(handler):
    """A fault: close the connection without an answer."""
    handler.close_connection = True


def endless(handler):
    """A fault: an answer without an end."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    while True:
        handler.wfile.write(b"10000\r\n" + bytes(65536) + b"\r\n")


def compressed(handler):
    """A fault: a compressed answer, which could be much larger than what is sent."""
    data = gzip.compress(b"{}")
    handler.send_response(200)
    handler.send_header("Content-Encoding", "gzip")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def trickle(handler):
    """A fault: an answer that is never complete, although bytes keep coming."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.05)


def hang(handler):
    """A fault: never answer."""
    time.sleep(60)
    handler.close_connection = True


def main(kind, port, model):
    """Serve the weights of a folder, and leave a child process running, as real servers have several processes."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    server = FakeServer(kind, Table(logits_of(model)), port=int(port))
    print(f"serving at {server.url}, child {child.pid}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])


KINDS = {"vllm": Vllm, "sglang": Sglang}


def prompts(count=4):
    return SequenceSample.from_sequences(
        [f"p{i}" for i in range(count)], {"prompt_ids": [[[i + 1, i + 1]] for i in range(count)]}
    )
