"""Servers that the run starts: they end with it, however it ends, and are started again when they die."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import torch

from realign.api import GenerationConfig, Request
from realign.errors import ConfigError, TransientError
from realign.samplers.servers.sglang import Sglang
from realign.samplers.servers.vllm import Vllm
from tests.processes import until
from tests.samplers.servers import fake_server
from tests.samplers.servers.fake_server import random_table

FAKE = f"{{python}} {Path(fake_server.__file__)} vllm {{port}} {{model}}"
START = random_table(0)


def started(log):
    """Process ids of the server of a log and of its child."""
    text = log.read_text()
    child = psutil.Process(int(re.findall(r"child (\d+)", text)[-1]))
    return child.parent().pid, child.pid


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def request():
    return Request("a", 0, torch.tensor([1, 2]), GenerationConfig(max_new_tokens=5), 3)


def test_servers_are_started_sampled_from_and_ended(tmp_path):
    sampler = Vllm(launch=FAKE, servers=2, weights_dir=str(tmp_path)).open("actor", START, None)
    (folder,) = tmp_path.iterdir()
    pids = [pid for log in sorted(folder.glob("*.log")) for pid in started(log)]
    assert len(set(pids)) == 4
    assert len(sampler.submit(request()).result(30).ids)
    sampler.close()
    until(lambda: all(map(gone, pids)))
    assert not folder.exists()


@pytest.mark.slow
def test_a_server_that_was_killed_is_started_again_with_the_current_weights(tmp_path):
    sampler = Vllm(launch=FAKE, weights_dir=str(tmp_path)).open("actor", START, None)
    try:
        new = random_table(1)
        sampler.update(new, 1)
        (log,) = next(tmp_path.iterdir()).glob("*.log")
        server, child = started(log)
        os.kill(server, signal.SIGKILL)
        done = sampler.submit(request()).result(60)
        assert set(done.versions.tolist()) == {1}
        before = torch.tensor([2, *done.ids[:-1].tolist()])
        torch.testing.assert_close(done.logprobs, new.logits_VV.log_softmax(-1)[before, done.ids])
        until(lambda: gone(child))
        assert started(log)[0] != server
    finally:
        sampler.close()


@pytest.mark.slow
def test_servers_end_when_the_run_is_killed(tmp_path):
    code = f"""
        from realign.samplers.servers.vllm import Vllm
        from tests.samplers.servers.fake_server import random_table
        import time
        sampler = Vllm(launch={FAKE!r}, weights_dir={str(tmp_path / "weights")!r}).open("actor", random_table(0), None)
        print("open", flush=True)
        time.sleep(600)
    """
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "open\n"
    (log,) = next((tmp_path / "weights").iterdir()).glob("*.log")
    pids = started(log)
    run.kill()
    run.wait()
    until(lambda: all(map(gone, pids)))
    run.stdout.close()


def test_each_server_gets_its_devices(tmp_path):
    write = f"import os; open('{tmp_path}/' + os.environ['REALIGN_SERVER_INDEX'], 'w')"
    launch = f"{{python}} -c \"{write}.write(os.environ['CUDA_VISIBLE_DEVICES'])\""
    spec = Vllm(launch=launch, servers=2, devices=["0,1", "2,3"], restarts=0, weights_dir=str(tmp_path / "weights"))
    with pytest.raises(TransientError, match="the server ended 1 times"):
        spec.open("actor", START, None)
    assert [(tmp_path / name).read_text() for name in ("0", "1")] == ["0,1", "2,3"]


@pytest.mark.parametrize(
    ("kind", "settings", "rank", "words"),
    [
        (Vllm, {}, None, []),
        (Vllm, {"sleep_level": 1}, None, ["--enable-sleep-mode"]),
        (Vllm, {}, 5, ["--enable-lora", "--max-loras", "1", "--max-cpu-loras", "2", "--max-lora-rank", "8"]),
        (Sglang, {"sleep_level": 2}, None, ["--enable-memory-saver"]),
        (Sglang, {"launch": "serve {model}", "sleep_level": 2}, 5, []),
    ],
)
def test_the_usual_command_has_the_arguments_that_settings_need(kind, settings, rank, words):
    plain = kind(**{name: x for name, x in settings.items() if name == "launch"})
    command = kind(**settings).command_line("where", Path("m"), 1, rank)
    assert command == [*plain.command_line("where", Path("m"), 1), *words]


def test_a_server_that_does_not_start_ends_the_run_with_its_output(tmp_path):
    spec = Vllm(launch="{python} -c \"print('no-such-model')\"", restarts=1, weights_dir=str(tmp_path))
    with pytest.raises(TransientError, match=r"(?s)models\.actor\.sampler: the server ended 2 times.*no-such-model"):
        spec.open("actor", START, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"urls": ["127.0.0.1:8000"]}, r"where.urls: '127.0.0.1:8000' is no valid URL. Use the form http://host:port."),
        ({"urls": ["http://user:pass@host:1"]}, "a URL contains credentials or parameters"),
        ({"urls": ["http://host:1"]}, "http://host:1 is on another machine. Set weights_dir"),
        ({"urls": ["http://127.0.0.1:1"], "launch": "x"}, "where.launch: it applies to servers that the run starts"),
        ({}, "where: vllm is not installed in the environment of the run. Set where.python"),
        ({"python": "/no/python"}, "where.python='/no/python': no such file"),
        ({"launch": "serve {model} {prot}"}, "no valid command .'prot'.. Valid placeholders: {model}, {port}"),
        ({"launch": "serve 'x"}, "No closing quotation"),
        ({"launch": "x", "devices": ["0"], "servers": 2}, "where.devices=.*has 1 values, but where.servers=2"),
        ({"urls": ["http://127.0.0.1:1"], "devices": ["0"]}, "where.devices: it applies to servers that the run"),
    ],
)
def test_wrong_settings_are_rejected_before_weights_are_read(settings, message):
    with pytest.raises(ConfigError, match=message.replace("{", r"\{")):
        Vllm(**settings).check("where")
