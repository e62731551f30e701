from __future__ import annotations

import pytest
import torch

from realign.config import build_experiment, compose
from realign.engines import SharedModel, TransformersModel
from realign.errors import ConfigError
from realign.functional.rounding import active_rounding
from realign.models import Backend
from realign.models.device import DType, disable_tf32, pick_device, products_dtype
from realign.models.network import kernels
from tests.config_parts import MUST_BE_GIVEN
from tests.flash_stand_in import install_flash
from tests.tiny import save_tiny

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def tf32():
    """Restore the flags of TF32 and of deterministic algorithms."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture
def hopper(monkeypatch):
    """Pretend that torch has a CUDA device of compute capability 9.0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize(
    ("dtype", "device", "capability", "expected"),
    [
        (DType.auto, CPU, (9, 0), torch.float32),
        (DType.auto, CUDA, (9, 0), torch.bfloat16),
        (DType.auto, CUDA, (8, 0), torch.bfloat16),
        (DType.auto, CUDA, (7, 5), torch.float32),
        (DType.float32, CUDA, (9, 0), torch.float32),
        (DType.bfloat16, CPU, (0, 0), torch.bfloat16),
        (DType.bfloat16, CUDA, (7, 5), torch.bfloat16),
    ],
)
def test_the_default_precision_follows_the_device(monkeypatch, dtype, device, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert products_dtype(dtype, device) == expected


def test_models_on_cuda_compute_without_tf32(tf32):
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    for flag in flags:
        flag.allow_tf32 = True
    disable_tf32(CPU)
    assert all(flag.allow_tf32 for flag in flags)
    disable_tf32(CUDA)
    assert not any(flag.allow_tf32 for flag in flags)


def test_a_loaded_model_reads_its_precision_from_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr("realign.models.device.supports_bfloat16", lambda device: True)
    engine = TransformersModel(str(save_tiny(tmp_path / "model"))).load("actor", seed=0).engine
    with engine.network.autocast():
        assert active_rounding() is not None  # bfloat16 of a CPU


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), "bfloat16"), ((7, 0), "float32")])
def test_the_launch_table_knows_precision_and_kernel(monkeypatch, hopper, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    compute = TransformersModel("x").facts().compute
    assert (compute.device, compute.precision) == ("cuda", expected)


@pytest.mark.parametrize(
    ("name", "package"),
    [("grpo", "flash_attn"), ("ppo_sentiment", "flash_attn_interface"), ("reward_model", "flash_attn")],
)
def test_presets_reach_flash_where_it_is_installed(monkeypatch, hopper, name, package):
    install_flash(monkeypatch, package)
    experiment = build_experiment(compose([f"experiment={name}", *MUST_BE_GIVEN.get(name, [])]))
    specs = [spec for spec in experiment.models.values() if not isinstance(spec, SharedModel)]
    assert specs
    expected = "flash-attn 2" if package == "flash_attn" else "flash-attn 3"
    assert {(c.precision, c.attention) for c in (spec.facts().compute for spec in specs)} == {("bfloat16", expected)}


@pytest.mark.parametrize(
    ("settings", "precision"), [({"attention": Backend.sdpa}, "bfloat16"), ({"dtype": DType.float32}, "float32")]
)
def test_another_kernel_or_precision_can_be_set_on_a_gpu_with_flash(monkeypatch, hopper, settings, precision):
    install_flash(monkeypatch, "flash_attn")
    compute = TransformersModel("x", **settings).facts().compute
    assert (compute.precision, compute.attention) == (precision, "sdpa")  # flash-attn has no kernels for float32


def test_a_missing_package_is_named_with_a_fix(tmp_path, monkeypatch):
    path = str(save_tiny(tmp_path / "model"))
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    for backend in (Backend.flash, Backend.flash3, Backend.hub):
        with pytest.raises(ConfigError, match=rf"models\.actor\.attention={backend.value}: needs .*Or set .*=auto"):
            TransformersModel(path, attention=backend).check("actor")


def test_devices():
    assert pick_device("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        assert pick_device("auto") == torch.device("cpu")
        with pytest.raises(ConfigError, match="device='cuda:1': torch finds no CUDA device"):
            pick_device("cuda:1")
    with pytest.raises(ConfigError, match=r"device='gpu': unknown device"):
        pick_device("gpu")
    with pytest.raises(ConfigError, match=r"device='mps': MPS has no float64, .* Use cpu\."):
        pick_device("mps")
